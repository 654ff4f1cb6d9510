"""The control channel on a network: encrypted, and open to engines that this server started only.

Each start of an engine gets a key pair of its own (CurveZMQ). A peer without one of them does not
get as far as a message, and a key speaks for the engine it was made for.
"""

from __future__ import annotations

from typing import Any, Final

import zmq
import zmq.auth.asyncio

from autellix.errors import ConfigError

from ..channel import ChannelCurve

KEYS_MAX: Final = 4096  # starts of engines; the oldest key is forgotten first
_USER: Final = "User-Id"


class EngineKeys:
    """The keys of one server.

    Raises:
        ConfigError: this build of ZeroMQ cannot encrypt.
    """

    def __init__(self, context: Any) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "launcher: ray is not allowed, as this build of ZeroMQ has no CURVE and the "
                "control channel would cross the network in the clear; allowed is local"
            )
        public, self._secret = zmq.curve_keypair()
        self._public = public.decode()
        self._owners: dict[bytes, str] = {}  # public key → engine
        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq's signature
        """Return whether a peer with this public key may connect."""
        return key in self._owners

    def protect(self, router: Any) -> None:
        """Have what the router binds from now on be encrypted."""
        router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        router.setsockopt(zmq.CURVE_SERVER, 1)

    def make(self, engine_id: str) -> ChannelCurve:
        """Return the keys of one start of an engine."""
        public, secret = zmq.curve_keypair()
        while len(self._owners) >= KEYS_MAX:
            del self._owners[next(iter(self._owners))]
        self._owners[public] = engine_id
        return ChannelCurve(self._public, public.decode(), secret.decode())

    def owns(self, frame: Any, engine_id: str) -> bool:
        """Return whether who sent a frame may speak for this engine."""
        try:
            key = frame.get(_USER)
        except zmq.ZMQError:
            return True  # it came by the unix socket, whose folder is private
        return self._owners.get(key.encode()) == engine_id

    def forget(self, engine_id: str) -> None:
        """Let an engine that is gone not come back."""
        for key in [key for key, owner in self._owners.items() if owner == engine_id]:
            del self._owners[key]

    def close(self) -> None:
        """End the authenticator."""
        self._authenticator.stop()

"""An engine that somebody else runs, given by its address: any vLLM, with or without our channel.

It is watched like our own, but never started or killed: when it does not answer it is STARTING (it
may be on its way), when it stops answering it is FROZEN, and READY again when it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final
from urllib.parse import urlsplit

from autellix.errors import ConfigError

from ..types import EngineAddress, EngineState
from .member import Member
from .probe import ask

_log = logging.getLogger("autellix.pool")

_ABSENT_POLL_S: Final = 1.0


def parse_engine_url(url: str) -> EngineAddress:
    """Return the address in ``http://host:port``.

    Raises:
        ConfigError: it is something else.

    >>> parse_engine_url("http://10.0.0.7:8001")
    EngineAddress(uds=None, host='10.0.0.7', port=8001)
    """
    allowed = "allowed is http://HOST:PORT, without a path"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"engine-url: {url!r}: {error}; {allowed}") from error
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise ConfigError(f"engine-url: {url!r}; {allowed}")
    return EngineAddress(None, parts.hostname, port or 80)


class RemoteEngine(Member):
    """One vLLM at a URL."""

    async def run(self) -> None:
        """Watch the engine until `stop`."""
        stopping = asyncio.create_task(self._stopping.wait())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((stopping, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching  # an error in it is a bug, and is to be seen
        self._enter(EngineState.DEAD)

    async def _watch(self) -> None:
        """Follow the engine up and down."""
        # Its own end is looked for too: a wait that is just over swallows a cancellation.
        while not self._stopping.is_set():
            answer = await ask(self._address, "/health", api_key=self._api_key, deadline_s=5.0)
            if answer is None or answer.status != 200:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _ABSENT_POLL_S)
                continue
            _log.info("engine %s at %s:%d is ready", self._engine_id, *self._address[1:])
            self._vitals.begin()
            self._enter(EngineState.READY)
            reason = None
            while reason is None and not self._stopping.is_set():
                reason = await self._vitals.look(self._address, self._api_key)
            if reason is None:
                return
            _log.error("engine %s is frozen or gone: %s", self._engine_id, reason)
            self._enter(EngineState.FROZEN)

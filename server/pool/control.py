"""The gateway's end of the control channel: one ROUTER for all engines.

An engine is who its first message says it is, and from then on that peer speaks for this engine
and no other. Reports are numbered by boot: a duplicate is ignored, a gap is asked for again, and
what the engine no longer has is counted as lost, never guessed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from autellix.errors import ConfigError

from ..channel import (
    CHANNEL_VERSION,
    MESSAGE_BYTES_MAX,
    Accounting,
    Bye,
    CallReport,
    ChannelCurve,
    DownMessage,
    Heartbeat,
    Hello,
    HelloWanted,
    PolicyWanted,
    Resend,
    SessionEnded,
    ToolNoted,
    decode_up,
    digest_settings,
    encode,
)
from ..clock import Clock
from .engine_keys import EngineKeys

logger = logging.getLogger(__name__)

PEERS_MAX: Final = 1_024
UNKNOWN_MAX: Final = 1_024  # peers that were asked for a hello
GAP_REPORTS_MAX: Final = 10_000  # an engine's ring holds no more
RESEND_AFTER_S: Final = 0.5
POLICY_AGAIN_S: Final = 1.0
POLICY_REFUSALS_MAX: Final = 5  # then an engine is left with its own
RESENDS_MAX: Final = 5
PROGRAMS_A_MESSAGE: Final = 1_000
RESTART_AFTER_S: Final = 1.0

OnReport = Callable[[str, str, CallReport], None]
OnHeartbeat = Callable[[str, Heartbeat], None]


@dataclass
class Peer:
    """One engine core, one boot of it.

    Attributes:
        hello: Its first message, or the newest one.
        heartbeat: The newest one, with the time it came.
        lost: Reports that will never come.
        is_told: Whether it has answered the newest policy that it was sent.
        told_s: When that was sent last.
        told_step: The engine's step then, as far as known.
        refusals: How often it has answered the newest policy with another one.
    """

    hello: Hello
    identity: bytes
    heartbeat: Heartbeat | None = None
    heard_s: float = 0.0
    next_seq: int = 1  # all before it are here, or lost
    early: dict[int, CallReport] = field(default_factory=dict)  # came before their turn
    asked_s: float = 0.0
    asks: int = 0
    lost: int = 0
    duplicates: int = 0
    newest_seq: int = 0  # the largest number known to exist
    is_told: bool = True
    told_s: float = 0.0
    told_step: int = 0
    refusals: int = 0

    def view(self, now_s: float) -> dict[str, Any]:
        """Return what the channel knows of the engine, for people and dashboards."""
        return {
            "channel": msgspec.to_builtins(self.hello),
            "load": msgspec.to_builtins(self.heartbeat),
            "reports_lost": self.lost,
            "heard_age_s": round(now_s - self.heard_s, 3),
        }


class ControlServer:
    """See the module.

    Args:
        endpoint: ``ipc://`` in a private folder; TCP is for encrypted networks only.
        clock: The gateway's.
        on_report: Called once for each report, with engine id and boot id, in the order of their
            numbers.
        on_heartbeat: Called with each heartbeat; None: nobody asks.
        engine_ids: Engines that may speak; None: any.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Clock,
        on_report: OnReport,
        on_heartbeat: OnHeartbeat | None = None,
        *,
        engine_ids: Iterable[str] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self.foreign = 0  # messages that claimed to be from another engine or boot
        self.mistakes = 0  # of ours, in taking a message; each is in the log
        self._clock = clock
        self._on_report = on_report
        self._on_heartbeat = on_heartbeat
        self._engine_ids = None if engine_ids is None else set(engine_ids)
        self._policy: PolicyWanted | None = None  # None: each engine's own, as it was started
        self._peers: dict[bytes, Peer] = {}
        self._lost_before = 0
        self._unknown: dict[bytes, float] = {}
        self._context: zmq.asyncio.Context | None = None
        self._router: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._network: EngineKeys | None = None
        self._network_endpoint = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
        """
        self._context = zmq.asyncio.Context()
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 1_000)
        router.setsockopt(zmq.RCVHWM, 10_000)
        router.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        try:
            router.bind(self.endpoint)
        except zmq.ZMQError:
            router.close(0)
            self._context.term()
            raise
        self._router = router
        self._tasks = [
            asyncio.create_task(self._keep(self._receive), name="control-receive"),
            asyncio.create_task(self._keep(self._chase), name="control-chase"),
        ]

    def listen_on_network(self, host: str) -> str:
        """Listen on a free TCP port as well, encrypted, for engines that have our keys only.

        Returns:
            The endpoint for `curve_for` engines.

        Raises:
            ConfigError: this build of ZeroMQ cannot encrypt, or the address is not ours.
        """
        if self._network is None:
            assert self._context is not None, "start() comes first"
            self._network = EngineKeys(self._context)
            self._network.protect(self._router)
            try:
                port = self._router.bind_to_random_port(f"tcp://{host}")
            except zmq.ZMQError as error:
                raise ConfigError(f"ray_host: {host}: {error}") from None
            self._network_endpoint = f"tcp://{host}:{port}"
        return self._network_endpoint

    def curve_for(self, engine_id: str) -> ChannelCurve:
        """Return new keys for one engine, with which it may speak for itself and no other."""
        assert self._network is not None, "listen_on_network() comes first"
        return self._network.make(engine_id)

    async def close(self) -> None:
        """Stop listening and forget the peers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._network is not None:
            self._network.close()
            self._network = None
        if self._router is not None:
            self._router.close(0)
            self._router = None
        if self._context is not None:
            self._context.term()
            self._context = None
        self._peers.clear()

    def peers(self) -> Mapping[str, Peer]:
        """Return the engines that have said hello, by engine id; the newest boot of each."""
        return {peer.hello.engine_id: peer for peer in self._peers.values()}

    @property
    def lost(self) -> int:
        """Reports that will never come, over all boots of all engines."""
        return self._lost_before + sum(peer.lost for peer in self._peers.values())

    async def forget_programs(self, program_ids: Iterable[str]) -> None:
        """Tell every engine that these programs are over."""
        names = list(program_ids)
        for start in range(0, len(names), PROGRAMS_A_MESSAGE):
            part = tuple(names[start : start + PROGRAMS_A_MESSAGE])
            await self._to_all(SessionEnded(program_ids=part))

    async def note_tool(self, program_id: str, tool: str | None) -> None:
        """Tell the engines that keep KV through gaps what a program waits for; None: no more."""
        message = ToolNoted(program_id=program_id, tool=tool)
        for identity, peer in list(self._peers.items()):
            if peer.hello.policy == "adaptive":
                await self._send(identity, message)

    def admit(self, engine_id: str) -> None:
        """Let another engine speak."""
        if self._engine_ids is not None:
            self._engine_ids.add(engine_id)

    def dismiss(self, engine_id: str) -> None:
        """An engine is gone for good: it may not speak any more, and its boots are over."""
        if self._engine_ids is not None:
            self._engine_ids.discard(engine_id)
        if self._network is not None:
            self._network.forget(engine_id)
        for identity in [i for i, p in self._peers.items() if p.hello.engine_id == engine_id]:
            self._retire(identity)

    async def set_policy(self, settings: Mapping[str, Any]) -> None:
        """Tell every engine to order by these settings (``server.policy.config``) from now on.

        An engine that starts later, or again, is told when it says hello, and one that a message
        did not reach is told again, see `_tell_again`.
        """
        self._policy = PolicyWanted(settings=dict(settings))
        for peer in list(self._peers.values()):
            peer.refusals = 0
            await self._tell(peer)

    async def _to_all(self, message: DownMessage) -> None:
        for identity in list(self._peers):
            await self._send(identity, message)

    async def _send(self, identity: bytes, message: DownMessage) -> None:
        """Send, or drop: a peer that does not read must not hold up the gateway."""
        if self._router is None:
            return
        try:
            await _at_once(self._router.send_multipart([identity, encode(message)], zmq.NOBLOCK))
        except zmq.ZMQError as error:
            logger.debug("control message to %r dropped: %s", identity, error)

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` for ever: the channel must not fall silent over one mistake of ours."""
        while True:
            try:
                await work()
            except Exception:
                self.mistakes += 1
                logger.exception("a mistake in the control channel; it goes on")
                await asyncio.sleep(RESTART_AFTER_S)

    async def _receive(self) -> None:
        while True:
            frames = await self._router.recv_multipart(copy=False)
            if len(frames) != 2:
                self.malformed += 1
                continue
            identity = frames[0].bytes
            try:
                message = decode_up(frames[1].bytes)
            except msgspec.MsgspecError:
                self.malformed += 1
                continue
            if isinstance(message, Hello) and not self._may_be(frames[1], message.engine_id):
                self.foreign += 1
                continue
            await self.handle(identity, message)

    def _may_be(self, frame: Any, engine_id: str) -> bool:
        return self._network is None or self._network.owns(frame, engine_id)

    async def handle(self, identity: bytes, message: Any) -> None:
        """Take one message of a peer."""
        now_s = self._clock.now_s()
        if isinstance(message, Hello):
            if self._greet(identity, message, now_s) and identity in self._peers:
                await self._tell(self._peers[identity])
            return
        peer = self._peers.get(identity)
        if peer is None:
            await self._ask_for_hello(identity, now_s)
            return
        if message.boot_id != peer.hello.boot_id:
            self.foreign += 1
            return
        peer.heard_s = now_s
        if isinstance(message, Accounting):
            self._account(peer, message)
        elif isinstance(message, Heartbeat):
            peer.heartbeat = message
            peer.newest_seq = max(peer.newest_seq, message.last_seq)
            if self._on_heartbeat is not None:
                self._on_heartbeat(peer.hello.engine_id, message)
            await self._tell_again(peer, message.step, now_s)
        elif isinstance(message, Bye):
            self._retire(identity)
            return
        if peer.next_seq <= peer.newest_seq:
            await self._ask_again(peer, now_s)

    def _greet(self, identity: bytes, hello: Hello, now_s: float) -> bool:
        """Take a hello; return whether it is the first of this boot."""
        engine_id = hello.engine_id
        if self._engine_ids is not None and engine_id not in self._engine_ids:
            self.foreign += 1
            return False
        if hello.version != CHANNEL_VERSION:
            logger.warning(
                "engine %s speaks version %d of the control channel, not %d; it is ignored",
                *(engine_id, hello.version, CHANNEL_VERSION),
            )
            return False
        known = self._peers.get(identity)
        if known is not None and known.hello.engine_id != engine_id:
            self.foreign += 1  # a peer speaks for one engine
            return False
        self._unknown.pop(identity, None)
        if known is not None and known.hello.boot_id == hello.boot_id:
            known.hello = hello
            known.heard_s = now_s
            known.is_told = True
            return False
        same = [i for i, peer in self._peers.items() if peer.hello.engine_id == engine_id]
        peer = Peer(hello, identity, heard_s=now_s)
        for other in same:
            old = self._peers[other]
            if old.hello.boot_id == hello.boot_id:  # it has reconnected under another name
                peer = self._peers.pop(other)
                peer.hello, peer.identity, peer.heard_s = hello, identity, now_s
            else:
                self._retire(other)
        if len(self._peers) < PEERS_MAX:
            self._peers[identity] = peer
        return True

    def _retire(self, identity: bytes) -> None:
        """This boot of an engine is over: what it has not reported by now is lost."""
        peer = self._peers.pop(identity)
        self._give_up(peer, peer.newest_seq + 1)
        self._lost_before += peer.lost

    async def _ask_for_hello(self, identity: bytes, now_s: float) -> None:
        """A peer from before a restart of the gateway, or a stranger: ask once a second at most."""
        asked_s = self._unknown.get(identity)
        if asked_s is not None and now_s - asked_s < 1.0:
            return
        if asked_s is None and len(self._unknown) >= UNKNOWN_MAX:
            self._unknown.pop(next(iter(self._unknown)))
        self._unknown[identity] = now_s
        await self._send(identity, HelloWanted())

    async def _tell(self, peer: Peer) -> None:
        """Send the policy that is wanted; its answer is a hello."""
        if self._policy is None:
            return
        peer.is_told = False
        peer.told_s = self._clock.now_s()
        peer.told_step = peer.heartbeat.step if peer.heartbeat is not None else 0
        await self._send(peer.identity, self._policy)

    async def _tell_again(self, peer: Peer, step: int, now_s: float) -> None:
        """Send the policy again if that message was lost, once a second at most.

        It was if the engine has made a step since, has not answered, or goes by another policy. An
        engine reads its messages when it makes a step: one without work is not to be told for hours
        what it will read once. One that answers again and again with another policy refuses ours.
        """
        wanted = self._policy
        if wanted is None or step <= peer.told_step or now_s - peer.told_s < POLICY_AGAIN_S:
            return
        if peer.is_told:
            if peer.refusals >= POLICY_REFUSALS_MAX or _goes_by(peer.hello, wanted.settings):
                return
            peer.refusals += 1
            if peer.refusals >= POLICY_REFUSALS_MAX:
                logger.warning(
                    "engine %s keeps its policy %s and is not asked again for %s; its log says why",
                    *(peer.hello.engine_id, peer.hello.policy, wanted.settings),
                )
                return
        await self._tell(peer)

    def _account(self, peer: Peer, message: Accounting) -> None:
        for report in message.reports:
            peer.newest_seq = max(peer.newest_seq, report.seq)
            if report.seq < peer.next_seq or report.seq in peer.early:
                peer.duplicates += 1
            elif report.seq < peer.next_seq + GAP_REPORTS_MAX:
                peer.early[report.seq] = report
            else:
                # Far ahead of what is missing: the ring cannot hold that any more.
                self._give_up(peer, report.seq - GAP_REPORTS_MAX + 1)
                peer.early[report.seq] = report
        self._deliver(peer)

    def _deliver(self, peer: Peer) -> None:
        while peer.next_seq in peer.early:
            report = peer.early.pop(peer.next_seq)
            peer.next_seq += 1
            peer.asks = 0
            self._on_report(peer.hello.engine_id, peer.hello.boot_id, report)

    async def _ask_again(self, peer: Peer, now_s: float) -> None:
        """Ask for the first gap, unless that was done just now; give up after some times."""
        if peer.asks and now_s - peer.asked_s < RESEND_AFTER_S:
            return
        last = min(peer.early, default=peer.newest_seq + 1) - 1
        if peer.asks >= RESENDS_MAX:
            self._give_up(peer, last + 1)
            self._deliver(peer)
            return
        peer.asks += 1
        peer.asked_s = now_s
        await self._send(
            peer.identity,
            Resend(boot_id=peer.hello.boot_id, first_seq=peer.next_seq, last_seq=last),
        )

    def _give_up(self, peer: Peer, next_seq: int) -> None:
        """Go on at ``next_seq``; what is missing before it is lost."""
        for seq in sorted(seq for seq in peer.early if seq < next_seq):
            peer.lost += seq - peer.next_seq
            peer.next_seq = seq
            self._deliver(peer)
        if peer.next_seq < next_seq:
            lost = next_seq - peer.next_seq
            peer.lost += lost
            peer.next_seq = next_seq
            logger.warning("engine %s: %d call reports are lost", peer.hello.engine_id, lost)
        peer.asks = 0

    async def _chase(self) -> None:
        """Look for gaps that no message reminds us of."""
        while True:
            await asyncio.sleep(RESEND_AFTER_S)
            now_s = self._clock.now_s()
            for peer in list(self._peers.values()):
                if peer.next_seq <= peer.newest_seq:
                    await self._ask_again(peer, now_s)


def _goes_by(hello: Hello, settings: dict[str, Any]) -> bool:
    """Return whether an engine orders by ``settings``; an earlier build tells their name only."""
    if hello.settings_digest is not None:
        return hello.settings_digest == digest_settings(settings)
    return bool(settings.get("policy", hello.policy) == hello.policy)


async def _at_once(sent: Awaitable[Any] | None) -> None:
    """Await a send that is done already, whatever zmq.asyncio makes of NOBLOCK."""
    if sent is not None:
        await sent

"""Start, heartbeat and end of sessions, and tool hints, sent from one daemon thread.

All of it is optional for correctness: the server opens a session at its first call, and a lease
ends it. So a message is queued, never waited for; the queue is bounded and drops the oldest; a
server that knows no sessions is left alone, and one that does not answer is asked again after 1 to
60 s.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from . import wire
from .config import Origin
from .dialects import final_request
from .frameworks import framework_here
from .sessions import METADATA_BYTES_MAX, NAME_CHARS_MAX

if TYPE_CHECKING:
    import http.client

    from .runtime import Runtime
    from .sessions import Session

QUEUE_MAX: Final = 1000
PEERS_MAX: Final = 64
OPEN_MAX: Final = 10_000
BACKOFF_S_MIN: Final = 1.0
BACKOFF_S_MAX: Final = 60.0
EXIT_FLUSH_S: Final = 0.5
REPLY_BYTES_MAX: Final = 65_536


class Message(NamedTuple):
    """One request to a server."""

    method: str
    path: str
    body: dict[str, Any] | None
    authorization: str | None
    session_id: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})


class Peer:
    """One server: what it is, when to ask it again, and what waits for it."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.state = "unknown"
        self.backoff_s = BACKOFF_S_MIN
        self.retry_at_s = 0.0
        self.lease_s = wire.LEASE_S
        self.beat_at_s = 0.0
        self.pending: deque[Message] = deque()
        self.open: OrderedDict[str, tuple[dict[str, Any], str | None]] = OrderedDict()
        self.connection: http.client.HTTPConnection | None = None

    @property
    def is_silent(self) -> bool:
        """Whether it must not be talked to any more: no server of ours, or it refused us."""
        return self.state in ("plain", "denied")

    def due_s(self) -> float:
        """Return when there is something to do, by the monotonic clock."""
        if self.is_silent:
            return float("inf")
        if self.pending:
            return self.retry_at_s
        return max(self.beat_at_s, self.retry_at_s) if self.open else float("inf")


class Lifecycle:
    """The background sender. Owns one daemon thread, which starts at the first message."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._peers: dict[Origin, Peer] = {}
        self._wake = threading.Condition()
        self._worker: threading.Thread | None = None
        self._busy = False
        self._stopping = False
        self.dropped = 0

    # -- what the caller's thread does: queue, and nothing else ------------------------------------

    def open(self, session: Session, origin: Origin) -> None:
        """Queue the start of ``session`` on the server at ``origin``."""
        body = self._describe(session)
        authorization = self._authorization(session, origin)
        with self._wake:
            peer = self._peer(origin)
            if peer is None:
                return
            peer.open[session.id] = (body, authorization)
            if len(peer.open) > OPEN_MAX:
                peer.open.popitem(last=False)
            self._queue(peer, _start(session.id, body, authorization))

    def end(self, session: Session, reason: str) -> None:
        """Queue the end of ``session`` on every server that knows it."""
        with self._wake:
            for origin in list(session.peers):
                peer = self._peer(origin)
                if peer is None:
                    continue
                peer.open.pop(session.id, None)
                authorization = self._authorization(session, origin)
                if self._runtime.is_dynamo:
                    last = final_request(session)
                    if last is not None:
                        path, body, headers = last
                        message = Message("POST", path, body, authorization, None, headers)
                        self._queue(peer, message)
                    continue
                path = f"{wire.API_PREFIX}/sessions/{session.id}?reason={reason}"
                self._queue(peer, Message("DELETE", path, None, authorization, session.id))

    def tool(self, session: Session, body: dict[str, Any]) -> None:
        """Queue a tool hint of ``session``."""
        with self._wake:
            for origin in list(session.peers):
                peer = self._peer(origin)
                if peer is not None:
                    authorization = self._authorization(session, origin)
                    path = f"{wire.API_PREFIX}/sessions/{session.id}/tools"
                    self._queue(peer, Message("POST", path, body, authorization))

    def flush(self, timeout_s: float) -> bool:
        """Return whether everything queued was sent within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            while self._busy or any(p.pending and not p.is_silent for p in self._peers.values()):
                left = deadline - time.monotonic()
                if left <= 0 or not self._runs():
                    return False
                self._wake.notify_all()
                self._wake.wait(min(left, 0.05))
        return True

    def stop(self, timeout_s: float) -> None:
        """Flush and end the thread; a message queued later starts another."""
        self.flush(timeout_s)
        with self._wake:
            worker, self._worker = self._worker, None
            self._stopping = True
            self._wake.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout_s)
        with self._wake:
            self._stopping = False
        atexit.unregister(self._at_exit)

    def disown(self) -> None:
        """Forget the exit handler, in a forked child: the thread and the locks are the parent's."""
        atexit.unregister(self._at_exit)

    def peer_states(self) -> dict[str, str]:
        """Return what is known of each server."""
        return {f"{o.scheme}://{o.host}:{o.port}": p.state for o, p in list(self._peers.items())}

    def _describe(self, session: Session) -> dict[str, Any]:
        """Return what a start says of a session; what no server would take is left out."""
        name = session.name and "".join(c for c in session.name if c.isprintable())
        conversation = session.conversation
        if conversation is not None and not wire.is_valid_id(conversation):
            conversation = None
        metadata = session.metadata or None
        try:
            size = len(json.dumps(metadata, default=str).encode())
            why = f"is above {METADATA_BYTES_MAX} bytes" if size > METADATA_BYTES_MAX else ""
        except Exception as error:  # noqa: BLE001 - a key or a str() of the user's, in the call path
            why = f"is no JSON ({error!r})"
        if why:
            self._runtime.warn("metadata", f"metadata {why} and is not sent")
            metadata = None
        said = {
            "pid": os.getpid(),
            "name": name[:NAME_CHARS_MAX] if name else None,
            "parent": session.parent.id if session.parent is not None else None,
            "conversation": conversation,
            "ttl_s": session.ttl_s,
            "metadata": metadata,
            "framework": framework_here(),
        }
        return {key: value for key, value in said.items() if value is not None}

    def _authorization(self, session: Session, origin: Origin) -> str | None:
        key = self._runtime.config.api_key
        return f"Bearer {key}" if key else session.peers.get(origin)

    def _peer(self, origin: Origin) -> Peer | None:
        peer = self._peers.get(origin)
        if peer is None and len(self._peers) < PEERS_MAX:
            peer = self._peers[origin] = Peer(origin)
        return None if peer is None or peer.is_silent else peer

    def _queue(self, peer: Peer, message: Message) -> None:
        """Add a message; the lock is held."""
        if len(peer.pending) >= QUEUE_MAX:
            peer.pending.popleft()
            self.dropped += 1
        peer.pending.append(message)
        if not self._runs():
            return
        # At work it looks again by itself, and before the retry there is nothing to do: waking it
        # for every message would make the caller share the interpreter with it.
        if not self._busy and peer.retry_at_s <= time.monotonic():
            self._wake.notify_all()

    def _runs(self) -> bool:
        """Return whether the thread runs; starts one if there is none, or it died."""
        return (self._worker is not None and self._worker.is_alive()) or self._start()

    def _start(self) -> bool:
        """Start the thread, outside every session; returns whether one runs."""
        from .threads import start_plain

        worker = threading.Thread(target=self._work, name="autellix", daemon=True)
        try:
            start_plain(worker)
        except RuntimeError:  # the interpreter is shutting down
            return False
        self._worker = worker
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        return True

    def _at_exit(self) -> None:
        """End what is still open, within half a second; no new thread."""
        failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
        for session in list(self._runtime.live.values()):
            session.end("error" if failed else "atexit")
        self.flush(EXIT_FLUSH_S)

    # -- what the daemon thread does ---------------------------------------------------------------

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                peer = self._next_peer()
                while peer is None:
                    if self._stopping or self._worker is not me:
                        for known in self._peers.values():
                            self._close(known)
                        return
                    due = min((p.due_s() for p in self._peers.values()), default=float("inf"))
                    wait = due - time.monotonic()
                    self._wake.wait(None if wait == float("inf") else max(0.0, wait))
                    peer = self._next_peer()
                message = peer.pending[0] if peer.pending else None
                self._busy = True
            try:
                if message is not None:
                    self._deliver(peer, message)
                else:
                    self._beat(peer)
            except Exception as error:  # noqa: BLE001 - one bad message must not end all others
                self._give_up(peer, message, error)

    def _next_peer(self) -> Peer | None:
        now = time.monotonic()
        return next((p for p in self._peers.values() if p.due_s() <= now), None)

    def _deliver(self, peer: Peer, message: Message) -> None:
        reply = self._send(peer, message)
        if reply is None:
            return
        with self._wake:
            if peer.pending and peer.pending[0] is message:
                peer.pending.popleft()
            if message.method == "PUT":
                self._take_lease(peer, reply)

    def _give_up(self, peer: Peer, message: Message | None, error: Exception) -> None:
        """Drop ``message``, or put off the heartbeat, which cannot be sent for ``error``."""
        self._runtime.count("errors")
        what = f"{message.method} {message.path}" if message is not None else "a heartbeat"
        self._runtime.warn("message", f"{what} cannot be sent and is dropped: {error!r}")
        with self._wake:
            if message is not None and peer.pending and peer.pending[0] is message:
                peer.pending.popleft()
            self.dropped += 1
            peer.beat_at_s = time.monotonic() + peer.lease_s / 3
        self._close(peer)

    def _beat(self, peer: Peer) -> None:
        """Renew the lease of every open session there, and start again those it has forgotten."""
        with self._wake:
            groups: dict[str | None, list[str]] = {}
            for id, (_, authorization) in peer.open.items():
                groups.setdefault(authorization, []).append(id)
        for authorization, ids in groups.items():
            path = f"{wire.API_PREFIX}/sessions/heartbeat"
            reply = self._send(peer, Message("POST", path, {"ids": ids}, authorization))
            if reply is None:
                return
            with self._wake:
                unknown = reply.get("unknown")
                for id in unknown if isinstance(unknown, list) else ():
                    known = peer.open.get(id)
                    if known is not None:
                        self._queue(peer, _start(id, *known))
                self._take_lease(peer, reply)

    def _take_lease(self, peer: Peer, reply: dict[str, Any]) -> None:
        lease = reply.get("lease_s")
        if isinstance(lease, int | float) and 0 < lease < 86_400:
            peer.lease_s = float(lease)
        # Not all clients of a server at once: up to 20 % earlier or later.
        peer.beat_at_s = time.monotonic() + peer.lease_s / 3 * random.uniform(0.8, 1.2)

    def _send(self, peer: Peer, message: Message) -> dict[str, Any] | None:
        """Return the server's answer, or None after noting why there is none."""
        import http.client

        try:
            status, data = self._exchange(peer, message)
        except (OSError, http.client.HTTPException) as error:
            self._close(peer)
            self._back_off(peer, str(error) or type(error).__name__)
            return None
        if status in (404, 405, 501) and message.method != "DELETE":
            if message.path.endswith("/tools"):
                return {}  # an older server of ours, or the session is gone: only a hint
            self._silence(peer, "plain", "info", "has no sessions; calls carry their tags only")
            return None
        if status in (401, 403):
            self._silence(peer, "denied", "error", f"refuses session messages ({status})")
            return None
        if status >= 500 or status == 429:
            self._back_off(peer, f"HTTP {status}")
            return None
        peer.state, peer.backoff_s, peer.retry_at_s = "ok", BACKOFF_S_MIN, 0.0
        try:
            reply = json.loads(data) if data else {}
        except ValueError:
            reply = {}
        return reply if isinstance(reply, dict) else {}

    def _exchange(self, peer: Peer, message: Message) -> tuple[int, bytes]:
        import http.client

        timeout_s = self._runtime.config.timeout_s
        headers = {"Content-Type": "application/json", "User-Agent": "autellix-python"}
        headers.update(message.headers)
        if message.authorization:
            headers["Authorization"] = message.authorization
        body = None if message.body is None else json.dumps(message.body, default=str).encode()
        fresh = peer.connection is None
        if peer.connection is None:
            kind = (
                http.client.HTTPSConnection
                if peer.origin.scheme == "https"
                else http.client.HTTPConnection
            )
            peer.connection = kind(peer.origin.host, peer.origin.port, timeout=timeout_s)
        try:
            peer.connection.request(message.method, message.path, body, headers)
            response = peer.connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected):
            if fresh:
                raise
            self._close(peer)  # the server closed an idle connection: once more on a new one
            return self._exchange(peer, message)
        data = response.read(REPLY_BYTES_MAX)
        if response.will_close or not response.isclosed():
            self._close(peer)
        return response.status, data

    def _back_off(self, peer: Peer, why: str) -> None:
        peer.state = "unreachable"
        peer.retry_at_s = time.monotonic() + peer.backoff_s
        peer.backoff_s = min(BACKOFF_S_MAX, peer.backoff_s * 2)
        self._runtime.warn(
            f"peer:{peer.origin}",
            f"session messages to {peer.origin.host}:{peer.origin.port} fail ({why}); "
            "calls are not affected",
        )

    def _silence(self, peer: Peer, state: str, level: str, why: str) -> None:
        with self._wake:
            peer.state = state
            peer.pending.clear()
            peer.open.clear()
        self._close(peer)
        self._runtime.warn(
            f"peer:{peer.origin}:{state}", f"{peer.origin.host}:{peer.origin.port} {why}", level
        )

    def _close(self, peer: Peer) -> None:
        connection, peer.connection = peer.connection, None
        if connection is not None:
            connection.close()


def _start(id: str, body: dict[str, Any], authorization: str | None) -> Message:
    return Message("PUT", f"{wire.API_PREFIX}/sessions/{id}", body, authorization, id)

"""The engine's end of the control channel: a thread in the EngineCore, and nobody waits for it.

The step path only puts a report into a ring and rings a bell. The thread has its own ZeroMQ
context, no linger and bounded queues; what cannot be sent is dropped and stays in the ring of
recent reports, from which the gateway asks for gaps. Without an endpoint in the environment there
is no thread, and the engine serves as well.

The thread also watches the parent: vLLM's engine core outlives a killed API server unless it sees
to it itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from ..channel import (
    ENV_CURVE,
    ENV_ENDPOINT,
    ENV_ENGINE_ID,
    ENV_KEY,
    MESSAGE_BYTES_MAX,
    Accounting,
    Bye,
    CallReport,
    ChannelCurve,
    DownMessage,
    Heartbeat,
    Hello,
    HelloWanted,
    Resend,
    UpMessage,
    decode_down,
    encode,
)
from ..clock import Clock, SystemClock

logger = logging.getLogger("vllm.autellix.channel")

RING_REPORTS: Final = 10_000
SEND_QUEUE: Final = 1_000  # ZeroMQ messages
INBOX_MESSAGES: Final = 1_000
REPORTS_A_MESSAGE: Final = 256
HEARTBEAT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Where the channel is, from the environment."""

    endpoint: str | None
    engine_id: str
    key: bytes | None
    curve: ChannelCurve | None = None  # on a network


def read_settings(environ: Mapping[str, str]) -> ChannelSettings:
    """Return what whoever started the engine has put into its environment.

    Raises:
        ValueError: the key is not hex, or the channel would cross a network in the clear.
    """
    key = environ.get(ENV_KEY)
    curve = environ.get(ENV_CURVE)
    endpoint = environ.get(ENV_ENDPOINT) or None
    if endpoint is not None and not curve and not endpoint.startswith(("ipc://", "inproc://")):
        raise ValueError(f"{ENV_ENDPOINT}: {endpoint} needs {ENV_CURVE}: a network is encrypted")
    return ChannelSettings(
        endpoint=endpoint,
        engine_id=environ.get(ENV_ENGINE_ID) or "engine",
        key=bytes.fromhex(key) if key else None,
        curve=ChannelCurve(*curve.split()) if curve else None,
    )


class EngineChannel:
    """See the module.

    Args:
        settings: With an endpoint.
        hello: Makes the first message; the boot id is an argument.
        heartbeat: Makes a heartbeat of single figures that may be read from any thread; the boot id
            and the last sequence number are arguments.
        parent: Process without which this one is to end; None: it may outlive anybody.
        clock: For the heartbeat's period; None: the machine's, whatever the scheduler's is.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        hello: Callable[[str], Hello],
        heartbeat: Callable[[str, int], Heartbeat],
        *,
        parent: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        assert settings.endpoint is not None
        self.boot_id = uuid.uuid4().hex
        self.inbox: deque[DownMessage] = deque(maxlen=INBOX_MESSAGES)  # for the scheduler's thread
        self.dropped = 0  # messages that the gateway did not take
        self._settings = settings
        self._hello = hello
        self._heartbeat = heartbeat
        self._parent = parent
        self._clock = clock or SystemClock()
        self._seq = 0
        self._sent = 0
        self._ring: list[CallReport | None] = [None] * RING_REPORTS  # by number
        self._say_hello = True
        self._closing = False
        self._bell, self._bell_end = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="autellix-channel", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def report(self, report: CallReport) -> None:
        """Number a report and queue it. Never blocks, never fails: it is on the step path."""
        seq = self._seq + 1
        self._ring[seq % RING_REPORTS] = msgspec.structs.replace(report, seq=seq)
        self._seq = seq  # the thread reads it: after the report is in its place
        self._ring_bell()

    def say_hello(self) -> None:
        """Send the first message again, since something in it has changed."""
        self._say_hello = True
        self._ring_bell()

    def close(self, *, wait_s: float = 1.0) -> None:
        """Send what is queued and a last word, and end the thread."""
        self._closing = True
        self._ring_bell()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _ring_bell(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or the channel is closed
            self._bell.send(b"!")

    def _run(self) -> None:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            dealer.setsockopt(zmq.RCVHWM, SEND_QUEUE)
            dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            if (curve := self._settings.curve) is not None:
                dealer.setsockopt_string(zmq.CURVE_SERVERKEY, curve.server_public)
                dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, curve.public)
                dealer.setsockopt_string(zmq.CURVE_SECRETKEY, curve.secret)
            dealer.connect(self._settings.endpoint or "")
            self._serve(dealer)
        except zmq.ZMQError as error:
            # The channel is advisory: the engine goes on without it.
            logger.warning("autellix: the control channel has ended: %s", error)
        finally:
            dealer.close(0)
            context.term()
            self._bell.close()
            self._bell_end.close()

    def _serve(self, dealer: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._bell_end, zmq.POLLIN)
        next_heartbeat_s = self._clock.now_s()
        while True:
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000)))
            if self._parent is not None and os.getppid() != self._parent:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._bell_end.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._bell_end.recv(4096)
            if dealer in ready:
                self._receive(dealer)
            closing = self._closing
            if self._say_hello:
                self._say_hello = not self._send(dealer, self._hello(self.boot_id))
            self._send_reports(dealer)
            now_s = self._clock.now_s()
            if now_s >= next_heartbeat_s or closing:
                next_heartbeat_s = now_s + HEARTBEAT_S
                self._send(dealer, self._heartbeat(self.boot_id, self._sent))
            if closing:
                self._send(dealer, Bye(boot_id=self.boot_id))
                return

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        while True:
            try:
                message = decode_down(dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except msgspec.MsgspecError:
                continue  # from another version; the channel is advisory
            if isinstance(message, HelloWanted):
                self._say_hello = True
            elif isinstance(message, Resend):
                self._resend(dealer, message)
            else:
                self.inbox.append(message)

    def _send_reports(self, dealer: zmq.Socket[bytes]) -> None:
        """Send what the scheduler has put into the ring since the last time."""
        newest = self._seq
        while self._sent < newest:
            last = min(newest, self._sent + REPORTS_A_MESSAGE)
            # Counted as sent even if it is dropped: the gateway sees the gap and asks for it.
            self._send_range(dealer, self._sent + 1, last)
            self._sent = last

    def _resend(self, dealer: zmq.Socket[bytes], wanted: Resend) -> None:
        if wanted.boot_id != self.boot_id:
            return
        last = min(wanted.last_seq, self._sent)
        first = max(1, wanted.first_seq, self._seq - RING_REPORTS + 1)
        while first <= last:
            end = min(last, first + REPORTS_A_MESSAGE - 1)
            self._send_range(dealer, first, end)
            first = end + 1

    def _send_range(self, dealer: zmq.Socket[bytes], first: int, last: int) -> None:
        """Send reports by number, those of them that the ring still holds."""
        slots = (self._ring[seq % RING_REPORTS] for seq in range(first, last + 1))
        # The scheduler's thread may overwrite the oldest meanwhile; a report knows its number.
        reports = tuple(r for r in slots if r is not None and first <= r.seq <= last)
        if reports:
            self._send(dealer, Accounting(boot_id=self.boot_id, reports=reports))

    def _send(self, dealer: zmq.Socket[bytes], message: UpMessage) -> bool:
        try:
            dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            return False
        return True

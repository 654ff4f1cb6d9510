"""The book of calls: what the relay tells of each call, and who is told of it.

The relay calls it at fixed points: a call begins, is sent to an engine, its head passes, it ends.
The first three are in the way of the answer, so they only store; whatever can wait is done at the
end, when the client has its last byte.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from ..call_log import CallLog, CallRecord
from ..call_metrics import CallMetrics
from ..channel import CallReport
from ..clock import Clock
from ..identity import Identity
from ..logs import CALLS, fields
from ..program import Call, Program
from ..receipts import Mode, comment, head_lines, mode_of, usage_in
from ..tracing import Tracer
from ..types import CallInfo, Engine
from .upstream import Upstream

REPORT_WAIT_S: Final = 0.05  # that a client who asks for a full receipt waits at most
CLOSE_S: Final = 3.0
NODE_CHARS_MAX: Final = 128

_calls_log = logging.getLogger(CALLS)


class Receipt:
    """What one client is told of its call, and when."""

    is_full = False
    _told: asyncio.Event | None = None

    def __init__(self, record: CallRecord, mode: Mode) -> None:
        self.record = record
        self._mode = mode
        if mode == "full":
            self.is_full = True
            self._told = asyncio.Event()
            record.on_report = self._note

    def head(self) -> bytes:
        """Return the lines that can be said now; called when the head of the answer passes."""
        return head_lines(self.record) if self.record.reports and self._mode != "off" else b""

    def comment(self) -> bytes:
        """Return the end of a stream."""
        return comment(self.record)

    async def wait(self) -> None:
        """Return when the engine has reported, or when it takes too long."""
        if self._told is not None and not self.record.reports:
            try:
                async with asyncio.timeout(REPORT_WAIT_S):
                    await self._told.wait()
            except TimeoutError:
                pass  # the receipt says that it does not know

    def _note(self, _record: CallRecord) -> None:
        assert self._told is not None
        self._told.set()


class CallBook:
    """See the module. Belongs to the event loop.

    Args:
        clock: The gateway's.
        receipts: The server's own mode.
        calls_max: Calls that are remembered.

    Attributes:
        rule: The balancer's rule, for explanations.
        balancer_leaks: Calls that it had to take back.
    """

    def __init__(self, clock: Clock, *, receipts: Mode, calls_max: int) -> None:
        self.log = CallLog(calls_max)
        self.metrics = CallMetrics()
        self.rule = ""
        self.tracer: Tracer | None = None
        self.balancer_leaks: Callable[[], int] = lambda: 0
        self._clock = clock
        self._receipts = receipts

    def begin(
        self, call: Call, identity: Identity, path: str, document: Mapping[str, Any], size: int
    ) -> CallRecord:
        """A call begins."""
        record = self.log.begin(call, call.begun_s)
        record.path = path
        record.node = identity.arrival.node
        model = document.get("model")
        if isinstance(model, str):
            record.model = model[:NODE_CHARS_MAX]
        record.prompt_bytes = size
        if document.get("stream") is True:
            record.streamed = True
        return record

    def tick(self, late_s: float) -> None:
        """Do what is due some time after calls are over; once a second.

        Args:
            late_s: How late the event loop is with it.
        """
        self.metrics.loop_lag.observe(max(0.0, late_s))
        if self.tracer is not None:
            self.tracer.flush(self.log, self.rule, self._clock.now_s())

    async def close(self) -> None:
        """Let go of what is kept for others; a collector that hangs is not waited for."""
        if self.tracer is not None:
            self.tracer.flush(self.log, self.rule, math.inf)
            closing = asyncio.create_task(asyncio.to_thread(self.tracer.close))
            await asyncio.wait((closing,), timeout=CLOSE_S)

    def receipt(self, record: CallRecord, asked: str | None) -> Receipt:
        """Return the receipt that this client gets."""
        return Receipt(record, mode_of(asked, self._receipts) if asked else self._receipts)

    def sent(
        self,
        record: CallRecord,
        engine: Engine,
        info: CallInfo,
        tried: Collection[str],
        previous: object,
        asked_s: float,
    ) -> None:
        """A call is sent to an engine.

        Args:
            record: The call's.
            engine: Where to.
            info: What the choice could look at.
            tried: Engines that did not take it.
            previous: The stored response that it goes on, which only one engine holds.
            asked_s: When the choice began.
        """
        if isinstance(previous, str):
            why = "holder"
        elif tried:
            why = "next"
        elif info.home is None:
            why = "first"
        else:
            why = "home" if info.home == engine.engine_id else "moved"
        now_s = self._clock.now_s()
        record.decided_s = now_s - asked_s
        record.sent(engine.engine_id, why, info.loads, now_s)

    def end(self, call: Call, record: CallRecord, upstream: Upstream | None, status: int) -> None:
        """A call is over for its client."""
        now_s = self._clock.now_s()
        if upstream is not None:
            record.head_s = upstream.head_at_s or None
            if record.tokens_from is None and status == 200:
                usage = usage_in(upstream.tail())
                if usage is not None:
                    record.note_usage(*usage)
                    call.program.note_usage(call, usage)
        record.on_report = None
        if self.tracer is not None and record.trace is not None:
            self.tracer.end(record, now_s)
        record.ended(status, _outcome(call, status), now_s)
        self.metrics.call_over(record)
        if _calls_log.isEnabledFor(logging.INFO):
            _calls_log.info("call over", extra=fields(**_figures(record)))

    def fold(self, engine_id: str, report: CallReport) -> None:
        """An engine has told of one of its requests; the table has accepted it."""
        self.log.fold(report)
        self.metrics.reported(engine_id, report)

    def programs_over(self, programs: Iterable[Program]) -> None:
        """Programs have ended, or have run out."""
        now_s = self._clock.now_s()
        for program in programs:
            if program.session is not None and not program.is_counted:
                program.is_counted = True
                self.metrics.program_over(program, now_s)
                if self.tracer is not None:
                    self.tracer.program_over(program, now_s)


def _figures(record: CallRecord) -> dict[str, Any]:
    """Return what a log says of a call: figures, and ids that are of use in here only."""
    assert record.ended_s is not None
    told = bool(record.reports)
    return {
        "call": record.call_id,
        "program": record.program_id,
        "engine": record.engine_id,
        "status": record.status,
        "outcome": record.outcome,
        "took_s": round(record.ended_s - record.begun_s, 6),
        "wait_s": round(record.wait_s, 6) if told else None,
        "service_s": round(record.service_s, 6) if told else None,
        "queue_level": record.level,  # "level" is that of the event
        "preemptions": record.preemptions if told else None,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
    }


def _outcome(call: Call, status: int) -> str:
    """Return how a call ended, in one word.

    A stream may be broken off by the engine after its status line; then the status is ours.
    """
    if call.superseded:
        return "superseded"
    if status < 400:
        return "ok"
    if status == 499:
        return "hung_up"
    return "refused" if status < 500 else "failed"

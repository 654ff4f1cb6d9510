"""The last calls of one gateway: where each was sent and why, and what became of it.

A ring: the newest ``CALLS_MAX`` calls, found by id and by program. Every operation is O(1) but for
the lists it returns. A record is begun with the call and filled as the call goes on; what the
engine knows (levels, preemptions, who made it wait) comes with its report, whose times count from
the call's coming to the engine and are laid at the moment it was sent there.

Nothing here holds a prompt, an answer, a key or a client's address.

Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from .channel import CallReport
from .program import Call, CallKey

CALLS_MAX: Final = 10_000
REPORTS_MAX: Final = 4  # engine requests of one call that are kept one by one; all are added up
CHOICES_MAX: Final = 4  # engines tried for one call


class Choice(NamedTuple):
    """An engine that a call was sent to."""

    engine_id: str
    why: str
    loads: Mapping[str, int]  # calls in flight with each engine at that moment, this one apart
    at_s: float


class Interval(NamedTuple):
    """A stretch of a call's life.

    ``state`` is ``gateway`` (not sent yet), ``queued``, ``running``, ``preempted`` (queued again to
    be computed again), ``swapped`` (queued again, its blocks in host memory), ``engine`` (sent, and
    the engine has told nothing) or ``answering`` (left the engine, and not yet the gateway).
    """

    state: str
    start_s: float
    end_s: float
    level: int | None
    request: int = 0  # which engine request of the call, if it is several


class CallRecord:
    """One attempt of one call.

    Attributes:
        trace: What the tracer keeps here; None: no traces.
        on_report: Called when a report has been taken in; None: nobody waits for one.
    """

    # Defaults are of the class: a call that begins must not pay for what it may never need.
    node: str | None = None
    path = ""
    model: str | None = None
    prompt_bytes = 0
    streamed = False
    choices: tuple[Choice, ...] = ()
    engine_id: str | None = None
    dispatched_s: float | None = None
    decided_s = 0.0  # what the last choice of an engine took
    head_s: float | None = None
    ended_s: float | None = None
    status = 0
    outcome: str | None = None
    reports: tuple[CallReport, ...] = ()
    reports_seen = 0
    service_s = 0.0
    wait_s = 0.0
    level: int | None = None
    preemptions = 0
    promotions = 0
    swaps = 0
    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    output_tokens: int | None = None
    tokens_from: str | None = None  # engine: its report; usage: the answer's own figures
    trace: Any = None
    on_report: Callable[[CallRecord], None] | None = None

    def __init__(self, call: Call, now_s: float) -> None:
        self._call = call  # the table keeps more of them than the log does
        self.begun_s = now_s

    @property
    def call_id(self) -> str:
        """The call's id."""
        return self._call.call_id

    @property
    def program_id(self) -> str:
        """The program that the call was charged to."""
        return self._call.program.program_id

    @property
    def place(self) -> CallKey:
        """Its thread, and its number in it."""
        return self._call.key

    @property
    def scope(self) -> str:
        """Whose key it came with."""
        return self._call.program.scope

    def sent(self, engine_id: str, why: str, loads: Mapping[str, int], now_s: float) -> None:
        """The call is sent to an engine; again if the one before did not take it."""
        self.engine_id = engine_id
        self.dispatched_s = now_s
        if len(self.choices) < CHOICES_MAX:
            self.choices = (*self.choices, Choice(engine_id, why, loads, now_s))

    def ended(self, status: int, outcome: str, now_s: float) -> None:
        """The call is over for the gateway; its report may still come."""
        self.status = status
        self.outcome = outcome
        self.ended_s = now_s

    def note_usage(self, prompt_tokens: int, hit_tokens: int | None, output_tokens: int) -> None:
        """Take the tokens from the answer; a report, which says more, replaces them."""
        if self.tokens_from != "engine":
            self.tokens_from = "usage"
            self.prompt_tokens = prompt_tokens
            self.hit_tokens = hit_tokens
            self.output_tokens = output_tokens

    def fold(self, report: CallReport) -> None:
        """Take in what an engine says of one of its requests; the table has checked it."""
        if self.tokens_from != "engine":
            self.tokens_from = "engine"
            self.prompt_tokens = self.hit_tokens = self.output_tokens = 0
        self.reports_seen += 1
        if len(self.reports) < REPORTS_MAX:
            self.reports = (*self.reports, report)
        self.service_s += max(0.0, report.service_s)
        self.wait_s += max(0.0, report.wait_s)
        self.level = report.level
        self.preemptions += report.preemptions
        self.promotions += report.promotions
        self.swaps += report.swaps
        self.prompt_tokens = (self.prompt_tokens or 0) + report.prompt_tokens
        self.hit_tokens = (self.hit_tokens or 0) + report.hit_tokens
        self.output_tokens = (self.output_tokens or 0) + report.output_tokens

    def intervals(self, now_s: float) -> list[Interval]:
        """Return what the call did and when, oldest first, up to its end or to now."""
        end_s = self.ended_s if self.ended_s is not None else now_s
        if self.dispatched_s is None:
            return [Interval("gateway", self.begun_s, end_s, None)]
        found = [Interval("gateway", self.begun_s, self.dispatched_s, None)]
        if not self.reports:
            found.append(Interval("engine", self.dispatched_s, end_s, None))
        for request, report in enumerate(self.reports):
            found += _stretches(report, self.dispatched_s, request)
        left_s = max((i.end_s for i in found), default=end_s)
        if self.reports and end_s > left_s:
            found.append(Interval("answering", left_s, end_s, None))
        return [i for i in found if i.end_s > i.start_s]

    def view(self, now_s: float, unix_offset_s: float = 0.0) -> dict[str, Any]:
        """Return the call as a row of JSON.

        Args:
            now_s: The time.
            unix_offset_s: Added to every point in time, so that it is one of the calendar.
        """

        def at(moment_s: float | None) -> float | None:
            return None if moment_s is None else round(moment_s + unix_offset_s, 6)

        end_s = self.ended_s if self.ended_s is not None else now_s
        return {
            "call": self.call_id,
            "program_id": self.program_id,
            "thread": self._call.key.thread,
            "seq": self._call.key.seq,
            "attempt": self._call.attempt,
            "parents": [list(key) for key in self._call.parents],
            "node": self.node,
            "path": self.path,
            "model": self.model,
            "streamed": self.streamed,
            "prompt_bytes": self.prompt_bytes,
            "begun_s": at(self.begun_s),
            "dispatched_s": at(self.dispatched_s),
            "first_byte_s": at(self.head_s),
            "ended_s": at(self.ended_s),
            "took_s": round(end_s - self.begun_s, 6),
            "engine": self.engine_id,
            "choices": [
                {"engine": c.engine_id, "why": c.why, "loads": dict(c.loads), "at_s": at(c.at_s)}
                for c in self.choices
            ],
            "status": self.status or None,
            "outcome": self.outcome,
            "events": [
                (round(e.at_s, 6), e.what, e.why)
                for report in self.reports[:1]
                for e in report.events
            ],
            "reported": self.reports_seen,
            "service_s": round(self.service_s, 6) if self.reports else None,
            "wait_s": round(self.wait_s, 6) if self.reports else None,
            "level": self.level,
            "preemptions": self.preemptions if self.reports else None,
            "promotions": self.promotions if self.reports else None,
            "swaps": self.swaps if self.reports else None,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "output_tokens": self.output_tokens,
            "tokens_from": self.tokens_from,
            "intervals": [
                {"state": i.state, "start_s": at(i.start_s), "end_s": at(i.end_s),
                 "level": i.level, "request": i.request}
                for i in self.intervals(now_s)
            ],
        }  # fmt: skip


class CallLog:
    """The newest calls; see the module. Not thread-safe: it belongs to the event loop."""

    def __init__(self, calls_max: int = CALLS_MAX) -> None:
        assert calls_max > 0
        self._calls_max = calls_max
        self._records: dict[str, CallRecord] = {}  # the oldest first
        self._programs: dict[str, dict[str, CallRecord]] = {}  # the same ones, by program

    def __len__(self) -> int:
        return len(self._records)

    def begin(self, call: Call, now_s: float) -> CallRecord:
        """Begin a record, and forget the oldest if there are too many."""
        record = CallRecord(call, now_s)
        call_id, program_id = call.call_id, call.program.program_id
        self._records[call_id] = record
        siblings = self._programs.get(program_id)
        if siblings is None:
            self._programs[program_id] = {call_id: record}
        else:
            siblings[call_id] = record
        if len(self._records) > self._calls_max:
            self._forget_oldest()
        return record

    def get(self, call_id: str) -> CallRecord | None:
        """Return a call's record, None if it is forgotten or unknown."""
        return self._records.get(call_id)

    def of_program(self, program_id: str) -> list[CallRecord]:
        """Return the remembered calls of a program, oldest first."""
        return list(self._programs.get(program_id, {}).values())

    def newest(self) -> Iterator[CallRecord]:
        """Yield the calls, newest first; begin none meanwhile."""
        return reversed(self._records.values())

    def fold(self, report: CallReport) -> CallRecord | None:
        """Take in a report that the table has accepted; return the call's record."""
        record = self._records.get(report.call_id) if report.call_id is not None else None
        if record is None:
            return None
        record.fold(report)
        if record.on_report is not None:
            record.on_report(record)
        return record

    def _forget_oldest(self) -> None:
        record = self._records.pop(next(iter(self._records)))
        siblings = self._programs[record.program_id]
        del siblings[record.call_id]
        if not siblings:
            del self._programs[record.program_id]


def _stretches(report: CallReport, came_s: float, request: int) -> Iterator[Interval]:
    """Yield the intervals between an engine request's events."""
    state, level, start_s = "queued", report.first_level or report.level, came_s
    for event in report.events:
        at_s = came_s + event.at_s
        yield Interval(state, start_s, at_s, level, request)
        start_s, level = at_s, event.level
        if event.what == "run":
            state = "running"
        elif event.what == "preempt":
            state = "swapped" if event.why.endswith("+swap") else "preempted"
    stay_s = report.stay_s or report.wait_s + report.service_s
    yield Interval(state, start_s, max(start_s, came_s + stay_s), report.level, request)

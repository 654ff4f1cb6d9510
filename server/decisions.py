"""Why: the decisions about one call, in words and fields, from what was noted when they were made.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from .call_log import CallRecord, Choice
from .channel import CallEvent, CallReport

_PLACED: Final = {
    "first": "its program had no engine yet, so the rule {rule} chose one",
    "home": "the rule {rule} kept it with the engine of its program's latest call",
    "moved": "the rule {rule} took it away from the engine of its program's latest call",
    "holder": "it goes on a stored response, which only this engine holds",
    "next": "the engine before it took no connection or died before it answered",
}
_PREEMPTED: Final = {
    "room": "the running calls needed KV blocks for their next tokens, and it had the lowest place",
    "waiting": "a ready call of level {level} had no place in the batch",
    "engine": "vLLM ran out of KV blocks and took the last of the batch",
}
_RUN: Final = {
    "fresh": "nothing of its prompt was in the engine's cache",
    "hit": "a part of what it needs was in the engine's cache",
    "swap_in": "its blocks came back from host memory",
    "recompute": "its lost tokens are computed again",
}


class Decision(NamedTuple):
    """One decision about a call."""

    at_s: float
    what: str  # place, run, preempt, promote, demote
    why: str
    words: str
    fields: dict[str, Any]


def explain(record: CallRecord, rule: str) -> list[Decision]:
    """Return the decisions about a call, oldest first.

    Args:
        record: The call's.
        rule: The name of the balancer's rule.
    """
    found = [_placed(choice, rule or "of the gateway") for choice in record.choices]
    for request, report in enumerate(record.reports):
        found += _in_engine(report, request, record.dispatched_s or record.begun_s)
    return sorted(found, key=lambda decision: decision.at_s)


def summary(record: CallRecord) -> str:
    """Return what became of a call, in one sentence."""
    if record.ended_s is None:
        where = f"with engine {record.engine_id}" if record.engine_id else "not sent yet"
        return f"in flight, {where}"
    took_s = record.ended_s - record.begun_s
    said = f"{record.outcome} after {took_s:.3f} s"
    if not record.reports:
        return f"{said}; the engine has reported nothing"
    times = {1: "once", 2: "twice"}
    said += f": {record.wait_s:.3f} s waiting, {record.service_s:.3f} s of model time"
    if record.preemptions:
        said += f", preempted {times.get(record.preemptions, f'{record.preemptions} times')}"
    if record.promotions:
        said += f", promoted {times.get(record.promotions, f'{record.promotions} times')}"
    return said


def _placed(choice: Choice, rule: str) -> Decision:
    text = _PLACED.get(choice.why, choice.why).format(rule=rule)
    others = ", ".join(f"{name} had {count}" for name, count in sorted(choice.loads.items()))
    words = f"sent to {choice.engine_id}, since {text}"
    if others:
        words += f"; calls in flight then: {others}"
    fields = {"engine": choice.engine_id, "rule": rule, "loads": dict(choice.loads)}
    return Decision(choice.at_s, "place", choice.why, words, fields)


def _in_engine(report: CallReport, request: int, came_s: float) -> Iterator[Decision]:
    first = report.first_level
    if first:
        words = f"came in at level {first}: its program's attained service belongs there"
        yield Decision(came_s, "enter", "", words, {"level": first, "request": request})
    for event in report.events:
        fields: dict[str, Any] = {"level": event.level, "request": request}
        yield Decision(came_s + event.at_s, event.what, event.why, _words_of(event, fields), fields)


def _words_of(event: CallEvent, fields: dict[str, Any]) -> str:
    """Return an event in words; what they name is put into ``fields`` too."""
    if event.what == "run":
        return f"ran, in level {event.level}: {_RUN.get(event.why, event.why)}"
    if event.what == "promote":
        return "promoted to level 1: it had waited too long for the service that it had"
    if event.what == "demote":
        return f"demoted to level {event.level}: it had used up its quantum"
    reason, _, saved = event.why.partition("+")
    kind, _, level = reason.partition(":")
    fields["swapped"] = bool(saved)
    if level.isdigit():
        fields["for_level"] = int(level)
    why = _PREEMPTED.get(kind, reason).format(level=level)
    kept = "its KV blocks were saved to host memory" if saved else "its KV blocks were given up"
    return f"preempted: {why}; {kept}"

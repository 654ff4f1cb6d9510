"""The ring of the last calls: bounded, found by id and program, and a timeline from reports."""

from __future__ import annotations

import pytest

from autellix.server.call_log import CallLog, CallRecord
from autellix.server.channel import CallEvent, CallReport
from autellix.server.process_table import ProcessTable
from autellix.server.program import Arrival


def report(call_id: str, **fields: object) -> CallReport:
    values: dict[str, object] = {
        "seq": 1, "call_id": call_id, "program_id": None, "request_id": "r", "reason": "stop",
        "service_s": 1.0, "wait_s": 0.5, "preemptions": 0, "swaps": 0, "prompt_tokens": 10,
        "hit_tokens": 4, "output_tokens": 3, "level": 2,
    }  # fmt: skip
    return CallReport(**{**values, **fields})  # type: ignore[arg-type]


def begun(log: CallLog, table: ProcessTable, session: str, number: int) -> CallRecord:
    call, _ = table.begin_call(Arrival("k", session), f"{number:024x}", float(number))
    return log.begin(call, float(number))


def test_the_oldest_is_forgotten_and_found_nowhere():
    """The ring holds its bound, and what has left it is gone from its program too."""
    log, table = CallLog(3), ProcessTable()
    records = [begun(log, table, "a" if n < 2 else "b", n) for n in range(5)]
    assert len(log) == 3
    assert log.get(records[0].call_id) is None
    assert log.of_program(records[0].program_id) == []
    assert log.of_program(records[4].program_id) == records[2:]
    assert list(log.newest()) == records[:1:-1]
    assert log.fold(report(records[0].call_id)) is None


def test_a_timeline_follows_the_events_of_the_engine():
    """Queued, running, preempted and swapped come from the report, laid at the dispatch."""
    log, table = CallLog(), ProcessTable()
    record = begun(log, table, "a", 10)
    record.sent("e0", "home", {}, 10.5)
    events = (
        CallEvent(1.0, "run", 1, "fresh"),
        CallEvent(2.0, "demote", 2),
        CallEvent(3.0, "preempt", 2, "waiting:1+swap"),
        CallEvent(4.0, "promote", 1),
        CallEvent(5.0, "run", 1, "swap_in"),
    )
    log.fold(report(record.call_id, events=events, stay_s=6.0, first_level=1, level=1))
    record.ended(200, "ok", 17.0)
    assert [(i.state, i.start_s, i.end_s, i.level) for i in record.intervals(99.0)] == [
        ("gateway", 10.0, 10.5, None),
        ("queued", 10.5, 11.5, 1),
        ("running", 11.5, 12.5, 1),
        ("running", 12.5, 13.5, 2),
        ("swapped", 13.5, 14.5, 2),
        ("swapped", 14.5, 15.5, 1),
        ("running", 15.5, 16.5, 1),
        ("answering", 16.5, 17.0, None),
    ]
    view = record.view(99.0, 1000.0)
    assert view["begun_s"] == 1010.0
    assert view["took_s"] == 7.0
    assert view["intervals"][4]["state"] == "swapped"


def test_without_a_report_the_engine_is_one_stretch():
    """A stock engine tells nothing: sent to an end, and tokens from the answer if it names them."""
    log, table = CallLog(), ProcessTable()
    record = begun(log, table, "a", 1)
    assert [i.state for i in record.intervals(2.0)] == ["gateway"]
    record.sent("e0", "first", {}, 1.25)
    record.note_usage(7, None, 2)
    assert [i.state for i in record.intervals(3.0)] == ["gateway", "engine"]
    row = record.view(3.0)
    assert (row["prompt_tokens"], row["output_tokens"], row["tokens_from"]) == (7, 2, "usage")
    assert row["wait_s"] is None


def test_reports_add_up_and_replace_usage():
    """With n = 2 both engine requests count; what the answer said of tokens is not added."""
    log, table = CallLog(), ProcessTable()
    record = begun(log, table, "a", 1)
    record.sent("e0", "first", {}, 1.0)
    record.note_usage(10, 0, 6)
    seen: list[int] = []
    record.on_report = lambda r: seen.append(r.reports_seen)
    for _ in range(2):
        log.fold(report(record.call_id))
    record.note_usage(10, 0, 6)  # the answer ends after the reports
    assert (record.prompt_tokens, record.hit_tokens, record.output_tokens) == (20, 8, 6)
    assert record.service_s == pytest.approx(2.0)
    assert seen == [1, 2]


def test_engines_tried_are_bounded():
    """However often a call is sent on, a few choices are kept, and the last engine is known."""
    log, table = CallLog(), ProcessTable()
    record = begun(log, table, "a", 1)
    for number in range(9):
        record.sent(f"e{number}", "next", {}, 1.0 + number)
    assert len(record.choices) == 4
    assert record.engine_id == "e8"

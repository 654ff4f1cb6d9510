"""Weight, deadline and kind of programs in the process table."""

from __future__ import annotations

from autellix.server.accounts import Charged
from autellix.server.identity import resolve
from autellix.server.process_table import ProcessTable, program_id_of
from autellix.server.program import Arrival, Program
from autellix.server.wishes import KINDS_MAX, Wishes


def begin(table: ProcessTable, session: str, wishes: Wishes, now_s: float, scope: str = "a"):
    """Begin a call and end it; return its program."""
    arrival = Arrival(scope, session, wishes=wishes)
    call, _ = table.begin_call(arrival, f"{table.counts['calls_begun']:08x}", now_s)
    table.end_call(call, now_s)
    return call.program


def test_what_is_not_said_stays_and_the_end_forgets():
    """A deadline counts from the call that says it; the next run of a session says its own."""
    table = ProcessTable()
    program = begin(table, "run", Wishes(2.0, 30.0), 100.0)
    assert (program.weight, program.deadline_s) == (2.0, 130.0)
    begin(table, "run", Wishes(), 110.0)
    assert (program.weight, program.deadline_s) == (2.0, 130.0)
    begin(table, "run", Wishes(0.5, -4.0), 120.0)
    assert (program.weight, program.deadline_s) == (0.5, 116.0)
    view = program.view(121.0)
    assert (view["weight"], view["deadline_in_s"]) == (0.5, -5.0)
    table.end_program(program, "ok", 122.0)
    assert (program.weight, program.deadline_s, program.kind) == (None, None, None)
    view = program.view(122.0)
    assert (view["weight"], view["deadline_in_s"]) == (1.0, None)


def test_a_name_is_a_kind_from_its_second_program_on():
    """So clients whose every program has a name of its own make no kinds; keys do not mix."""
    table = ProcessTable()

    def kind_of(session: str, scope: str = "a", name: str = "trip") -> str | None:
        return begin(table, session, Wishes(kind=name), 0.0, scope).kind

    assert kind_of("one") is None
    assert kind_of("one") is None
    kind = kind_of("two")
    assert kind is not None
    assert kind_of("three") == kind_of("one") == kind
    assert kind_of("one", scope="b") is None
    assert kind_of("two", scope="b") not in (None, kind)
    for number in range(KINDS_MAX + 10):
        assert kind_of(f"other-{number}", name=f"user {number}") is None
    assert len(table.kinds) == KINDS_MAX


def test_headers_are_wishes_of_whatever_names_the_program():
    """Ours, a foreign name or none; what is malformed is named and says nothing."""
    said = {
        "x-autellix-weight": "2.5", "x-autellix-deadline": "-1.5",
        "x-autellix-kind": "day%20trip",
    }  # fmt: skip
    wishes = Wishes(2.5, -1.5, "day trip")
    for name in ({"x-autellix-session": "run-1"}, {"x-session-id": "run-1"}, {}):
        identity = resolve({**said, **name}, {}, "")
        assert identity.arrival.wishes == wishes
        assert identity.malformed == ()
    for header, text in (
        ("X-Autellix-Weight", "0"), ("X-Autellix-Weight", "100.1"), ("X-Autellix-Weight", "nan"),
        ("X-Autellix-Weight", "1e1"), ("X-Autellix-Deadline", "604801"),
        ("X-Autellix-Deadline", "soon"), ("X-Autellix-Kind", "x" * 129),
    ):  # fmt: skip
        identity = resolve({header.lower(): text}, {}, "")
        assert identity.arrival.wishes == Wishes()
        assert identity.malformed == (header,)


def test_a_restored_program_makes_its_kind_known():
    """Programs of its name need not begin anew to tell that there are several."""
    table = ProcessTable()
    begin(table, "one", Wishes(kind="trip"), 0.0)
    program = begin(table, "two", Wishes(kind="trip"), 0.0)
    again = ProcessTable()
    restored = Program(
        program.program_id, program.scope, "two", "two", 0.0, program.account, 9.0, 0.0,
        kind=program.kind,
    )  # fmt: skip
    assert again.restore(restored, Charged(1.0), 0.0)
    assert begin(again, "three", Wishes(kind="trip"), 0.0).kind == program.kind
    assert again.get(program_id_of("a", "two")) is restored

"""The process table: charging, states, leases, bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix import wire
from autellix.server import channel
from autellix.server.process_table import ProcessTable, TableFull, program_id_of
from autellix.server.program import Arrival, Call, CallKey, ProgramState


def report(call: Call, service_s: float, *, request: str = "r0", **fields: object):
    """Return an engine's report of a call."""
    values: dict[str, object] = {
        "seq": 1, "call_id": call.call_id, "program_id": call.program.program_id,
        "request_id": request, "reason": "stop", "service_s": service_s, "wait_s": 0.25,
        "preemptions": 1, "swaps": 0, "prompt_tokens": 10, "hit_tokens": 4, "output_tokens": 3,
        "level": 2,
    }  # fmt: skip
    return channel.CallReport(**{**values, **fields})  # type: ignore[arg-type]


class Calls:
    """Begins and ends calls with fresh ids."""

    def __init__(self, table: ProcessTable) -> None:
        self.table = table
        self.count = 0

    def begin(self, now_s: float, session: str | None = "s", **fields: object) -> Call:
        """Begin a call and send it to engine e0."""
        self.count += 1
        arrival = Arrival("", session, **fields)  # type: ignore[arg-type]
        call, _ = self.table.begin_call(arrival, f"{self.count:08x}", now_s)
        self.table.dispatch(call, "e0")
        return call


def test_wall_time_is_charged_until_the_engine_reports():
    """The report takes the place of the wall time, whenever it comes, once."""
    table = ProcessTable()
    call = Calls(table).begin(1.0)
    table.end_call(call, 5.0)
    assert call.program.account.service_s == 4.0
    assert table.fold_report("e0", "b", report(call, 1.5), 5.1)
    assert call.program.account.service_s == 1.5
    assert not table.fold_report("e0", "b", report(call, 1.5), 5.2)
    assert call.program.account.service_s == 1.5
    assert table.counts["reports_duplicate"] == 1


def test_a_report_before_the_end_of_the_http_call_counts_too():
    """The engine may be quicker to report than the client to read."""
    table = ProcessTable()
    call = Calls(table).begin(1.0)
    table.fold_report("e0", "b", report(call, 0.5), 1.6)
    table.end_call(call, 9.0)
    assert call.program.account.service_s == 0.5


def test_every_engine_request_of_a_call_is_charged():
    """A call with n = 2 makes two engine requests, which report apart."""
    table = ProcessTable()
    call = Calls(table).begin(1.0)
    table.fold_report("e0", "b", report(call, 0.5, request="0_x"), 1.6)
    table.fold_report("e0", "b", report(call, 0.25, request="1_x"), 1.6)
    table.end_call(call, 9.0)
    assert call.program.account.service_s == 0.75
    assert call.program.calls_reported == 1


def test_another_engine_cannot_report_a_call():
    """A peer speaks for its own calls and programs only."""
    table = ProcessTable()
    call = Calls(table).begin(1.0)
    assert not table.fold_report("e1", "b", report(call, 9.0), 2.0)
    assert not table.fold_report("e0", "b", report(call, 9.0, program_id="f" * 32), 2.0)
    assert table.counts["reports_foreign"] == 2


def test_a_report_of_a_forgotten_call_is_counted_and_charges_nothing():
    """It may have been charged before: nobody can tell."""
    table = ProcessTable(closed_calls_max=1)
    calls = Calls(table)
    first = calls.begin(0.0)
    table.end_call(first, 1.0)
    second = calls.begin(1.0)
    table.end_call(second, 2.0)
    assert not table.fold_report("e0", "b", report(first, 5.0), 2.0)
    assert first.program.account.service_s == 2.0
    assert table.counts["reports_unknown"] == 1
    assert table.counts["calls_never_reported"] == 1


def test_a_retry_is_one_call_charged_by_its_dearest_attempt():
    """Both attempts ran; the program asked for one call."""
    table = ProcessTable()
    calls = Calls(table)
    first = calls.begin(0.0, client_call="c")
    again, earlier = table.begin_call(Arrival("", "s", client_call="c", attempt=1), "0badcafe", 3.0)
    assert earlier is first
    table.dispatch(again, "e0")
    table.end_call(first, 3.0)
    table.end_call(again, 8.0)
    program = first.program
    assert program.account.service_s == 5.0
    assert (program.calls_begun, program.calls_ended, program.calls_retried) == (1, 1, 1)
    assert table.check_integrity() == []


def test_a_retry_after_the_end_reopens_the_call():
    """The answer was lost on its way: the retry is the same call."""
    table = ProcessTable()
    first = Calls(table).begin(0.0, client_call="c")
    table.end_call(first, 1.0)
    again, earlier = table.begin_call(Arrival("", "s", client_call="c", attempt=1), "0badcafe", 3.0)
    assert earlier is None
    assert again.key == first.key
    assert table.counts["calls_ended"] == 0
    table.end_call(again, 4.0)
    assert table.counts["calls_begun"] == table.counts["calls_ended"] == 1


def test_atlas_takes_the_longest_path_even_if_reports_are_late():
    """Two parallel calls count once; a call begun before the report of the last is put right."""
    table = ProcessTable(accounting="atlas")
    calls = Calls(table)
    root = calls.begin(0.0)
    table.end_call(root, 10.0)
    left = calls.begin(10.0, thread=1)
    right = calls.begin(10.0, thread=2)
    table.end_call(left, 30.0)
    table.end_call(right, 40.0)
    account = root.program.account
    assert account.service_s == 40.0  # by wall time
    table.fold_report("e0", "b", report(left, 3.0), 41.0)
    table.fold_report("e0", "b", report(root, 1.0), 41.0)
    table.fold_report("e0", "b", report(right, 2.0), 41.0)
    assert account.service_s == 1.0 + 3.0


def test_joins_are_inferred_from_what_completed_before():
    """call, gather of 3, call: the last one waits on all three."""
    table = ProcessTable()
    calls = Calls(table)
    root = calls.begin(0.0, thread=0)
    table.end_call(root, 1.0)
    forked = wire.ParentCall(0, 1)
    branches = [calls.begin(1.0, thread=n, parent=forked) for n in (1, 2, 3)]
    for branch in branches:
        assert branch.parents == (CallKey(0, 0),)
        table.end_call(branch, 2.0)
    join = calls.begin(2.0, thread=0)
    assert set(join.parents) == {CallKey(0, 0), CallKey(1, 0), CallKey(2, 0), CallKey(3, 0)}
    table.end_call(join, 3.0)
    assert calls.begin(3.0, thread=0).parents == (CallKey(0, 1),)


def test_a_thread_may_follow_several_others():
    """An editor after a writer and a researcher: both of their latest calls are its parents."""
    table = ProcessTable()
    calls = Calls(table)
    table.end_call(calls.begin(0.0, thread=0), 1.0)
    for number in (1, 2):
        call = calls.begin(1.0, thread=number, parent=wire.ParentCall(0, 1))
        table.end_call(call, 2.0)
    follows = (wire.ParentCall(2, 1),)
    editor = calls.begin(2.0, thread=3, parent=wire.ParentCall(1, 1), follows=follows)
    assert set(editor.parents) == {CallKey(1, 0), CallKey(2, 0)}
    table.end_call(editor, 3.0)
    again = calls.begin(3.0, thread=3, parent=wire.ParentCall(1, 1), follows=follows)
    assert again.parents == (CallKey(3, 0),)


def test_a_thread_without_a_call_is_known_by_its_childrens_word():
    """Thread 5 makes no call; its child says where it was forked, so the join above is found."""
    table = ProcessTable()
    calls = Calls(table)
    table.end_call(calls.begin(0.0, thread=0), 1.0)
    child = calls.begin(
        1.0, thread=6, parent=wire.ParentCall(5, 0), follows=(wire.ParentCall(0, 1),)
    )
    assert child.parents == (CallKey(0, 0),)
    table.end_call(child, 2.0)
    assert CallKey(6, 0) in calls.begin(2.0, thread=0).parents
    program = child.program
    assert set(program.threads) == {0, 5, 6}
    for number in range(7, 2100, 2):  # every one names another thread that never calls
        parent = wire.ParentCall(number + 1, 0)
        calls.begin(3.0, thread=number, parent=parent, follows=(wire.ParentCall(0, 1),))
    assert len(program.threads) <= 1024
    assert table.check_integrity() == []


def test_a_ring_of_parents_does_no_harm():
    """A client may claim that 1 is under 2 and 2 under 1."""
    table = ProcessTable()
    calls = Calls(table)
    for number, parent in ((1, 2), (2, 1), (1, 2), (5, 5)):
        call = calls.begin(0.0, thread=number, parent=wire.ParentCall(parent, 1))
        table.end_call(call, 1.0)
    assert table.check_integrity() == []


def test_the_states_of_a_program():
    """Active, tool wait, idle, expired, active again; draining, ended."""
    table = ProcessTable(lease_s=60.0)
    calls = Calls(table)
    call = calls.begin(0.0)
    program = call.program
    assert program.state(0.0) is ProgramState.ACTIVE
    table.end_call(call, 1.0)
    assert program.state(2.0) is ProgramState.TOOL_WAIT
    assert program.state(50.0) is ProgramState.IDLE
    for now_s in range(2, 70):
        over = table.sweep(float(now_s))
    assert program.state(70.0) is ProgramState.EXPIRED
    assert over == []
    call = calls.begin(70.0)
    assert call.program is program
    assert program.account.service_s == 1.0
    table.end_program(program, "ok", 71.0)
    assert program.state(71.0) is ProgramState.DRAINING
    table.end_call(call, 72.0)
    assert program.state(72.0) is ProgramState.ENDED
    assert table.sweep(73.0) == [program.program_id]
    for now_s in range(73, 700):
        table.sweep(float(now_s))
    assert table.get(program.program_id) is None


def test_a_late_call_is_charged_to_the_tombstone():
    """After the end of its session a call is served all the same."""
    table = ProcessTable()
    calls = Calls(table)
    call = calls.begin(0.0)
    table.end_call(call, 1.0)
    table.end_program(call.program, "ok", 1.0)
    late = calls.begin(2.0)
    table.end_call(late, 4.0)
    assert late.program is call.program
    assert late.program.account.service_s == 3.0
    assert late.program.calls_late == 1
    assert table.check_integrity() == []


def test_after_a_standstill_leases_do_not_all_run_out():
    """Nobody could renew while the gateway was stopped."""
    table = ProcessTable(lease_s=60.0)
    program = table.open_program("", "s", 0.0)
    table.sweep(1.0)
    table.sweep(100.0)
    assert program.state(100.0) is ProgramState.IDLE
    assert table.renew(program.program_id, 101.0)
    for now_s in range(101, 162):
        table.sweep(float(now_s))
    assert program.state(162.0) is ProgramState.EXPIRED


def test_many_leases_that_run_out_at_once_are_taken_in_parts():
    """A sweep is short; the next one goes on."""
    table = ProcessTable(lease_s=1.0)
    for number in range(600):
        table.open_program("", f"s{number}", 0.0)
    over = []
    sweeps = 0
    while table.has_due(2.0):
        over += table.sweep(2.0)
        sweeps += 1
    assert (len(over), sweeps) == (600, 3)
    assert all(p.expired for p in table.programs())


def test_a_heartbeat_renews_and_a_leaked_one_ends_after_a_day():
    """A lease is held by heartbeats, but not for ever."""
    table = ProcessTable(lease_s=60.0)
    program = table.open_program("", "s", 0.0)
    now_s = 0.0
    while now_s < 90_000.0 and not program.expired:
        table.renew(program.program_id, now_s)
        table.sweep(now_s)
        now_s += 4.0
    assert 86_400.0 <= now_s <= 86_410.0
    assert not table.renew(program.program_id, now_s)


def test_an_ended_session_begins_again_when_its_owner_says_so():
    """A start of an id that has been used goes on with the service it had."""
    table = ProcessTable()
    calls = Calls(table)
    call = calls.begin(0.0)
    table.end_call(call, 2.0)
    table.end_program(call.program, "ok", 2.0)
    assert table.open_program("", "s", 3.0).state(3.0) is ProgramState.ENDED
    program = table.open_program("", "s", 3.0, reopen=True)
    assert program.state(3.0) is ProgramState.TOOL_WAIT
    assert program.account.service_s == 2.0
    assert table.check_integrity() == []


def test_a_full_table_forgets_tombstones_then_silent_programs_then_refuses():
    """A program with a call in flight is never dropped."""
    table = ProcessTable(programs_max=3)
    calls = Calls(table)
    busy = calls.begin(0.0, "busy")
    silent = table.open_program("", "silent", 1.0)
    ended = table.open_program("", "ended", 2.0)
    table.end_program(ended, "ok", 2.0)
    calls.begin(3.0, "new-1")
    assert table.get(ended.program_id) is None
    calls.begin(4.0, "new-2")
    assert table.get(silent.program_id) is None
    with pytest.raises(TableFull):
        calls.begin(5.0, "new-3")
    assert table.get(busy.program.program_id) is busy.program
    assert table.check_integrity() == []
    assert table.counts["programs_evicted"] == 2


def test_ids_are_scoped_and_compared_whole():
    """The same session of another key is another program; session-1 is not session-12."""
    ids = {program_id_of(*pair) for pair in (("a", "b:c"), ("a:b", "c"), ("", "session-1"),
                                             ("", "session-12"), ("k", "session-1"))}  # fmt: skip
    assert len(ids) == 5


def test_an_untagged_call_is_a_program_of_its_own():
    """It is over when the call is."""
    table = ProcessTable()
    call = Calls(table).begin(0.0, None)
    assert call.program.session is None
    table.end_call(call, 1.0)
    assert call.program.state(1.0) is ProgramState.ENDED
    assert table.sweep(1.0) == [call.program.program_id]


def test_the_view_of_a_program_has_what_the_demo_prints():
    """Name, state, calls, service, wait, level and threads."""
    table = ProcessTable()
    call = Calls(table).begin(0.0)
    table.end_call(call, 2.0)
    table.fold_report("e0", "b", report(call, 1.25), 2.0)
    row = table.program_views(2.0)[0]
    assert (row["name"], row["state"], row["calls"], row["calls_by_wall_time"]) == (
        "s", "tool_wait", 1, 0)  # fmt: skip
    assert (row["service_s"], row["wait_s"], row["level"]) == (1.25, 0.25, 2)
    assert (row["prompt_tokens"], row["hit_tokens"], row["output_tokens"]) == (10, 4, 3)
    assert row["engines"] == {"e0": 1}
    assert row["threads"] == [
        {"thread": 0, "parent": None, "calls": 1, "calls_ended": 1, "last_parents": []}
    ]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("begin", "begin", "untagged", "retry", "end", "end", "abort", "report", "report",
             "double", "end_program", "sweep", "renew")
        ),
        st.integers(0, 7),
        st.integers(0, 50),
    ),
    max_size=60,
)  # fmt: skip


class Machine:
    """Drives a table at random and keeps the books a second time, naively."""

    def __init__(self, accounting: str, closed_calls_max: int) -> None:
        self.table = ProcessTable(
            accounting=accounting,  # type: ignore[arg-type]
            lease_s=5.0,
            programs_max=6,
            closed_calls_max=closed_calls_max,
        )
        self.now_s = 0.0
        self.made = 0
        self.told = 0  # reports
        self.open: list[Call] = []
        self.calls: list[Call] = []
        self.wall_s: dict[str, float] = {}
        self.model_s: dict[str, float] = {}

    def step(self, what: str, which: int, amount: int) -> None:
        """Take one step."""
        self.now_s += amount / 10
        if what in ("begin", "untagged", "retry"):
            self.begin(what, which)
        elif what in ("end", "abort") and self.open:
            call = self.open.pop(which % len(self.open))
            self.wall_s[call.call_id] = self.now_s - call.begun_s
            self.table.end_call(call, self.now_s, completed=what == "end")
            self.table.end_call(call, self.now_s + 1, completed=what == "end")
        elif what in ("report", "double") and self.calls:
            call = self.calls[-1 - which % len(self.calls)]
            for _ in range(2 if what == "double" else 1):
                self.told += 1
                if self.table.fold_report("e0", "b", report(call, amount / 10), self.now_s):
                    assert call.call_id not in self.model_s
                    self.model_s[call.call_id] = amount / 10
        elif what == "end_program":
            program = self.table.get(program_id_of("", f"s{which % 3}"))
            if program is not None:
                self.table.end_program(program, "ok", self.now_s)
        elif what == "sweep":
            self.table.sweep(self.now_s)
        elif what == "renew":
            self.table.renew(program_id_of("", f"s{which % 3}"), self.now_s)

    def begin(self, what: str, which: int) -> None:
        """Begin a call; a retry is of whatever call had that client id last."""
        self.made += 1
        attempt = self.made if what == "retry" else 0
        arrival = Arrival("", f"s{which % 3}", thread=which // 3, client_call=f"c{which}",
                          attempt=attempt)  # fmt: skip
        if what == "untagged":
            arrival = Arrival("")
        try:
            call, _ = self.table.begin_call(arrival, f"{self.made:08x}", self.now_s)
        except TableFull:
            return
        self.table.dispatch(call, "e0")
        self.open.append(call)
        self.calls.append(call)

    def expected_s(self, program: object) -> float:
        """Return the sum over the program's calls, each by its dearest attempt."""
        groups: dict[int, float] = {}
        for call in self.calls:
            if call.program is program:
                cost_s = self.model_s.get(call.call_id, self.wall_s.get(call.call_id, 0.0))
                group = id(call.cost.attempts or call.cost)
                groups[group] = max(groups.get(group, 0.0), cost_s)
        return sum(groups.values())


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from((3, 100)))
def test_random_calls_are_charged_right_or_the_loss_is_counted(steps, closed_calls_max):
    """PLAS equals the naive books; what is not in them has been counted as unknown."""
    machine = Machine("plas", closed_calls_max)
    for step in steps:
        machine.step(*step)
        assert machine.table.check_integrity() == []
    counts = machine.table.counts
    assert counts["reports"] == machine.told
    assert counts["reports_foreign"] == 0
    for program in machine.table.programs():
        assert math.isclose(program.account.service_s, machine.expected_s(program), abs_tol=1e-6)
    assert counts["reports"] == (
        len(machine.model_s) + counts["reports_duplicate"] + counts["reports_unknown"]
    )
    logical_open = sum(not c.superseded for c in machine.open)
    assert counts["calls_begun"] - counts["calls_ended"] == logical_open


@settings(max_examples=100, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_a_path_does_not_depend_on_the_order_of_reports(steps, random):
    """ATLAS ends at the same figure whichever order the reports come in, if none is lost."""
    calls_only = [step for step in steps if step[0] in ("begin", "end")]
    figures = []
    for shuffled in (False, True):
        machine = Machine("atlas", 100)
        for step in calls_only:
            machine.step(*step)
        for call in list(machine.open):
            machine.table.end_call(call, machine.now_s + 1)
        order = list(machine.calls)
        if shuffled:
            random.shuffle(order)
        for number in order:
            machine.table.fold_report(
                "e0", "b", report(number, int(number.call_id, 16) % 7), machine.now_s
            )
        figures.append({p.program_id: p.account.service_s for p in machine.table.programs()})
    assert figures[0].keys() == figures[1].keys()
    for program_id, service_s in figures[0].items():
        assert math.isclose(service_s, figures[1][program_id])


def test_a_check_in_slices_sees_every_program():
    """What the running gateway does each second: some programs at a time, then from the start."""
    table = ProcessTable()
    for number in range(25):
        table.open_program("", f"s{number}", 0.0)
    broken = table.get(program_id_of("", "s3"))
    assert broken is not None
    broken.in_flight = 1
    found = [table.check_integrity(programs_max=10) for _ in range(3)]
    assert sorted(map(len, found)) == [0, 0, 2]
    broken.in_flight = 0
    assert [table.check_integrity(programs_max=10) for _ in range(3)] == [[], [], []]


def test_what_has_changed_is_bounded_by_the_table_if_nobody_asks():
    """Without a journal nobody takes the list of changes."""
    table = ProcessTable(programs_max=10)
    for number in range(200):
        call, _ = table.begin_call(Arrival(""), f"{number:08x}", float(number))
        table.dispatch(call, "e0")
        table.end_call(call, float(number))
        table.sweep(float(number))
    assert len(table.changes) <= len(table) <= 10

"""Both measures of a program, sum and longest path, and what a change between them finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.accounts import (
    UNSETTLED_MAX,
    Account,
    Attained,
    Charged,
    Cost,
    PathAccount,
)
from autellix.server.channel import CallReport
from autellix.server.process_table import ProcessTable
from autellix.server.program import Arrival, Call


class Book:
    """One program of one table, its calls on engine e0."""

    def __init__(self) -> None:
        self.table = ProcessTable()
        self.program = self.table.open_program("", "s", 0.0)
        self.count = 0

    def begin(self) -> Call:
        """Begin a call."""
        self.count += 1
        call, _ = self.table.begin_call(Arrival("", "s"), f"{self.count:08x}", 0.0)
        self.table.dispatch(call, "e0")
        return call

    def report(self, call: Call, service_s: float, wait_s: float = 0.0, *, part: int = 0) -> None:
        """An engine request of a call says what it took."""
        message = self.message(call.call_id, service_s, wait_s, part=part)
        assert self.table.fold_report("e0", "b", message, 0.0)

    @staticmethod
    def message(
        call_id: str, service_s: float, wait_s: float = 0.0, *, part: int = 0
    ) -> CallReport:
        """Return what an engine says of a call."""
        return CallReport(
            seq=1, call_id=call_id, program_id=None, request_id=f"r{part}", reason="stop",
            service_s=service_s, wait_s=wait_s, preemptions=0, swaps=0, prompt_tokens=0,
            hit_tokens=0, output_tokens=0, level=1,
        )  # fmt: skip

    def attained(self, accounting: str) -> Attained:
        """Return what the next call would carry under an accounting."""
        self.table.accounting = accounting  # type: ignore[assignment]
        return self.program.attained()


def test_a_switch_of_policy_finds_the_figure_it_goes_by():
    """Three parallel calls of 5 s: a sum of 15 s, a path of 5 s, whenever one asks."""
    book = Book()
    calls = [book.begin() for _ in range(3)]
    for call in calls:
        book.table.end_call(call, 5.0)
        book.report(call, 5.0)
    for _ in range(2):
        assert (book.attained("plas").service_s, book.program.account.service_s) == (15.0, 15.0)
        assert (book.attained("atlas").service_s, book.program.account.service_s) == (5.0, 5.0)
    last = book.begin()
    book.table.end_call(last, 2.0)
    book.report(last, 2.0)
    assert book.attained("atlas").service_s == 7.0
    assert book.attained("plas").service_s == 17.0
    assert book.table.open_program("", "new", 0.0).account.accounting == "plas"


def test_waits_go_along_a_path_of_their_own():
    """Parallel waits are one; those of a chain add up, also if the first report is late."""
    book = Book()
    calls = [book.begin() for _ in range(16)]
    for call in calls:
        book.table.end_call(call, 0.0)
        book.report(call, 2.0, 1.0)
    assert book.attained("atlas").wait_s == 1.0
    assert book.attained("plas").wait_s == book.program.wait_s == 16.0
    first = book.begin()
    book.table.end_call(first, 0.0)
    second = book.begin()
    book.table.end_call(second, 0.0)
    book.report(second, 0.5, 3.0)
    assert book.attained("atlas") == (2.5, 4.0)
    book.report(first, 0.5, 2.0)
    assert book.attained("atlas") == (3.0, 6.0)


def test_the_engine_requests_of_one_call_wait_side_by_side():
    """A call of n = 3 is as long as its longest, on a path; a sum is charged each of them."""
    book = Book()
    call = book.begin()
    book.table.end_call(call, 0.0)
    for part, wait_s in enumerate((1.0, 3.0, 2.0)):
        book.report(call, 0.5 + part, wait_s, part=part)
    assert book.attained("atlas") == (2.5, 3.0)
    assert book.attained("plas") == (4.5, 6.0)


def test_a_call_without_a_report_lengthens_no_other_path():
    """What is settled meanwhile in parallel is not before the calls that come after it."""
    book = Book()
    long, short = book.begin(), book.begin()
    book.table.end_call(short, 1.0)
    after = book.begin()
    book.table.end_call(long, 10.0)
    book.report(long, 10.0)
    book.table.end_call(after, 1.0)
    assert book.attained("atlas").service_s == 10.0
    book.report(after, 1.0)
    book.report(short, 1.0)
    assert book.attained("atlas").service_s == 10.0


def test_a_path_of_calls_that_never_report_is_bounded_and_right():
    """The oldest keeps its wall time; a report that comes after all still counts."""
    account = Account("atlas")
    costs = []
    for _ in range(3 * UNSETTLED_MAX):
        cost = Cost()
        account.begin(cost)
        cost.ended, cost.wall_s = True, 1.0
        account.change(cost, 0.0)
        costs.append(cost)
    assert account.service_s == 3 * UNSETTLED_MAX
    assert len(account.path._unsettled) == UNSETTLED_MAX
    costs[0].tell("r", 99.0, 7.0)
    account.change(costs[0], 1.0)
    assert account.path.longest() == (99.0, 7.0)


def test_what_was_charged_is_restored_in_both_measures():
    """And what other gateways have charged is added to a sum, and no part of a path."""
    account = Account()
    account.restore(Charged(15.0, 5.0, 2.0))
    account.note_elsewhere(Charged(4.0, 7.0, 1.0))
    assert (account.sum.service_s, account.path.longest()) == (19.0, (7.0, 2.0))
    account.note_elsewhere(Charged(6.0, 3.0, 3.0))
    assert (account.sum.service_s, account.path.longest()) == (21.0, (5.0, 3.0))
    cost = Cost()
    account.begin(cost)
    assert account.charged([(cost, 0.5)]) == (15.5, 5.5, 2.0)


def test_a_path_goes_on_from_one_gateway_to_another():
    """A call here comes after what is known to have been elsewhere when it began, not later."""
    account = Account("atlas")
    account.note_elsewhere(Charged(2.0, 2.0, 1.0))
    cost = Cost()
    account.begin(cost)
    account.note_elsewhere(Charged(9.0, 9.0, 9.0))
    cost.ended = True
    cost.tell("r", 3.0, 4.0)
    account.change(cost, 0.0)
    assert account.charged() == (3.0, 5.0, 5.0)
    assert account.path.longest() == (9.0, 9.0)


def test_a_call_comes_after_what_has_ended_elsewhere_and_not_after_what_runs_there():
    """A long call in flight at another gateway counts as service, and nobody waits for it."""
    account = Account("atlas")
    account.note_elsewhere(Charged(12.0, 12.0, 0.0), ended_path_s=2.0)
    assert account.service_s == 12.0
    cost = Cost()
    account.begin(cost)
    cost.ended = True
    cost.tell("r", 3.0, 0.0)
    account.change(cost, 0.0)
    assert account.charged() == (3.0, 5.0, 0.0)


def test_what_a_call_in_flight_has_taken_counts_from_where_it_starts():
    """A short call beside a long path makes it no longer; one after an unsettled end does."""
    book = Book()
    beside = book.begin()
    long = book.begin()
    book.table.end_call(long, 10.0)
    ((_, charged),) = book.table.take_changed(3.0)
    assert charged == (13.0, 10.0, 0.0)
    book.table.end_call(beside, 4.0)
    book.table.accounting = "atlas"
    book.begin()
    ((_, charged),) = book.table.take_changed(2.0)
    assert charged == (16.0, 12.0, 0.0)


@pytest.mark.parametrize("accounting", ["plas", "atlas"])
def test_two_gateways_do_not_raise_each_other(accounting):
    """Each has one call of 30 s in flight, and hears of the other one twice a second."""
    tables = [ProcessTable(accounting=accounting) for _ in range(2)]
    calls = []
    for table in tables:
        call, _ = table.begin_call(Arrival("", "s"), "0badcafe", 0.0)
        table.dispatch(call, "e0")
        calls.append(call)

    def sync(now_s: float) -> list[float]:
        """Each writes, then each reads; return what each takes the program for, seconds."""
        said = [table.take_changed(now_s) for table in tables]
        for call, ((_, charged),) in zip(calls, reversed(said), strict=True):
            call.program.account.note_elsewhere(charged)
        return [call.program.account.service_s for call in calls]

    for turn in range(1, 61):
        # what is in flight counts elsewhere, so that it is known if the gateway dies, not here
        assert sync(turn / 2) == [turn / 2, turn / 2]
    for table, call in zip(tables, calls, strict=True):
        table.end_call(call, 30.0)
    assert sync(30.0) == ([60.0, 60.0] if accounting == "plas" else [30.0, 30.0])
    for table in tables:
        message = Book.message("0badcafe", 2.0)
        assert table.fold_report("e0", "b", message, 30.0)
    assert sync(30.0) == ([4.0, 4.0] if accounting == "plas" else [2.0, 2.0])


class PlainPath:
    """The rule of `PathAccount`, every call looked at each time; it stands for one gateway."""

    def __init__(self) -> None:
        self.settled = (0.0, 0.0)
        self.begun: dict[Cost, tuple[tuple[float, float], list[Cost]]] = {}
        self.unsettled: list[Cost] = []
        self.over: set[Cost] = set()

    def begin(self, cost: Cost) -> None:
        """Note that a call begins."""
        first = cost.attempts[0] if cost.attempts else cost
        start, waits_on = self.begun.get(first, (self.settled, self.unsettled))
        self.begun[cost] = start, list(waits_on)

    def change(self, cost: Cost) -> None:
        """Note that an ended call has changed, or has ended now."""
        if cost not in self.unsettled:
            if cost in self.over:  # settled before this report came
                self.settled = later_of(self.settled, self.end_of(cost))
                return
            self.over.add(cost)
            self.unsettled.append(cost)
        self.settle_ready()
        if len(self.unsettled) > UNSETTLED_MAX:
            self.settle(self.unsettled[0])
            self.settle_ready()

    def end_of(self, cost: Cost) -> tuple[float, float]:
        """Return its end as far as its start is settled."""
        (start_s, wait_start_s), _ = self.begun[cost]
        return start_s + cost.path_s, wait_start_s + cost.wait_s

    def settle_ready(self) -> None:
        """Settle all that can be."""
        while ready := [c for c in self.unsettled if c.reports and not self.begun[c][1]]:
            self.settle(ready[0])

    def settle(self, cost: Cost) -> None:
        """Fix the end of a call."""
        self.unsettled.remove(cost)
        end = self.end_of(cost)
        self.settled = later_of(self.settled, end)
        for other, (start, waits_on) in self.begun.items():
            if cost in waits_on:
                waits_on.remove(cost)
                self.begun[other] = later_of(start, end), waits_on

    def starts(self) -> dict[Cost, tuple[float, float]]:
        """Return where each call starts, with the best that is known."""
        ends: dict[Cost, tuple[float, float]] = {}
        for cost in self.unsettled:
            service_s, wait_s = self.start_of(cost, ends)
            ends[cost] = service_s + cost.path_s, wait_s + cost.wait_s
        return {cost: self.start_of(cost, ends) for cost in self.begun}

    def start_of(self, cost: Cost, ends: dict[Cost, tuple[float, float]]) -> tuple[float, float]:
        """Return where a call starts."""
        start, waits_on = self.begun[cost]
        for waited in waits_on:
            start = later_of(start, ends[waited])
        return start


def later_of(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Return the later point, of service and of wait apart."""
    return max(one[0], other[0]), max(one[1], other[1])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "begin", "end", "end", "report", "retry"]),
            st.integers(0, 40), st.floats(0, 9), st.floats(0, 9),
        ),
        max_size=150,
    )
)  # fmt: skip
def test_starts_shared_by_calls_change_no_figure(steps):
    """Begins, retries, ends and reports in any order, against a look at every call; exactly."""
    new, plain = PathAccount(), PlainPath()
    costs: list[Cost] = []
    for what, which, service_s, wait_s in steps:
        cost = costs[-1 - which % len(costs)] if costs else Cost()
        if what == "begin" or (what == "retry" and costs):
            again = Cost()
            if what == "retry":
                cost.share_with(again)
            costs.append(again)
            plain.begin(again)
            new.begin(again)
            continue
        if what == "end" and costs and not cost.ended:
            cost.ended, cost.wall_s = True, service_s
        elif what == "report" and costs:
            cost.tell("r", service_s, wait_s)
        if cost.ended:
            plain.change(cost)
            new.change(cost)
        starts = plain.starts()
        longest = plain.settled
        for ended in plain.unsettled:
            service_s, wait_s = starts[ended]
            longest = later_of(longest, (service_s + ended.path_s, wait_s + ended.wait_s))
        assert new.longest() == longest
        assert len(new._unsettled) == len(plain.unsettled)
        for cost in costs:
            expected = max(longest[0], starts[cost][0] + 3.0)
            assert new.own([(cost.start, 3.0)]).service_s == expected


def test_the_end_of_a_call_does_not_look_at_all_in_flight():
    """A fan-out that begins at one point is one start, whatever its width."""
    path = PathAccount()
    costs = [Cost() for _ in range(5000)]
    first, second, *fan = costs
    path.begin(first)
    path.begin(second)
    for cost in (first, second):
        cost.ended, cost.wall_s = True, 1.0
        path.change(cost)
    for cost in fan:
        path.begin(cost)
    assert len({id(cost.start) for cost in fan}) == 1
    assert [len(cost.waiting) for cost in (first, second)] == [1, 1]
    first.tell("r", 7.0, 0.0)
    path.change(first)
    assert (first.waiting, fan[-1].start.service_s) == ([], 7.0)
    assert path.own([(fan[-1].start, 2.0)]).service_s == 9.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "begin", "end", "end", "report", "switch"]),
            st.integers(0, 9), st.integers(0, 7), st.integers(0, 7),
        ),
        max_size=45,
    )
)  # fmt: skip
@pytest.mark.parametrize("accounting", ["plas", "atlas"])
def test_both_measures_are_right_whatever_was_asked_for_meanwhile(accounting, steps):
    """Against a naive longest path over what had ended when each call began."""
    book = Book()
    open_calls: list[Call] = []
    ended: list[Call] = []
    before: dict[str, list[Call]] = {}
    unheard: list[Call] = []
    told: dict[str, tuple[int, int]] = {}
    for what, which, service_s, wait_s in steps:
        if what == "begin" and book.count < UNSETTLED_MAX:
            open_calls.append(book.begin())
            before[open_calls[-1].call_id] = list(ended)
        elif what == "end" and open_calls:
            call = open_calls.pop(which % len(open_calls))
            book.table.end_call(call, 0.0)
            ended.append(call)
            unheard.append(call)
            told[call.call_id] = service_s, wait_s
        elif what == "report" and unheard:
            call = unheard.pop(which % len(unheard))
            book.report(call, *told[call.call_id])
        elif what == "switch":
            book.attained(("plas", "atlas")[which % 2])
    for call in unheard:
        book.report(call, *told[call.call_id])
    paths: list[dict[str, int]] = [{}, {}]
    for call in ended:
        for kind, path in enumerate(paths):
            start = max((path[c.call_id] for c in before[call.call_id]), default=0)
            path[call.call_id] = start + told[call.call_id][kind]
    sums = tuple(sum(figures[kind] for figures in told.values()) for kind in (0, 1))
    longest = tuple(max(path.values(), default=0) for path in paths)
    assert book.attained(accounting) == (sums if accounting == "plas" else longest)

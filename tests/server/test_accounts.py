"""Both measures of a program, sum and longest path, and what a change between them finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.accounts import UNSETTLED_MAX, Account, Attained, Charged, Cost
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
        message = CallReport(
            seq=1, call_id=call.call_id, program_id=None, request_id=f"r{part}", reason="stop",
            service_s=service_s, wait_s=wait_s, preemptions=0, swaps=0, prompt_tokens=0,
            hit_tokens=0, output_tokens=0, level=1,
        )  # fmt: skip
        assert self.table.fold_report("e0", "b", message, 0.0)

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
    """A call of n = 3 waits as long as its slowest, on a path; of service each is charged."""
    book = Book()
    call = book.begin()
    book.table.end_call(call, 0.0)
    for part, wait_s in enumerate((1.0, 3.0, 2.0)):
        book.report(call, 0.5, wait_s, part=part)
    assert book.attained("atlas") == (1.5, 3.0)


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
    costs[0].reports, costs[0].model_s, costs[0].wait_s = ("r",), 99.0, 7.0
    account.change(costs[0], 1.0)
    assert account.path.longest() == (99.0, 7.0)


def test_what_was_charged_is_restored_in_both_measures():
    """And what other gateways have charged is added to a sum, and no part of a path."""
    account = Account()
    account.restore(Charged(15.0, 5.0, 2.0))
    account.note_elsewhere(Charged(4.0, 7.0, 1.0))
    assert (account.sum.service_s, account.path.longest()) == (19.0, (7.0, 2.0))
    account.note_elsewhere(Charged(6.0, 3.0, 3.0))
    assert (account.sum.service_s, account.path.longest()) == (21.0, (7.0, 3.0))
    assert account.charged(1.0, 0.5) == (16.0, 7.5, 3.0)


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

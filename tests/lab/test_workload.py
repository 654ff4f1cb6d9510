"""Arrivals and waits: seeded, the same for all arms, stretched by the rate and by nothing else."""

from __future__ import annotations

import itertools

import pytest

from autellix.server.lab import trace, workload
from autellix.server.lab.workload import Waits


@pytest.fixture(scope="module")
def chat():
    """The chat set."""
    return trace.load("chat-sharegpt")


def test_the_rate_stretches_time_and_changes_nothing_else(chat):
    """Twice the rate is the same programs in half the time."""
    slow = list(workload.poisson(chat, 1.0, 200.0, seed=3))
    fast = list(workload.poisson(chat, 2.0, 100.0, seed=3))
    assert [a.program.name for a in slow] == [a.program.name for a in fast]
    assert [a.at_s for a in slow] == pytest.approx([2 * a.at_s for a in fast])


def test_the_rate_is_kept(chat):
    """Ten thousand arrivals come at the rate that was asked for."""
    count = sum(1 for _ in workload.poisson(chat, 5.0, 2000.0, seed=0))
    assert count == pytest.approx(10_000, rel=0.03)


def test_every_program_comes_once_before_any_comes_again(chat):
    """A pass through the trace is a shuffle of it."""
    order = list(itertools.islice(workload.shuffled(chat, 1), 2 * len(chat)))
    for part in (order[: len(chat)], order[len(chat) :]):
        assert {p.name for p in part} == {p.name for p in chat}
    assert order[: len(chat)] != order[len(chat) :]


def test_a_crowd_comes_at_once_and_changes_nothing_else(chat):
    arrivals = list(workload.crowd(chat, 1.0, 100.0, seed=1, at_s=50.0, size=7))
    extra = [a for a in arrivals if a.number >= workload.CROWD_FROM]
    assert [a.at_s for a in extra] == [50.0] * 7
    assert len({a.number for a in extra}) == 7
    others = [a for a in arrivals if a not in extra]
    assert others == list(workload.poisson(chat, 1.0, 100.0, seed=1))
    assert arrivals == sorted(arrivals, key=lambda a: a.at_s)


def test_a_burst_has_its_phases(chat):
    """The rate changes where it should."""
    arrivals = list(workload.burst(chat, [(1.0, 1000.0), (9.0, 1000.0), (0.0, 100.0)], seed=1))
    early = sum(a.at_s < 1000 for a in arrivals)
    late = sum(1000 <= a.at_s < 2000 for a in arrivals)
    assert early == pytest.approx(1000, rel=0.15)
    assert late == pytest.approx(9000, rel=0.05)
    assert early + late == len(arrivals)


def test_waits_are_recorded_drawn_scaled_and_capped(chat):
    """Every rule of replay, on calls that say what they waited for."""
    human = chat[0].calls[1]
    recorded = next(c for p in trace.load("mini-swe") for c in p.calls if (c.tool_s or 0) > 2)
    assert recorded.tool_s is not None
    assert Waits().before(0, human) == 0.0
    assert Waits().before(0, recorded) == recorded.tool_s
    assert Waits(scale=5, cap_s=7.0).before(0, recorded) == 7.0
    assert Waits(scale=0).before(0, recorded) == 0.0
    drawn = Waits(null="drawn", seed=4)
    assert drawn.before(9, human) == drawn.before(9, human) > 0
    assert drawn.before(9, human) != drawn.before(10, human)
    assert Waits(null="drawn").before(0, chat[0].calls[0]) == 0.0, "a program's start has no wait"


def test_size_classes_part_a_trace_in_four(chat):
    """Quartiles by generated tokens hold about a quarter each."""
    cuts = workload.size_classes(chat)
    counts = [0] * 4
    for program in chat:
        counts[workload.size_class(program, cuts)] += 1
    assert all(0.2 * len(chat) < count < 0.3 * len(chat) for count in counts), counts


def test_programs_that_do_not_fit_are_left_out(chat):
    """No prompt is cut."""
    fits = workload.fitting(chat, 8192)
    assert 0.8 < len(fits) / len(chat) < 0.95
    assert max(p.largest_tokens for p in fits) <= 8192

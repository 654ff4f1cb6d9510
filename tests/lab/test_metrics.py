"""Figures: nearest-rank quantiles, honest intervals, limits that must be crossed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autellix.server.lab import capacity, metrics
from autellix.server.lab.measure import Rule, recovery_s
from autellix.server.lab.workload import CROWD_FROM


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_a_value_with_enough_at_or_below_it(values: list[float], share: float):
    """Nearest rank: one of the values, and the share holds."""
    found = metrics.quantile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9


def test_spread_of_nothing_is_empty():
    """No program, no figure: not a zero that looks like a result."""
    assert metrics.spread([]) == {}
    assert metrics.spread([2.0, 4.0])["mean"] == 3.0


def test_the_bootstrap_interval_covers_the_mean_and_narrows():
    """More seeds, narrower interval; the truth is inside."""
    randomness = random.Random(3)
    few = [randomness.gauss(1.0, 0.2) for _ in range(5)]
    many = [randomness.gauss(1.0, 0.2) for _ in range(100)]
    low, high = metrics.bootstrap(many)
    assert low < 1.0 < high
    few_low, few_high = metrics.bootstrap(few)
    assert high - low < few_high - few_low
    assert metrics.bootstrap(few) == (few_low, few_high), "seeded"


def test_slope_of_a_line_is_its_slope():
    """Least squares."""
    assert metrics.slope([(t, 3 * t + 1) for t in range(10)]) == pytest.approx(3.0)
    assert metrics.slope([(1.0, 2.0)]) == 0.0


@given(st.floats(0.2, 7.9))
def test_bisection_finds_the_limit(limit: float):
    """To the tolerance, from below."""
    found = capacity.highest_rate(lambda rate: rate <= limit, 0.1, 8.0)
    assert found <= limit <= found * 1.03


@pytest.mark.parametrize("limit", [0.05, 9.0])
def test_a_limit_outside_the_sweep_is_an_error(limit: float):
    """The last point of a sweep is no answer."""
    with pytest.raises(capacity.NotCrossedError):
        capacity.highest_rate(lambda rate: rate <= limit, 0.1, 8.0)


@pytest.mark.parametrize(
    ("slow_until_s", "expected_s"),
    [(0, 60.0), (59, 120.0), (301, 360.0), (331, 420.0), (3600, None)],
)
def test_recovery_is_when_the_response_is_back_for_good(slow_until_s: int, expected_s):
    """One program a second of 10 s; after a crowd at 600 s they take 30 s for so long."""
    rule = Rule()
    programs = [
        SimpleNamespace(
            number=second,
            arrival_s=float(second),
            ended_s=second + (30.0 if 600 <= second < 600 + slow_until_s else 10.0),
        )
        for second in range(1800)
    ]
    crowd = SimpleNamespace(number=CROWD_FROM, arrival_s=600.0, ended_s=5000.0)
    outcome = SimpleNamespace(programs=[*programs, crowd])
    assert recovery_s(outcome, rule, 9000.0) == expected_s


@pytest.mark.parametrize(("slow_until_s", "expected_s"), [(0, 60.0), (59, 120.0), (301, 360.0)])
def test_recovery_of_a_burst_counts_from_the_end_of_its_overload(slow_until_s: int, expected_s):
    """300 s of overload from 600 s on, slow throughout, and slow for so long after it."""
    programs = [
        SimpleNamespace(
            number=second,
            arrival_s=float(second),
            ended_s=second + (30.0 if 600 <= second < 900 + slow_until_s else 10.0),
        )
        for second in range(1800)
    ]
    outcome = SimpleNamespace(programs=programs)
    assert recovery_s(outcome, Rule(), 9000.0, overload_s=300.0) == expected_s

"""What is left of programs and gaps, learned from what ended."""

from __future__ import annotations

import random

from autellix.server.policy.gaps import SHORT_S, Gaps
from autellix.server.policy.hazard import BUCKETS, Hazard, bucket_of
from autellix.server.policy.work import shares


def learned(sizes_s: list[float]) -> Hazard:
    hazard = Hazard()
    for size_s in sizes_s:
        hazard.passed(0, bucket_of(size_s))
        hazard.ended(bucket_of(size_s))
    return hazard


def test_programs_that_are_alike_have_less_left_the_further_they_are():
    """So those that began go on: program order."""
    draw = random.Random(1)
    hazard = learned([draw.uniform(4.0, 6.0) for _ in range(400)])
    left = [hazard.left_s(at_s) for at_s in (0.0, 1.0, 3.0, 4.0)]
    assert left == sorted(left, reverse=True)
    assert 3.0 < left[0] < 8.0


def test_where_long_ones_go_on_for_longer_more_service_means_more_left():
    """So the order is least attained service."""
    draw = random.Random(2)
    hazard = learned([0.05 * draw.paretovariate(0.8) for _ in range(800)])
    left = [hazard.left_s(at_s) for at_s in (0.1, 0.5, 2.0, 10.0)]
    assert left == sorted(left)


def test_programs_under_way_count():
    """Half of them are still running at 10 s: who has come that far is not about to end."""
    ended = learned([1.0] * 50)
    both = learned([1.0] * 50)
    for _ in range(50):
        both.passed(0, bucket_of(10.0))
    assert both.left_s(0.0) > ended.left_s(0.0) * 1.5


def test_counts_fade():
    """After a change of load the estimate follows, and the counts stay small."""
    hazard = learned([1.0] * 3000 + [100.0] * 3000)
    assert hazard.left_s(0.0) > 10 * learned([1.0] * 3000).left_s(0.0)
    assert hazard.endings <= 1024
    assert len(hazard._ended) == BUCKETS


def test_short_tools_are_waited_for_and_humans_are_not():
    """A cache takes 40 s to fill: tools of 1 s keep the seat, humans of 10 minutes do not."""
    gaps = Gaps()
    for _ in range(50):
        gaps.returned("tool", 1.0)
        gaps.returned("human", 600.0)
    assert gaps.keep_s("tool", 40.0) >= 1.0
    assert gaps.keep_s("human", 40.0) == SHORT_S


def test_gaps_are_bounded_and_unknown_names_follow_all():
    """Names are the client's: their number is limited."""
    gaps = Gaps()
    for number in range(1000):
        gaps.returned(f"tool-{number}", 0.5)
    assert len(gaps) <= 256
    assert gaps.keep_s("never seen", 40.0) >= 0.5
    assert gaps.keep_s(None, 40.0) < float("inf")


def test_the_shares_of_a_step_add_up_to_it():
    """Whatever its mixture, and a long context takes more of a step that only decodes."""
    draw = random.Random(3)
    for _ in range(200):
        parts = [(1, draw.randrange(1, 9000)) for _ in range(draw.randrange(1, 40))]
        if draw.random() < 0.5:
            parts.append((draw.randrange(1, 2048), 3000))
        assert abs(sum(shares(parts, 0.05, 2048)) - 0.05) < 1e-9
    short, long = shares([(1, 100), (1, 10_000)], 1.0, 2048)
    assert abs(long - 100 * short) < 1e-9

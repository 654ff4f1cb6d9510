"""A frozen engine is found, a busy one never."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autellix.server.pool.progress import ProgressLimits, ProgressWatch

LIMITS = ProgressLimits()


def run(watch: ProgressWatch, seconds: range, *, answers: bool, steps: bool, **more: object):
    """Look once a second; return the first second and reason of a verdict, None: none came."""
    for now_s in seconds:
        if answers:
            watch.note_answer(now_s=now_s)
        watch.note_steps(now_s if steps else 0, is_busy=True, now_s=now_s, **more)  # type: ignore[arg-type]
        if (reason := watch.frozen_reason(now_s=now_s)) is not None:
            return now_s, reason
    return None


def test_a_silent_front_end_is_frozen_though_steps_go_on():
    """The API server is stopped, its engine core is not."""
    at_s, reason = run(ProgressWatch(LIMITS, now_s=0), range(60), answers=False, steps=True) or (
        0,
        "",
    )
    assert at_s == 16
    assert "health probe" in reason


def test_a_step_counter_that_stands_still_is_frozen_though_probes_are_answered():
    """The engine core is stopped, its API server is not."""
    at_s, reason = run(ProgressWatch(LIMITS, now_s=0), range(60), answers=True, steps=False) or (
        0,
        "",
    )
    assert 15 < at_s < 30
    assert "engine step" in reason


def test_an_idle_engine_need_not_step():
    """Nothing to do is no reason."""
    watch = ProgressWatch(LIMITS, now_s=0)
    for now_s in range(1000):
        watch.note_answer(now_s=now_s)
        watch.note_steps(7, is_busy=False, now_s=now_s)
        assert watch.frozen_reason(now_s=now_s) is None


def test_long_steps_give_more_time_up_to_the_cap():
    """Eight times a step of 2.5 s is 20 s; eight times 10 s is capped, so out within 30 s."""
    watch = ProgressWatch(LIMITS, now_s=0)
    watch.note_steps(1, is_busy=True, now_s=0, longest_step_s=2.5)
    assert watch.limit_s(now_s=1) == 20
    watch.note_steps(2, is_busy=True, now_s=1, longest_step_s=10)
    assert watch.limit_s(now_s=2) == 25
    assert watch.limit_s(now_s=700) == 15  # ten minutes later they are forgotten


def test_an_announced_long_step_is_waited_for():
    """A compilation takes minutes and is said to."""
    watch = ProgressWatch(LIMITS, now_s=0)
    assert run(watch, range(300), answers=True, steps=False, long_step_expected=True) is None


def test_a_gateway_that_slept_draws_no_conclusion():
    """After 60 s of standing still itself, it looks afresh."""
    watch = ProgressWatch(LIMITS, now_s=0)
    assert run(watch, range(5), answers=True, steps=True) is None
    assert watch.frozen_reason(now_s=65) is None


@given(st.lists(st.tuples(st.floats(0.05, 4.0), st.floats(0.01, 14.0)), max_size=60))
def test_an_engine_whose_steps_are_shorter_than_the_floor_is_never_ejected(looks):
    """Saturated, slow to answer, but moving: whatever the times of looks and steps."""
    watch = ProgressWatch(LIMITS, now_s=0.0)
    now_s = step_at_s = answer_at_s = 0.0
    step = 0
    for gap_s, pause_s in looks:
        now_s += gap_s
        if now_s - step_at_s >= min(pause_s, 11.0):
            step, step_at_s = step + 1, now_s
        if now_s - answer_at_s >= min(pause_s, 11.0):
            answer_at_s = now_s
            watch.note_answer(now_s=now_s)
        watch.note_steps(step, is_busy=True, now_s=now_s)
        assert watch.frozen_reason(now_s=now_s) is None

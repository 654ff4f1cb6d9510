"""The scene: two long programs hold both slots, then three short ones come. Virtual time."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler

BLOCK = 4
LEVELS = {"level_bounds_s": [4.0, 16.0, 64.0], "window_steps": 1, "beta": 50.0}
MODES = [(1, False), (1, True), (2, False), (2, True), (3, True)]


def scene(pipeline: Pipeline, *, prompt: int = 6) -> None:
    """Play the scene to its end and check every token."""
    calls = []

    def add(name: str, answer: int) -> None:
        first = 1000 * (1 + len(calls))
        pipeline.add(
            make_request(
                name,
                range(first, first + prompt),
                answer,
                block_tokens=BLOCK,
                arrival_s=pipeline.clock.now_s(),
                session_id=f"program-{name}",
            )
        )
        calls.append((name, prompt, answer))

    add("long-1", 60)
    add("long-2", 60)
    for _ in range(12):
        pipeline.step()
    for name in ("short-1", "short-2", "short-3"):
        add(name, 3)
    pipeline.run()
    pipeline.check_tokens(calls)


@pytest.mark.parametrize(("depth", "v2"), MODES)
@pytest.mark.parametrize("policy", ["plas", "atlas", "mlfq"])
def test_short_programs_end_before_long_ones(policy: str, depth: int, v2: bool):
    """Under a program-aware policy whoever asks for little is not kept waiting by who took much."""
    pipeline = build_pipeline(
        AutellixScheduler, depth=depth, v2_runner=v2, policy_config={"policy": policy, **LEVELS}
    )
    scene(pipeline)
    assert list(pipeline.order())[:3] == ["short-1", "short-2", "short-3"]
    assert pipeline.scheduler.accounts.preemptions >= 2


@pytest.mark.parametrize(("depth", "v2"), MODES)
def test_adaptive_takes_slots_and_leaves_the_seats(depth: int, v2: bool):
    """With KV to spare the short ones get the slots, and who gave them keeps its place inside."""
    pipeline = build_pipeline(
        AutellixScheduler,
        depth=depth,
        v2_runner=v2,
        kv_blocks=512,
        policy_config={"policy": "adaptive", "window_steps": 1},
    )
    scene(pipeline)
    scheduler = pipeline.scheduler
    assert sorted(list(pipeline.order())[:3]) == ["short-1", "short-2", "short-3"]
    assert scheduler.accounts.preemptions >= 2
    assert scheduler.autellix.running_set.pauses == 0


@pytest.mark.parametrize(("depth", "v2"), MODES)
def test_short_programs_end_after_long_ones_under_fcfs(depth: int, v2: bool):
    """First come, first served: the same scene the other way round."""
    pipeline = build_pipeline(
        AutellixScheduler, depth=depth, v2_runner=v2, policy_config={"policy": "fcfs", **LEVELS}
    )
    scene(pipeline)
    assert sorted(list(pipeline.order())[:2]) == ["long-1", "long-2"]
    assert pipeline.scheduler.accounts.preemptions == 0


@pytest.mark.parametrize(("depth", "v2"), MODES)
def test_fcfs_is_stock_step_by_step(depth: int, v2: bool):
    """``fcfs`` does in every step what vLLM's own scheduler does."""
    ours = build_pipeline(
        AutellixScheduler, depth=depth, v2_runner=v2, policy_config={"policy": "fcfs"}
    )
    stock = build_pipeline(AsyncScheduler, depth=depth, v2_runner=v2, priority=False)
    scene(ours)
    scene(stock)
    assert [(f.request_id, f.at_s) for f in ours.finished.values()] == [
        (f.request_id, f.at_s) for f in stock.finished.values()
    ]


@pytest.mark.parametrize(("depth", "v2"), MODES)
def test_adaptive_answers_are_right_and_the_door_opens(depth: int, v2: bool):
    """KV for two of five programs: two are inside, the others' calls are not shown, all end."""
    pipeline = build_pipeline(
        AutellixScheduler,
        depth=depth,
        v2_runner=v2,
        kv_blocks=48,
        slots=8,
        policy_config={"policy": "adaptive"},
    )
    scheduler = pipeline.scheduler
    scheduler.autellix.kinds.anybody.answer_tokens = 10.0
    calls = []
    for number in range(5):
        first = 1000 * (1 + number)
        name = f"call-{number}"
        pipeline.add(
            make_request(
                name,
                range(first, first + 60),
                10,
                block_tokens=BLOCK,
                arrival_s=pipeline.clock.now_s(),
                session_id=f"program-{number}",
            )
        )
        calls.append((name, 60, 10))
    pipeline.step()
    assert (scheduler.waiting.count(2), len(scheduler.autellix.running_set)) == (3, 3)
    pipeline.run()
    pipeline.check_tokens(calls)
    assert list(pipeline.order()) == [name for name, *_ in calls]
    assert scheduler.accounts.preemptions == 0
    rooms = scheduler.autellix.running_set
    assert (rooms.active, len(rooms)) == (0, 0)


def test_blocks_that_others_gave_up_are_not_eaten_by_running_calls():
    """Two long calls give way to a large short one; a third one's prompt does not take the room."""
    pipeline = build_pipeline(
        AutellixScheduler,
        depth=1,
        v2_runner=False,
        kv_blocks=48,
        slots=8,
        policy_config={"policy": "plas", **LEVELS},
    )
    scheduler = pipeline.scheduler
    for number in range(3):
        first = 1000 * (1 + number)
        pipeline.add(
            make_request(
                f"long-{number}",
                range(first, first + 20),
                80,
                block_tokens=BLOCK,
                arrival_s=pipeline.clock.now_s(),
                session_id=f"program-{number}",
            )
        )
    for _ in range(20):
        pipeline.step()
    pipeline.add(
        make_request(
            "short",
            range(9000, 9100),
            2,
            block_tokens=BLOCK,
            arrival_s=pipeline.clock.now_s(),
            session_id="program-short",
        )
    )
    pipeline.step()
    kept = dict(scheduler._kept_for)
    steps = 0
    while "short" not in pipeline.finished:
        pipeline.step()
        steps += 1
        assert steps < 40
    assert scheduler.accounts.preemptions <= 3
    assert not scheduler._kept_for
    assert not scheduler._held
    assert "short" in kept or steps <= 8
    pipeline.run()

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

"""No free place waits for a window: what the paper keeps resident calls for does not occur."""

from __future__ import annotations

import random

import pytest

from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from tests.engine.missed import Missed, watch

BLOCK = 4
MODES = [(1, False), (2, True)]
POLICIES = ["plas", "atlas", "adaptive"]


def play(pipeline: Pipeline, seed: int, *, calls: int = 120, prompt_max: int = 60) -> Missed:
    """Play a random workload of programs that share prompts, to its end."""
    rng = random.Random(seed)
    scheduler = pipeline.scheduler
    assert isinstance(scheduler, AutellixScheduler)
    missed = watch(scheduler)
    for number in range(calls):
        base = rng.choice([0, 1000 * number])
        prompt, answer = rng.randint(1, prompt_max), rng.randint(1, 40)
        pipeline.add(
            make_request(
                f"call-{number}",
                range(base, base + prompt),
                answer,
                block_tokens=BLOCK,
                session_id=f"program-{rng.randint(1, 12)}",
                arrival_s=pipeline.clock.now_s(),
            )
        )
        for _ in range(rng.choice([0, 0, 3, 12])):
            pipeline.step()
    pipeline.run()
    return missed


def pipeline_of(
    policy: str, depth: int, v2: bool, *, kv_blocks: int, cls: type = AutellixScheduler
) -> Pipeline:
    """Return a pipeline with windows of 8 steps."""
    return build_pipeline(
        cls,
        depth=depth,
        v2_runner=v2,
        slots=6,
        kv_blocks=kv_blocks,
        block_tokens=BLOCK,
        step_tokens=64,
        max_model_tokens=120,
        policy_config={
            "policy": policy,
            "level_bounds_s": [4.0, 16.0, 64.0],
            "window_steps": 8,
        },
    )


@pytest.mark.parametrize(("depth", "v2"), MODES)
@pytest.mark.parametrize("kv_blocks", [80, 400])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_ready_call_that_fits_is_left_waiting(policy: str, kv_blocks: int, depth: int, v2: bool):
    """With KV for all, where slots are short, and with KV for few, where blocks are."""
    contended = 0
    for seed in (0, 1):
        missed = play(pipeline_of(policy, depth, v2, kv_blocks=kv_blocks), seed)
        assert missed.misses == []
        assert len(missed.late) <= missed.steps // 100
        contended += missed.roomy if kv_blocks < 400 else missed.queued
    assert contended > 10


class Seldom(AutellixScheduler):
    """A fault: calls are admitted in every fourth step only, as in windows."""

    def schedule(self, throttle_prefills: bool = False):
        self.waiting.gate = None if self._steps_scheduled % 4 == 0 else 0
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.waiting.gate = None


def test_a_scheduler_that_fills_places_in_windows_is_seen():
    """The count is worth something only if it is not nought there."""
    missed = play(pipeline_of("plas", 1, False, kv_blocks=400, cls=Seldom), seed=0)
    assert len(missed.misses) > 20

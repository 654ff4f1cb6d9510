"""The cool-down of a victim: who gave way and came back is spared for a while. Virtual time."""

from __future__ import annotations

import pytest

from autellix.server.engine.scheduler import AutellixScheduler
from tests.engine.test_scene_features import Scene, modes


def scene_of(depth: int, v2: bool, *, cooldown_steps: int, **args) -> Scene:
    """Return a scene in which preemption is looked at in every step and nobody is promoted."""
    settings = {
        "policy": "plas",
        "level_bounds_s": [4.0],
        "beta": None,
        "window_steps": 1,
        "cooldown_steps": cooldown_steps,
    }
    return Scene(depth, v2, policy_config=settings, kv_blocks=512, **args)


def scheduler_of(scene: Scene) -> AutellixScheduler:
    scheduler = scene.pipeline.scheduler
    assert isinstance(scheduler, AutellixScheduler)
    return scheduler


def is_running(scene: Scene, name: str) -> bool:
    return any(request.request_id == name for request in scheduler_of(scene).running)


def step_until(scene: Scene, name: str, *, runs: bool) -> None:
    """Step until a call runs, or does not."""
    for _ in range(400):
        if is_running(scene, name) == runs:
            return
        scene.steps(1)
    raise AssertionError(f"{name}: nothing changed in 400 steps")


@modes
@pytest.mark.parametrize(("cooldown_steps", "second_victim"), [(8, "large"), (0, "small")])
def test_a_victim_that_is_back_is_spared(
    cooldown_steps: int, second_victim: str, depth: int, v2: bool
):
    """It loses least, so without a cool-down it would be taken out each time."""
    scene = scene_of(depth, v2, cooldown_steps=cooldown_steps)
    scene.add("large", 40, 100)
    scene.add("small", 6, 100)
    scene.steps(12)
    scene.add("short-1", 6, 3)
    step_until(scene, "short-1", runs=True)
    assert is_running(scene, "large")
    step_until(scene, "small", runs=True)  # it is back
    scene.add("short-2", 6, 3)
    step_until(scene, "short-2", runs=True)
    other = {"large": "small", "small": "large"}[second_victim]
    assert not is_running(scene, second_victim)
    assert is_running(scene, other)
    scene.end()


@modes
def test_protection_doubles_up_to_eight_times(depth: int, v2: bool):
    """After k preemptions it lasts min(2^(k-1), 8) cool-downs from the step of the return."""
    cooldown = 3
    scene = scene_of(depth, v2, cooldown_steps=cooldown, slots=1)
    scheduler = scheduler_of(scene)
    scene.add("long", 6, 200)
    scene.steps(8)
    assert scheduler.calls["long"].level == 2
    lasted = []
    for times in range(7):
        scene.add(f"short-{times}", 6, 2)
        back = scheduler.accounts.admitted_at("long")
        step_until(scene, "long", runs=False)
        taken_out = scheduler._steps_scheduled - 1  # in the step that was scheduled last
        lasted.append(taken_out - back)
        assert scheduler.requests["long"].num_preemptions == times + 1
        step_until(scene, "long", runs=True)
    assert lasted[1:] == [cooldown * factor for factor in (1, 2, 4, 8, 8, 8)]
    scene.end()

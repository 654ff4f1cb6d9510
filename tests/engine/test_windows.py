"""When preemption is reconsidered: in every N-th step, and at once on an event. Virtual time.

N is 1000 here, and nobody waits for so long: whatever happens is due to an event.
"""

from __future__ import annotations

import pytest

from autellix.server.engine.scheduler import AutellixScheduler
from tests.engine.test_scene_features import Scene, modes

SELDOM = 1000
BOUNDS_S = [4.0, 16.0, 64.0]


def scene_of(depth: int, v2: bool, *, window_steps: int = SELDOM, **args) -> Scene:
    """Return a scene in which nobody is promoted and windows are far apart."""
    settings = {
        "policy": "plas",
        "level_bounds_s": BOUNDS_S,
        "beta": None,
        "window_steps": window_steps,
    }
    return Scene(depth, v2, policy_config=settings, **args)


def scheduler_of(scene: Scene) -> AutellixScheduler:
    scheduler = scene.pipeline.scheduler
    assert isinstance(scheduler, AutellixScheduler)
    return scheduler


def level_of(scene: Scene, name: str) -> int:
    return scheduler_of(scene).calls[name].level


def running(scene: Scene) -> list[str]:
    return [request.request_id for request in scheduler_of(scene).running]


@modes
@pytest.mark.parametrize("newcomers", [0, 1])
def test_who_arrives_above_somebody_is_served_in_the_next_step(
    newcomers: int, depth: int, v2: bool
):
    """Also if the call that was admitted last, and is last in the batch, is of level 1 itself."""
    scene = scene_of(depth, v2, slots=2 + newcomers)
    scene.longs()
    for number in range(newcomers):
        scene.add(f"new-{number}", 6, 30)
        scene.steps(1)
        assert running(scene)[-1] == f"new-{number}"
        assert level_of(scene, f"new-{number}") == 1
    assert level_of(scene, "long-1") > 1
    scene.add("short-1", 6, 3)
    scene.steps(1)
    assert scheduler_of(scene).accounts.preemptions == 1
    assert "short-1" in running(scene)
    scene.end()


@modes
def test_an_arrival_is_not_forgotten_while_a_long_prompt_takes_all_tokens(depth: int, v2: bool):
    """Nobody gives way to it as long as it would find no tokens; in the first step after, one does.

    The prompt is of level 1 and in parts, so it is behind the long programs in the batch.
    """
    scene = scene_of(depth, v2, slots=3, step_tokens=16)
    scene.longs(prompt=4)
    scene.add("prompt", 60, 30)
    scene.steps(1)
    scheduler = scheduler_of(scene)
    assert (running(scene)[-1], level_of(scene, "prompt")) == ("prompt", 1)
    scene.add("short-1", 6, 3)
    while scheduler._tokens_wanted() >= scheduler.max_num_scheduled_tokens:
        scene.steps(1)
        assert scheduler.accounts.preemptions == 0
        assert "short-1" not in running(scene)
    scene.steps(1)
    assert scheduler.accounts.preemptions == 1
    assert "short-1" in running(scene)
    scene.end()


@modes
def test_a_finish_opens_the_window(depth: int, v2: bool):
    """Two calls wait, one finishes: one gets its slot, and for the other a long one gives way."""
    scene = scene_of(depth, v2, slots=3)
    scene.longs(steps=0)
    scene.add("brief", 6, 10)
    scene.steps(1)
    for name in ("wait-1", "wait-2"):
        scene.add(name, 6, 3)  # all are of level 1 still: no event
    scheduler = scheduler_of(scene)
    while "brief" not in scene.pipeline.finished:
        assert scheduler.accounts.preemptions == 0
        scene.steps(1)
    assert level_of(scene, "long-1") > level_of(scene, "wait-2")
    scene.steps(1)
    assert scheduler.accounts.preemptions == 1
    assert {"wait-1", "wait-2"} < set(running(scene))
    scene.end()


@modes
def test_a_demotion_is_no_event(depth: int, v2: bool):
    """A running call falls below a waiting one: it gives way in the next window, not before."""
    window = 20
    scene = scene_of(depth, v2, window_steps=window)
    scene.longs(steps=1)
    scene.add("short-1", 6, 3)
    scheduler = scheduler_of(scene)
    below = 0
    while scheduler._steps_scheduled < window:
        below += level_of(scene, "long-1") > level_of(scene, "short-1")
        scene.steps(1)
        assert scheduler.accounts.preemptions == 0
    assert below >= window // 2
    scene.steps(1)
    assert scheduler.accounts.preemptions == 1
    scene.end()


@modes
def test_a_free_slot_is_filled_in_every_step(depth: int, v2: bool):
    """However far apart the windows are: no slot is free beside a call that waits."""
    scene = scene_of(depth, v2, slots=4, kv_blocks=512)
    scheduler = scheduler_of(scene)
    schedule = scheduler.schedule
    filled: list[tuple[int, int]] = []

    def scheduled(*args):
        output = schedule(*args)
        filled.append((len(scheduler.running), len(scheduler.waiting)))
        return output

    scheduler.schedule = scheduled
    for number in range(40):
        scene.add(f"call-{number}", 6, 1 + 7 * number % 11)
        scene.steps(1)
    scene.end()
    assert all(runs == 4 for runs, waits in filled if waits)
    assert sum(waits > 0 for _, waits in filled) >= 40

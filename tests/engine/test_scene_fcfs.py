"""The other half of the feature scenes: under ``fcfs`` the same short programs end last."""

from __future__ import annotations

from tests.engine.test_scene_features import LEVELS, Grammar, Scene, modes, structured

FCFS = {**LEVELS, "policy": "fcfs"}
SHORTS = ("short-1", "short-2", "short-3")


def add_shorts(scene: Scene, prompt: int, **args) -> None:
    """Three short programs come."""
    for name in SHORTS:
        scene.add(name, prompt, 3, **args)


def check_order(ended: list[str]) -> None:
    """The long programs, which came first, end first."""
    assert sorted(ended[:2]) == ["long-1", "long-2"]
    assert sorted(ended[2:]) == sorted(SHORTS)


@modes
def test_chunked_prefill(depth: int, v2: bool):
    """Prompts longer than a step."""
    scene = Scene(depth, v2, step_tokens=16, policy_config=FCFS)
    scene.longs(prompt=50)
    add_shorts(scene, 20)
    check_order(scene.end())


@modes
def test_prefix_caching(depth: int, v2: bool):
    """A prefix in the cache is no reason to go first."""
    scene = Scene(depth, v2, policy_config=FCFS)
    scene.longs(prompt=20, base=500)
    add_shorts(scene, 24, base=500)
    check_order(scene.end())


@modes
def test_aborts(depth: int, v2: bool):
    """One long and one short program leave; who stays keeps the order."""
    scene = Scene(depth, v2, policy_config=FCFS)
    scene.longs()
    add_shorts(scene, 6)
    scene.steps(2)
    scene.pipeline.abort("short-2")
    ended = scene.end(but=("short-2",))
    assert ended[0] == "short-2"
    assert sorted(ended[1:3]) == ["long-1", "long-2"]
    assert ended[3:] == ["short-1", "short-3"]


@modes
def test_structured_output(depth: int, v2: bool):
    """A call whose grammar is ready waits for its turn."""
    scene = Scene(depth, v2, policy_config=FCFS)
    manager = scene.pipeline.scheduler.structured_output_manager
    manager.accept_tokens = lambda request, tokens: True
    scene.longs()
    request = structured(scene, "short-1", 3)
    request.structured_output_request.grammar = Grammar()
    assert scene.end()[-1] == "short-1"
    assert scene.pipeline.scheduler.accounts.preemptions == 0


@modes
def test_two_answers_to_one_call(depth: int, v2: bool):
    """``n = 2``: both requests wait for the long programs."""
    scene = Scene(depth, v2, policy_config=FCFS)
    scene.longs()
    names = ("0_chatcmpl-short", "1_chatcmpl-short")
    for name in names:
        scene.add(name, 6, 3, base=7000, session_id="program-short")
    assert sorted(scene.end()[2:]) == sorted(names)

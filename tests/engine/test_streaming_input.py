"""A session whose input comes in parts, paused between two of them. Virtual time."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from autellix.server.engine import compat
from autellix.server.engine.build import make_request
from tests.engine.test_scene_features import BLOCK, Scene, modes


def add_part(scene: Scene, first: int, *, more: bool = True) -> None:
    """Hand over six tokens of input; the answer to them has two."""
    scene.pipeline.scheduler.add_request(
        make_request(
            "session",
            range(first, first + 6),
            2,
            block_tokens=BLOCK,
            session_id="program-session",
            resumable=more,
        )
    )


def pause(scene: Scene) -> None:
    """Step until the session waits for its next part."""
    request = scene.pipeline.scheduler.requests["session"]
    for _ in range(40):
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            return
        scene.steps(1)
    raise AssertionError("the session was never paused")


def start(depth: int, v2: bool, **args) -> Scene:
    """Return a scene whose session is paused."""
    scene = Scene(depth, v2, **args)
    scene.pipeline.tokens["session"] = []
    add_part(scene, 7000)
    pause(scene)
    return scene


@modes
@pytest.mark.parametrize("steps_paused", [0, 3])
def test_an_abort_of_a_paused_session_frees_all(steps_paused: int, depth: int, v2: bool):
    """Its slot, its blocks and its books; its service is folded once, and others go on."""
    if depth > 2 and steps_paused and compat._HAS_SIDE_QUEUE:
        pytest.skip("vLLM 0.30 counts a session as paused twice with three batches in flight")
    scene = start(depth, v2)
    scene.longs(steps=steps_paused)
    scheduler = scene.pipeline.scheduler
    assert scheduler.num_waiting_for_streaming_input == 1
    used_s = scheduler.calls["session"].service_s
    assert used_s >= 2
    scene.pipeline.abort("session")
    assert scheduler.num_waiting_for_streaming_input == 0
    assert "session" not in scheduler.calls
    scene.steps(2)
    assert len(scheduler.running) == 2
    scene.end()  # which looks for blocks and calls that are left
    assert len(scheduler.accounts) == len(scheduler.kv_holding_waiting) == 0
    program = scheduler.autellix.ledger.get("program-session")
    assert (program.calls, program.sum_s) == (0, used_s)


@pytest.mark.parametrize("depth", [1, 2])  # the harness's second runner knows no resumed session
def test_a_paused_session_keeps_its_slot_and_nobody_gives_way_to_it(depth: int):
    """It is charged nothing and waits for nobody meanwhile: its client is what it waits for."""
    scene = start(depth, False)
    scheduler = scene.pipeline.scheduler
    call = scheduler.calls["session"]
    scene.add("long-1", 6, 60)
    scene.steps(depth)  # what was in flight has come back
    used_s, level = call.service_s, call.level
    scene.steps(12)
    assert scheduler.calls["long-1"].level > level
    assert scheduler.accounts.preemptions == 0
    scene.add("short-1", 6, 3)
    scene.steps(1)
    assert [request.request_id for request in scheduler.running] == ["short-1"]
    assert (call.service_s, call.waiting_since_s) == (used_s, None)
    add_part(scene, 8000)
    pause(scene)
    assert call.service_s > used_s
    add_part(scene, 9000, more=False)  # which is the end of a paused one
    scene.end()
    assert scheduler.autellix.ledger.get("program-session").sum_s == call.service_s

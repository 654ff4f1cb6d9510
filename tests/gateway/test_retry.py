"""A call whose engine dies before it answers goes to another engine: once, and charged once."""

from __future__ import annotations

import aiohttp
import pytest

from autellix.server.channel import CallReport
from autellix.server.process_table import ProcessTable
from autellix.server.program import Arrival

from .conftest import Rig, running

TAGGED = {"X-Autellix-Session": "run-1", "X-Autellix-Call": "call-1"}


async def test_a_call_of_an_engine_that_dies_is_answered_by_another(rig_of_two: Rig):
    """The client sees one good answer; the table one call, at home where it was answered."""
    rig = rig_of_two
    rig.engines[0].die_at = -1
    status, headers, _ = await rig.chat(TAGGED)
    assert (status, headers["X-Autellix-Engine"]) == (200, "e1")
    assert rig.pool.failures == ["e0"]
    program = next(iter(rig.table.programs()))
    assert (program.calls_begun, program.calls_ended, program.calls_retried) == (1, 1, 0)
    assert (program.home, program.engines) == ("e1", {"e0": 1, "e1": 1})
    assert len(rig.engines[0].seen) == len(rig.engines[1].seen) == 1
    ids = [engine.seen[0].headers["x-request-id"] for engine in rig.engines]
    assert ids[0] == ids[1], "a report of either is of the same call"
    await rig.settled()


async def test_a_call_that_kills_engines_kills_two_and_no_more():
    """The second death is the client's to know, with the engine's name."""
    async with running(3) as rig:
        for engine in rig.engines:
            engine.die_at = -1
        status, _, answer = await rig.chat(TAGGED)
        assert (status, answer["error"]["code"]) == (502, "engine_died")
        assert "e1" in answer["error"]["message"]
        assert [len(engine.seen) for engine in rig.engines] == [1, 1, 0]
        await rig.settled()


async def test_an_answer_that_has_begun_is_not_begun_again(rig_of_two: Rig):
    """The client would see two beginnings."""
    rig = rig_of_two
    rig.engines[0].die_at = 1
    url = f"{rig.url}/v1/completions"
    async with rig.client.post(url, json={"model": "m", "stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert not rig.engines[1].seen
    await rig.settled()


@pytest.mark.parametrize("background", [True, False])
async def test_a_background_response_is_not_tried_again(rig_of_two: Rig, background: bool):
    """Nobody knows how far it came; any other response is tried again."""
    rig = rig_of_two
    rig.engines[0].die_at = -1
    body = {"model": "m", "input": "hi", "background": background}
    async with rig.client.post(f"{rig.url}/v1/responses", json=body) as response:
        assert response.status == (502 if background else 200)
    assert len(rig.engines[1].seen) == (not background)
    await rig.settled()


async def test_a_response_that_goes_on_another_is_tried_nowhere_else(rig_of_two: Rig):
    """Only one engine holds what it goes on."""
    rig = rig_of_two
    body = {"model": "m", "input": "hi"}
    async with rig.client.post(f"{rig.url}/v1/responses", json=body) as response:
        assert response.headers["X-Autellix-Engine"] == "e0"
    first = rig.engines[0].seen[0].body["request_id"]
    rig.engines[0].die_at = -1
    body["previous_response_id"] = first
    async with rig.client.post(f"{rig.url}/v1/responses", json=body) as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "engine_died"
    assert not rig.engines[1].seen
    await rig.settled()


@pytest.mark.parametrize("accounting", ["plas", "atlas"])
def test_what_the_dead_engine_reported_is_not_charged_twice(accounting):
    """Neither a report that came before the call went elsewhere nor one that comes after."""
    table = ProcessTable(accounting=accounting)
    call, _ = table.begin_call(Arrival(scope="", session="s"), "c0ffee00", 0.0)

    def report(engine: str, service_s: float) -> None:
        zeros = dict.fromkeys(
            ("wait_s", "preemptions", "swaps", "prompt_tokens", "hit_tokens", "output_tokens",
             "level"), 0,
        )  # fmt: skip
        message = CallReport(
            **{"seq": 1, "call_id": "c0ffee00", "program_id": call.program.program_id,
               "request_id": "r", "reason": "stop", "service_s": service_s, **zeros}
        )  # fmt: skip
        table.fold_report(engine, f"boot of {engine}", message, 1.0)

    table.dispatch(call, "e0")
    report("e0", 5.0)
    table.dispatch(call, "e1")
    report("e0", 5.0)
    report("e1", 2.0)
    table.end_call(call, 3.0)
    assert call.program.account.service_s == pytest.approx(2.0)
    assert call.program.calls_reported == call.program.calls_ended == 1
    assert table.check_integrity() == []

"""Calls through the gateway: bytes, identity, faults, hang-ups."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from autellix.server import call_tag
from autellix.server.accounts import Charged
from autellix.server.channel import CallReport
from autellix.server.process_table import program_id_of
from autellix.server.types import EngineState

from .conftest import KEY, Rig, until

TAGGED = {"X-Autellix-Session": "run-1", "X-Autellix-Thread": "0", "X-Autellix-Seq": "0",
          "X-Autellix-Call": "call-1"}  # fmt: skip


async def test_an_answer_comes_through_unchanged(rig: Rig):
    """The body is the engine's; headers of ours are added."""
    status, headers, answer = await rig.chat(TAGGED)
    assert status == 200
    assert answer == {"path": "/v1/chat/completions", "choices": [{"text": "word " * 5}]}
    assert headers["X-Autellix-Version"] == "1"
    assert headers["X-Autellix-Lease"] == "60"
    assert headers["X-Autellix-Program"] == program_id_of("", "run-1")
    await rig.settled()


async def test_a_stream_comes_through_byte_for_byte(rig: Rig):
    """A stream is the engine's, event by event."""
    body = {"model": "m", "stream": True}
    async with rig.client.post(f"{rig.url}/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream"
        text = await response.text()
    events = [line[6:] for line in text.split("\n\n") if line]
    assert [json.loads(e)["n"] for e in events[:-1]] == [0, 1, 2, 3, 4]
    assert events[-1] == "[DONE]"
    await rig.settled()


async def test_the_engine_gets_the_gateways_identity_alone(rig: Rig):
    """A client's copies of engine headers and fields are replaced or removed."""
    hostile = {**TAGGED, "X-Session-ID": "victim", "X-Vllm-Priority": "-99", "X-Request-Id": "mine",
               "X-data-parallel-rank": "3", "Authorization": "Bearer client-key"}  # fmt: skip
    fields = {"session_id": "victim", "priority": -9, "request_id": "r", "kv_transfer_params": {},
              "vllm_xargs": {"session_id": "victim", "keep": 1}}  # fmt: skip
    status, _, _ = await rig.chat(hostile, **fields)
    assert status == 200
    seen = rig.engine.seen[-1]
    program = rig.table.get(next(p.program_id for p in rig.table.programs()))
    assert program is not None
    assert program.session == "run-1"
    assert call_tag.unseal_program(seen.headers["x-session-id"], KEY) == program.program_id
    tag = call_tag.find_call(seen.headers["x-request-id"])
    assert tag is not None
    assert tag.thread == 0
    assert seen.headers["x-vllm-priority"] == "0"
    assert seen.headers["authorization"] == "Bearer engine-key"
    assert "x-data-parallel-rank" not in seen.headers
    assert not [name for name in seen.headers if name.startswith("x-autellix")]
    assert set(seen.body) == {"model", "messages", "vllm_xargs"}
    assert seen.body["vllm_xargs"] == {"keep": 1}


async def test_an_untouched_body_is_not_encoded_again(rig: Rig):
    """Without a field to remove, the engine gets the very bytes of the client."""
    body = b'{ "model" : "m",\n "x": 1.0,  "s": "\\u00e9" }'
    headers = {"content-type": "application/json"}
    async with rig.client.post(f"{rig.url}/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200
    assert rig.engine.seen[-1].raw == body


async def test_attained_service_becomes_the_priority(rig: Rig):
    """The second call of a program comes with the wall time of the first, in ms."""
    await rig.chat(TAGGED)
    program = next(iter(rig.table.programs()))
    program.account.restore(Charged(1.234))
    await rig.chat({**TAGGED, "X-Autellix-Call": "call-2"}, priority=66)
    assert rig.engine.seen[-1].headers["x-vllm-priority"] == "1300"


async def test_connections_to_the_engine_are_used_again(rig: Rig):
    """Ten calls, one after the other, take one connection."""
    for _ in range(10):
        await rig.chat()
    assert len(rig.engine.connections) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_cancels_its_call(rig: Rig, stream: bool):
    """The engine's call is gone at once, streamed or not, before the first byte or after."""
    rig.engine.stall_at = 2 if stream else 0
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = json.dumps({"model": "m", "stream": stream}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await rig.engine.arrived.wait()
    if stream:
        await reader.readuntil(b'"n": 1')
    writer.close()
    await asyncio.wait_for(rig.engine.stopped.wait(), 1.0)
    await rig.settled()
    assert rig.engine.cancelled == 1
    assert rig.table.loads() == {}


async def test_an_engine_that_dies_before_it_answers_is_a_502(rig: Rig):
    """The client gets an OpenAI-style error, the pool is told."""
    rig.engine.die_at = -1
    status, _, answer = await rig.chat(TAGGED)
    assert status == 502
    assert answer["error"]["code"] == "engine_died"
    assert "e0" in answer["error"]["message"]
    assert rig.pool.failures == ["e0"]
    await rig.settled()


async def test_an_engine_that_dies_in_mid_stream_cuts_the_client_off(rig: Rig):
    """No second status line: the client sees that the answer is not whole."""
    rig.engine.die_at = 2
    url = f"{rig.url}/v1/completions"
    async with rig.client.post(url, json={"model": "m", "stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert rig.pool.failures == ["e0"]
    await rig.settled()


async def test_a_refused_connection_is_tried_elsewhere(rig_of_two: Rig):
    """An engine that took no byte of the call is passed over."""
    await rig_of_two.engines[0].stop()
    status, headers, _ = await rig_of_two.chat()
    assert status == 200
    assert headers["X-Autellix-Engine"] == "e1"
    assert rig_of_two.pool.failures == ["e0"]
    await rig_of_two.settled()


async def test_without_a_ready_engine_there_is_a_503(rig: Rig):
    """The error names the engines' states and when to come again."""
    rig.engine.state = EngineState.STARTING
    status, headers, answer = await rig.chat()
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert "e0 is starting" in answer["error"]["message"]
    async with rig.client.get(f"{rig.url}/health") as response:
        assert response.status == 503
    rig.engine.state = EngineState.READY
    async with rig.client.get(f"{rig.url}/health") as response:
        assert response.status == 200
        assert (await response.json())["engines"] == {"e0": "ready"}


async def test_models_are_relayed_and_dangerous_routes_are_not(rig: Rig):
    """Only listed routes reach an engine."""
    async with rig.client.get(f"{rig.url}/v1/models") as response:
        assert response.status == 200
        assert (await response.json())["path"] == "/v1/models"
    for path in ("/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/collective_rpc"):
        async with rig.client.post(f"{rig.url}{path}", json={}) as response:
            assert response.status == 404
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert len(rig.engine.seen) == 1


async def test_a_retry_takes_the_place_of_the_attempt_before(rig: Rig):
    """Same call id, higher retry count: the first attempt is cancelled, one call is counted."""
    rig.engine.stall_at = 0
    first = asyncio.create_task(rig.chat(TAGGED))
    await rig.engine.arrived.wait()
    rig.engine.stall_at = None
    status, _, _ = await rig.chat({**TAGGED, "x-stainless-retry-count": "1"})
    assert status == 200
    status, _, answer = await first
    assert status == 409
    assert answer["error"]["code"] == "superseded"
    await until(lambda: rig.engine.cancelled == 1)
    await rig.settled()
    program = next(iter(rig.table.programs()))
    assert (program.calls_begun, program.calls_ended, program.calls_retried) == (1, 1, 1)


async def test_two_calls_with_one_id_are_both_served(rig: Rig):
    """A client's mistake costs it nothing but a counter."""
    answers = await asyncio.gather(rig.chat(TAGGED), rig.chat(TAGGED))
    assert [status for status, _, _ in answers] == [200, 200]
    assert rig.table.counts["duplicate_calls"] == 1
    await rig.settled()


async def test_an_http_1_0_client_gets_no_chunks(rig: Rig):
    """Its answer ends with the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = b'{"model": "m", "stream": true}'
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_pipelined_calls_are_answered_in_order(rig: Rig):
    """Two requests in one packet: two answers, in order, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    request = b"".join(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 13\r\n\r\n"
        b'{"model":"m"}' % path
        for path in (b"/v1/completions", b"/v1/embeddings")
    )
    writer.write(request)
    first = await reader.readuntil(b'"path": "/v1/completions"')
    second = await reader.readuntil(b'"path": "/v1/embeddings"')
    writer.close()
    assert first.count(b"HTTP/1.1 200") == 1
    assert second.count(b"HTTP/1.1 200") == 1


async def test_a_client_that_half_closes_counts_as_one_that_hung_up(rig: Rig):
    """Its call does not go on unseen."""
    rig.engine.stall_at = 0
    _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\n\r\n{}"
    )
    await rig.engine.arrived.wait()
    writer.write_eof()
    await asyncio.wait_for(rig.engine.stopped.wait(), 1.0)
    await rig.settled()
    writer.close()


async def test_an_engine_that_was_restarted_is_reached_at_its_new_address(rig: Rig):
    """A session lives through the death of its engine, with the service it had."""
    await rig.chat(TAGGED)
    program = next(iter(rig.table.programs()))
    service_s = program.account.service_s
    await rig.engine.stop()
    status, _, answer = await rig.chat({**TAGGED, "X-Autellix-Call": "call-2"})
    assert (status, answer["error"]["code"]) == (502, "engine_died")
    rig.engine.address = rig.engine.address._replace(uds=f"{rig.engine.address.uds}.2")
    await rig.engine.start()
    status, _, _ = await rig.chat({**TAGGED, "X-Autellix-Call": "call-3"})
    assert status == 200
    assert program.account.service_s >= service_s > 0
    await rig.settled()


async def test_the_engine_gets_a_path_whatever_form_the_client_used(rig: Rig):
    """An absolute URL in the request line names no other host; queries and escapes are kept."""
    for target, path in (
        (b"http://elsewhere.example/v1/models?a=b%20c", "/v1/models?a=b%20c"),
        (b"/v1/models/org%2Fname?x=%26", "/v1/models/org%2Fname?x=%26"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        assert rig.engine.seen[-1].path == path
        assert rig.engine.seen[-1].headers["host"] == "engine"


async def test_a_program_older_than_the_machines_clock_is_tagged(rig: Rig):
    """After a reboot the journal brings back programs that began before the clock did."""
    await rig.chat(TAGGED)
    next(iter(rig.table.programs())).arrival_s = -5000.0
    await rig.chat({**TAGGED, "X-Autellix-Call": "call-2"})
    tag = call_tag.find_call(rig.engine.seen[-1].headers["x-request-id"])
    assert tag is not None
    assert tag.arrival_ms == 0


def report_of(rig: Rig, call_id: str, service_s: float, wait_s: float) -> None:
    """The first engine says what a call took."""
    report = CallReport(
        seq=1, call_id=call_id, program_id=None, request_id="r", reason="stop",
        service_s=service_s, wait_s=wait_s, preemptions=0, swaps=0, prompt_tokens=0, hit_tokens=0,
        output_tokens=0, level=1,
    )  # fmt: skip
    assert rig.table.fold_report(rig.engine.engine_id, "b", report, 0.0)


async def test_a_call_carries_its_program_in_the_measure_of_the_policy(rig: Rig):
    """Three parallel calls of 5 s that waited 1 s: sums under plas, paths under atlas, and back."""
    rig.engine.stall_at = 0
    session = {"X-Autellix-Session": "run-1"}
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(rig.chat(session))
        await until(lambda: len(rig.engine.seen) == 3)
        rig.engine.go.set()
    for seen in list(rig.engine.seen):
        tag = call_tag.find_call(seen.headers["x-request-id"])
        assert tag is not None
        report_of(rig, tag.call_id, 5.0, 1.0)
    for accounting, service_ms, wait_ms in (
        ("plas", 15_000, 3000), ("atlas", 5000, 1000), ("plas", 15_000, 3000),
    ):  # fmt: skip
        rig.table.accounting = accounting  # type: ignore[assignment]
        await rig.chat(session)
        headers = rig.engine.seen[-1].headers
        tag = call_tag.find_call(headers["x-request-id"])
        assert tag is not None
        assert headers["x-vllm-priority"] == str(service_ms)
        assert (tag.wait_ms, tag.by_path) == (wait_ms, accounting == "atlas")
        report_of(rig, tag.call_id, 0.0, 0.0)

"""Receipts: what an answer says of its own call, in headers, and on request at the end."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from autellix.server.channel import CallEvent, CallReport
from autellix.server.gateway.upstream import TAIL_BYTES, Upstream
from autellix.server.receipts import usage_in
from autellix.server.types import EngineAddress, EngineState

from .conftest import Rig, running, until

FULL = {"X-Autellix-Receipt": "full"}


def tell(rig: Rig, **fields: object) -> None:
    """Report the newest call, as its engine would."""
    book = rig.gateway.book
    assert book is not None
    record = next(book.log.newest())
    values: dict[str, object] = {
        "seq": 1, "call_id": record.call_id, "program_id": None, "request_id": record.call_id,
        "reason": "stop", "service_s": 0.25, "wait_s": 0.125, "preemptions": 1, "swaps": 1,
        "prompt_tokens": 10, "hit_tokens": 4, "output_tokens": 3, "level": 2,
        "events": (CallEvent(0.1, "run", 1, "fresh"),), "stay_s": 0.4,
    }  # fmt: skip
    report = CallReport(**{**values, **fields})  # type: ignore[arg-type]
    assert rig.table.fold_report("e0", "boot", report, 0.0)
    book.fold("e0", report)


async def test_every_answer_names_program_engine_and_call(rig: Rig):
    """What is known at the head is there, what is not is absent, and the body is untouched."""
    status, headers, body = await rig.chat({"X-Autellix-Session": "s"})
    assert status == 200
    assert headers["X-Autellix-Engine"] == "e0"
    assert len(headers["X-Autellix-Call-Id"]) == 24
    assert "X-Autellix-Wait-Ms" not in headers
    assert body["choices"]
    _, headers, _ = await rig.chat(model="unknown")
    assert len(headers["X-Autellix-Call-Id"]) == 24


async def test_our_own_errors_name_the_call_too(rig: Rig):
    """A call that no engine took can be asked about."""
    await rig.engine.stop()
    status, headers, _ = await rig.chat({"X-Autellix-Session": "s"})
    assert status == 502
    assert len(headers["X-Autellix-Call-Id"]) == 24
    assert headers["X-Autellix-Program"] == next(iter(rig.table.programs())).program_id
    rig.engine.state = EngineState.DEAD
    status, headers, _ = await rig.chat()
    assert status == 503
    assert "X-Autellix-Call-Id" in headers


async def test_what_the_engine_has_said_by_the_head_is_in_it(rig: Rig):
    """A report that comes before the answer's head is in the headers."""
    rig.engine.stall_at = 0
    asking = asyncio.create_task(rig.chat())
    await rig.engine.arrived.wait()
    tell(rig)
    rig.engine.go.set()
    _, headers, _ = await asking
    told = {name: headers[f"X-Autellix-{name}"] for name in
            ("Level", "Wait-Ms", "Service-Ms", "Preemptions", "Swaps")}  # fmt: skip
    assert told == {"Level": "2", "Wait-Ms": "125", "Service-Ms": "250", "Preemptions": "1",
                    "Swaps": "1"}  # fmt: skip


async def test_a_full_receipt_waits_for_the_report(rig: Rig):
    """The head of an answer is held until the report is there."""
    rig.engine.stall_at = 0
    asking = asyncio.create_task(rig.chat(FULL))
    await rig.engine.arrived.wait()
    rig.engine.go.set()
    book = rig.gateway.book
    assert book is not None
    record = next(book.log.newest())
    await until(lambda: rig.engine.finished == 1)
    assert record.ended_s is None
    tell(rig)
    status, headers, body = await asking
    assert (status, headers["X-Autellix-Level"]) == (200, "2")
    assert body["path"] == "/v1/chat/completions"


async def test_a_full_receipt_does_not_wait_for_ever(rig: Rig):
    """A stock engine never reports: the answer comes without the figures."""
    async with asyncio.timeout(5):
        status, headers, body = await rig.chat(FULL)
    assert status == 200
    assert body["choices"]
    assert "X-Autellix-Level" not in headers
    await rig.settled()


async def stream(rig: Rig, headers: dict[str, str]) -> bytes:
    """Return the body of a streamed answer."""
    document = {"model": "m", "messages": [], "stream": True}
    url = f"{rig.url}/v1/chat/completions"
    async with rig.client.post(url, json=document, headers=headers) as response:
        return await response.read()


async def test_a_stream_ends_with_a_receipt_if_it_is_asked_for(rig: Rig):
    """The comment comes after [DONE]; all before it is what the engine sent."""
    plain = await stream(rig, {})
    assert plain.endswith(b"data: [DONE]\n\n")
    rig.engine.stall_at = 3
    rig.engine.arrived.clear()
    asking = asyncio.create_task(stream(rig, FULL))
    await rig.engine.arrived.wait()
    tell(rig)
    rig.engine.go.set()
    full = await asking
    assert full.startswith(plain)
    receipt = full.removeprefix(plain)
    assert receipt.startswith(b": autellix {")
    assert receipt.endswith(b"}\n\n")
    told = json.loads(receipt.removeprefix(b": autellix "))
    assert told["engine"] == "e0"
    assert (told["level"], told["wait_ms"], told["service_ms"]) == (2, 125, 250)
    assert await stream(rig, {}) == plain  # the connection to the engine is as good as before
    await rig.settled()


async def test_an_error_in_a_full_stream_is_passed_as_it_is(rig: Rig):
    """What is no event stream gets no comment."""
    document = {"model": "unknown", "messages": [], "stream": True}
    url = f"{rig.url}/v1/chat/completions"
    async with rig.client.post(url, json=document, headers=FULL) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == 404


async def test_the_server_may_give_none():
    """A server that says nothing of its calls cannot be asked for it."""
    async with running(receipts="off") as rig:
        assert b": autellix" not in await stream(rig, FULL)
    async with running(calls_remembered=0) as rig:
        assert rig.gateway.book is None
        status, headers, _ = await rig.chat(FULL)
        assert status == 200
        assert "X-Autellix-Level" not in headers


async def test_an_old_client_gets_no_comment(rig: Rig):
    """HTTP/1.0 knows no chunks: the answer ends where the engine's does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
        b"x-autellix-receipt: full\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )
    answer = await reader.read()
    assert answer.endswith(b"data: [DONE]\n\n")
    writer.close()


async def test_tokens_come_from_the_answer_of_a_stock_engine(rig: Rig):
    """Usage is counted until the engine reports, and then only the report."""
    rig.engine.usage = {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2}
    await rig.chat({"X-Autellix-Session": "s"})
    await rig.settled()
    program = next(iter(rig.table.programs()))
    assert (program.prompt_tokens, program.output_tokens) == (7, 2)
    assert program.view(0.0)["calls_without_tokens"] == 0
    tell(rig)
    assert program.calls_counted == 1
    assert (program.prompt_tokens, program.hit_tokens, program.output_tokens) == (10, 4, 3)


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}', (5, None, 1)),
        (b'{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":4},'
         b'"output_tokens":6}}', (5, 4, 6)),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}]}', None),
        (b'data: {"usage":null}\n\ndata: [DONE]\n\n', None),
        (b'{"usage":{"prompt_tokens":5,"total_tokens":5}}', (5, None, 0)),
        (b"", None),
    ],
)  # fmt: skip
def test_usage_is_found_at_the_end(tail: bytes, tokens: tuple[int, int | None, int] | None):
    """Of chat, responses and embeddings; a text of the model is not taken for it."""
    assert usage_in(tail) == tokens


async def test_a_client_that_hangs_up_is_in_the_log(rig: Rig):
    """The record of a call ends however it ends."""
    rig.engine.stall_at = 0
    asking = asyncio.create_task(rig.chat())
    await rig.engine.arrived.wait()
    asking.cancel()
    await rig.settled()
    book = rig.gateway.book
    assert book is not None
    record = next(book.log.newest())
    assert (record.outcome, record.status) == ("hung_up", 499)
    with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
        await asking


def test_the_end_of_an_answer_is_bounded():
    """Whatever an engine sends at once, an unused connection keeps a few thousand bytes of it."""

    async def main() -> None:
        upstream = Upstream(EngineAddress("x", "", 0))
        upstream._last_but_one, upstream._last = b"a" * 100_000, b"b" * 100
        assert upstream.tail() == b"a" * (TAIL_BYTES - 100) + b"b" * 100
        upstream._last = b"c" * 100_000
        upstream.rest()
        assert upstream.tail() == b"c" * TAIL_BYTES
        assert len(upstream._last) + len(upstream._last_but_one) == TAIL_BYTES

    asyncio.run(main())

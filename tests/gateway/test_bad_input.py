"""Bad input: a clear OpenAI-style error, or served untagged; and the server goes on."""

from __future__ import annotations

import asyncio
import gzip
import io
import json

import pytest

from autellix import wire

from .conftest import Rig, running


async def post(rig: Rig, body: bytes, **headers: str):
    """Post bytes as a chat completion; returns (status, JSON)."""
    url = f"{rig.url}/v1/chat/completions"
    headers = {"content-type": "application/json", **headers}
    async with rig.client.post(url, data=io.BytesIO(body), headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b'{"model": "m", ', "not JSON"),
        (b"[1, 2]", "a JSON array is not allowed"),
        (b'"text"', "a JSON string is not allowed"),
        (b"7", "a JSON number is not allowed"),
        (b"null", "a JSON null is not allowed"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, "not JSON"),
    ],
)
async def test_a_malformed_body_is_a_400(rig: Rig, body: bytes, says: str):
    """The error names the field, and what is allowed; nothing reaches the engine."""
    status, answer = await post(rig, body)
    assert status == 400
    error = answer["error"]
    assert says in error["message"]
    assert "allowed is a JSON object" in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "body")
    assert rig.engine.seen == []
    assert (await rig.chat())[0] == 200


async def test_a_body_over_the_limit_is_a_413():
    """50 MB against a limit of 32: refused before it is read, chunked or not."""
    async with running() as rig:
        status, answer = await post(rig, b"x" * (50 << 20))
        assert status == 413
        assert answer["error"]["code"] == "request_too_large"
        assert str(32 << 20) in answer["error"]["message"]
        assert (await rig.chat())[0] == 200
    async with running(body_bytes_max=4096) as rig:
        status, answer = await post(
            rig, gzip.compress(b" " * 10_000_000), **{"content-encoding": "gzip"}
        )
        assert status == 413
        assert (await rig.chat())[0] == 200


async def test_a_compressed_body_is_passed_on_plain(rig: Rig):
    """The engine gets what the client meant."""
    body = json.dumps({"model": "m"}).encode()
    status, _ = await post(rig, gzip.compress(body), **{"content-encoding": "gzip"})
    assert status == 200
    assert rig.engine.seen[-1].body == {"model": "m"}
    assert "content-encoding" not in rig.engine.seen[-1].headers


async def test_an_unknown_model_is_the_engines_error_unchanged(rig: Rig):
    """An error of the engine is passed through."""
    status, _, answer = await rig.chat(model="unknown")
    assert status == 404
    assert answer["error"]["param"] == "model"


def is_fine(name: str, text: str) -> bool:
    """Return whether a header may have this value after all: a kind is a name of any words."""
    if name == wire.KIND:
        return text.isascii() and text.isprintable() and len(text) <= 128
    return name in (wire.NODE, wire.CLIENT) or wire.is_valid_id(text)


@pytest.mark.parametrize("name", wire.REQUEST_HEADERS)
@pytest.mark.parametrize("garbage", ["", "x" * 4000, "a b", "é ü", "{}", "../../etc", "-1", "\t"])
async def test_garbage_in_our_headers_is_served(rig: Rig, name: str, garbage: str):
    """The call is served; what was ignored is said in a header of the answer."""
    status, headers, _ = await rig.chat({name: garbage})
    assert status == 200
    if garbage.strip() and not is_fine(name, garbage):
        assert headers["X-Autellix-Ignored"] == name
    if name != wire.SESSION or not wire.is_valid_id(garbage):
        assert headers["X-Autellix-Family"] == "untagged"
    await rig.settled()


async def test_raw_garbage_bytes_in_a_header_are_served(rig: Rig):
    """Bytes that are no text at all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"x-autellix-session: \xff\xfe\x80abc\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"X-Autellix-Ignored: X-Autellix-Session\r\n" in answer


async def test_a_body_that_claims_another_session_does_not_get_it(rig: Rig):
    """The header's session counts; the body's is removed."""
    await rig.chat({"X-Autellix-Session": "victim"})
    await rig.chat({"X-Autellix-Session": "mine"}, session_id="victim")
    sessions = [seen.headers["x-session-id"] for seen in rig.engine.seen]
    assert sessions[0] != sessions[1]
    assert "session_id" not in rig.engine.seen[1].body


async def test_an_unknown_path_is_an_openai_error(rig: Rig):
    """404 and 405 are as OpenAI's clients expect them."""
    async with rig.client.post(f"{rig.url}/v1/nothing", json={}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with rig.client.get(f"{rig.url}/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "error" in await response.json()


async def test_a_body_that_never_ends_is_a_408():
    """A client that promises a body and does not send it is told so."""
    async with running(slow_body_s=0.1) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_never_reads_is_cut_off():
    """Its call does not hold an engine for ever."""
    async with running(slow_client_s=0.2) as rig:
        rig.engine.chunks, rig.engine.chunk_text = 3000, "x" * 10_000
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        body = b'{"model": "m", "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        transport = writer.transport
        transport.pause_reading()
        await asyncio.wait_for(rig.engine.stopped.wait(), 10)
        await rig.settled()
        transport.abort()
        assert rig.table.loads() == {}
        assert reader is not None


async def test_a_slow_reader_gets_everything():
    """Backpressure loses no byte: the client reads 30 MB in small sips."""
    async with running() as rig:
        rig.engine.chunks, rig.engine.chunk_text = 300, "y" * 10_000
        body = {"model": "m", "stream": True}
        got = 0
        async with rig.client.post(f"{rig.url}/v1/completions", json=body) as response:
            async for data in response.content.iter_chunked(8192):
                got += data.count(b"y")
        assert got == 3_000_000
        await rig.settled()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /v1/" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"no http at all\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
        b"transfer-encoding: chunked\r\n\r\n{}",
    ],
)
async def test_what_is_no_http_is_a_400_in_openais_form(rig: Rig, request_bytes: bytes):
    """A header over the limit, a broken line, smuggling by two lengths."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(request_bytes)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head[9:13] == b"400 "
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert (await rig.chat())[0] == 200


async def test_a_client_that_never_says_what_it_wants_is_cut_off(monkeypatch):
    """A connection without a whole request line and headers does not stay."""
    monkeypatch.setattr("autellix.server.gateway.server.FIRST_REQUEST_S", 0.1)
    monkeypatch.setattr("autellix.server.gateway.front.HEAD_S", 0.1)
    async with running() as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert (await rig.chat())[0] == 200


async def test_connections_over_the_limit_are_closed():
    """Those that are open go on; a place that is free again is given again."""
    async with running(connections_max=2) as rig:
        first = await asyncio.open_connection("127.0.0.1", rig.port)
        second = await asyncio.open_connection("127.0.0.1", rig.port)
        third, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        assert await asyncio.wait_for(third.read(), 5) == b""
        writer.close()
        for _, open_writer in (first, second):
            open_writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        for reader, open_writer in (first, second):
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            open_writer.close()
        assert (await rig.chat())[0] == 200

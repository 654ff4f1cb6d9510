"""The short way in: the same answers as the long one, and aiohttp for all that is unusual."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autellix.server.gateway import front as front_module
from autellix.server.gateway.front import read_line
from autellix.server.gateway.server import Server

from .conftest import Rig, running, until

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
TARGET = b"/v1/chat/completions"


def call(
    *lines: bytes, body: bytes = BODY, target: bytes = TARGET, version: bytes = b"HTTP/1.1"
) -> bytes:
    """Return the bytes of a call, with its length unless a line says how long it is."""
    head = [b"POST " + target + b" " + version, b"Host: x", b"content-type: application/json"]
    if not any(
        line.lower().startswith((b"content-length", b"transfer-encoding")) for line in lines
    ):
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, *lines]) + b"\r\n\r\n" + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Read one answer of known length; return its status, head and body."""
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        at = lower.find(b"content-length:")
        body = b""
        if at >= 0:
            body = await reader.readexactly(int(lower[at + 15 : lower.find(b"\r\n", at)]))
    return int(head.split(b" ")[1]), head, body


def server_of(rig: Rig) -> Server:
    """Return the server under the application."""
    server = rig.runner.server
    assert isinstance(server, Server)
    return server


async def test_a_plain_call_never_reaches_aiohttp(rig: Rig):
    """Calls one after the other on one connection are all read by the front."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    for number in range(3):
        writer.write(call(b"X-Autellix-Session: s", b"X-Autellix-Seq: %d" % number))
        assert (await answer(reader))[0] == 200
    assert len(server_of(rig).fronts) == 1
    assert not server_of(rig).connections
    assert len(rig.engine.seen) == 3
    writer.close()
    await until(lambda: not server_of(rig).fronts)


async def test_both_ways_send_the_engine_the_same(rig: Rig):
    """Headers and bodies reach the engine alike, whoever read them."""
    lines = (b"User-Agent: me", b"X-Autellix-Session: s", b"traceparent: 00-1-2-01",
             b"Authorization: Bearer k", b"X-Request-Id: theirs", b"cookie: c")  # fmt: skip
    for more in ((), (b"te: trailers",)):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(call(*lines, *more))
        assert (await answer(reader))[0] == 200
        writer.close()
    short, long = rig.engine.seen
    ours = ("x-request-id", "x-vllm-priority")
    assert {k: v for k, v in short.headers.items() if k.lower() not in ours} == {
        k: v for k, v in long.headers.items() if k.lower() not in ours
    }
    assert short.raw == long.raw == BODY
    assert short.headers["user-agent"] == "me"
    assert not {"te", "cookie", "x-autellix-session"} & {k.lower() for k in short.headers}


CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
UNUSUAL = {
    "chunked": call(b"Transfer-Encoding: chunked", body=CHUNKS),
    "expect": call(b"Expect: 100-continue"),
    "query": call(target=TARGET + b"?x=1"),
    "close": call(b"Connection: close"),
    "old": call(version=b"HTTP/1.0"),
    "twice": call(b"X-A: 1", b"X-A: 2"),
    "responses": call(target=b"/v1/responses"),
}


@pytest.mark.parametrize("request_", UNUSUAL.values(), ids=UNUSUAL)
async def test_what_is_unusual_is_answered_by_aiohttp(rig: Rig, request_: bytes):
    """Whatever is no plain call is handed over, and answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(request_)
    status, head, _ = await answer(reader)
    if status == 100:
        status, head, _ = await answer(reader)
    assert status == 200, head
    writer.close()
    assert len(rig.engine.seen) == 1
    await until(lambda: not server_of(rig).connections)
    assert not server_of(rig).fronts


REFUSED = {
    "two lengths": (call(b"Content-Length: 1", b"Content-Length: 2"), 400),
    "a bad length": (call(b"Content-Length: 1x"), 400),
    "a folded line": (call(b"X-A: 1", b" more"), 400),
    "a name with a space": (call(b"X A: 1"), 400),
    "both": (call(b"Transfer-Encoding: chunked", b"Content-Length: 5"), 400),
    "a bare line feed": (call(b"X-A: 1\nX-B: 2"), 400),
    "no JSON": (call(body=b"{"), 400),
}


@pytest.mark.parametrize(("request_", "status"), REFUSED.values(), ids=REFUSED)
async def test_what_is_wrong_is_refused_and_the_gateway_goes_on(rig: Rig, request_, status):
    """Requests that two readers could understand differently reach no engine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(request_)
    got, _, body = await answer(reader)
    assert got == status
    assert "error" in json.loads(body)
    writer.close()
    assert not rig.engine.seen
    assert (await rig.chat())[0] == 200


async def test_a_connection_is_handed_over_between_two_calls(rig: Rig):
    """Plain calls, then the list of models, then a call again, all on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(call() + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" + call())
    for _ in range(3):
        assert (await answer(reader))[0] == 200
    assert not server_of(rig).fronts
    assert server_of(rig).open_connections == 1
    writer.close()
    await until(lambda: server_of(rig).open_connections == 0)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(cuts=st.lists(st.integers(1, 400), max_size=12))
async def test_calls_in_any_pieces_arrive_whole(cuts: list[int]):
    """Wherever the network cuts them, three calls are three calls with their bodies."""
    async with running() as rig:
        data = b"".join(call(body=BODY.replace(b"hi", b"h" * n)) for n in (1, 50, 300))
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        ends = [*sorted(c for c in set(cuts) if c < len(data)), len(data)]
        for start, end in zip([0, *ends], ends, strict=False):
            writer.write(data[start:end])
            await writer.drain()
            await asyncio.sleep(0)
        for _ in range(3):
            assert (await answer(reader))[0] == 200
        contents = [seen.body["messages"][0]["content"] for seen in rig.engine.seen]
        assert contents == ["h" * n for n in (1, 50, 300)]
        writer.close()


async def test_a_body_that_does_not_come_is_a_408():
    """The client is told, and the connection is closed."""
    async with running(slow_body_s=0.1) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(call()[:-5])
        status, head, body = await answer(reader)
        assert status == 408
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert await reader.read() == b""
        writer.close()
        assert not server_of(rig).fronts


async def test_a_wrong_key_is_refused_before_the_body_comes():
    """A client without a key cannot make the gateway hold a body for it."""
    async with running(api_keys=("t:" + "0" * 64,)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(call(b"Content-Length: 1000000", body=b""))
        assert (await answer(reader))[0] == 401
        assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(monkeypatch):
    """The timer looks at the deadline of the state, not at the age of the connection."""
    monkeypatch.setattr(front_module, "KEEP_ALIVE_S", 0.15)
    monkeypatch.setattr(front_module, "HEAD_S", 0.15)
    async with running() as rig:
        rig.engine.stall_at = 1
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(call(body=BODY[:-1] + b',"stream":true}'))
        await reader.readuntil(b"\r\n\r\n")
        (front,) = server_of(rig).fronts
        deadlines: set[float] = set()

        def moved() -> bool:
            deadlines.add(front._deadline_s)
            return len(deadlines) > 3

        await until(moved)  # the time for an idle one has passed three times
        assert not writer.is_closing()
        rig.engine.go.set()
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"0\r\n\r\n")  # then it is idle
        writer.close()
        await rig.settled()


async def test_what_is_sent_ahead_is_bounded(rig: Rig):
    """A client that pours calls in while one is answered is not read on."""
    rig.engine.stall_at = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(call())
    await until(lambda: bool(rig.engine.seen))
    (front,) = server_of(rig).fronts
    writer.write(call() * 3000)
    await until(lambda: not front._reading)
    assert len(front._buffer) < front_module.AHEAD_BYTES_MAX + (1 << 20)
    rig.engine.stall_at = None
    rig.engine.go.set()
    for _ in range(20):
        assert (await answer(reader))[0] == 200
    writer.transport.abort()
    await rig.settled()


async def test_a_stop_lets_a_call_end(rig: Rig):
    """The server takes no new call, and the one under way gets its answer."""
    rig.engine.stall_at = 2
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(call(body=BODY[:-1] + b',"stream":true}'))
    await reader.readuntil(b"\r\n\r\n")
    stopping = asyncio.create_task(rig.runner.cleanup())
    assert await asyncio.wait_for(idle_reader.read(), 5) == b""
    rig.engine.go.set()
    assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"0\r\n\r\n")
    await stopping
    assert rig.engine.finished == 1
    writer.close()
    idle_writer.close()


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_what_a_line_passes_on_is_one_line(name: bytes, value: bytes):
    """No line of ours and none by which vLLM takes orders goes on to the engine."""
    line = read_line(name + b":" + value)
    assert line.passed.lower().startswith(line.passed[: len(name)].lower())
    assert not line.passed.startswith((b"x-autellix-", b"x-vllm-priority:", b"x-session-id:"))


async def test_calls_sent_ahead_are_read_as_they_are_answered(rig: Rig):
    """However many are sent, the gateway holds a bounded part of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(call(body=b"[") * 20_000)
    most = 0
    for _ in range(500):
        assert (await answer(reader))[0] == 400
        (front,) = server_of(rig).fronts
        most = max(most, len(front._buffer))
    assert most < front_module.AHEAD_BYTES_MAX + (1 << 20)
    writer.transport.abort()
    await until(lambda: not server_of(rig).fronts)


@pytest.mark.parametrize("target", [TARGET, b"/v1/embeddings"])
async def test_a_client_that_sends_and_never_reads_is_cut_off(target: bytes):
    """Small answers are answers too: they may fill a buffer, and then the client is gone."""
    async with running(slow_client_s=0.2) as rig:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel takes MBs
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", rig.port))
        _, writer = await asyncio.open_connection(sock=peer)
        writer.transport.pause_reading()
        refused = call(body=b"[", target=target)

        async def pour() -> None:
            while True:
                writer.write(refused * 200)
                await writer.drain()

        pouring = asyncio.create_task(pour())
        await until(lambda: rig.gateway.counts.get("client too slow", 0) > 0, 60)
        await until(lambda: server_of(rig).open_connections == 0)
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        writer.transport.abort()
        assert (await rig.chat())[0] == 200


async def test_json_that_cannot_be_written_again_is_refused(rig: Rig):
    """A body that has to be edited and is nested too deep is the client's mistake."""
    deep = b'{"model":"m","priority":1,"messages":' + b"[" * 300 + b"]" * 300 + b"}"
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(call(body=deep))
    status, _, body = await answer(reader)
    assert status == 400
    assert "nested" in json.loads(body)["error"]["message"]
    writer.close()

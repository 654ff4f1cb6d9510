"""The upstream connection: whatever the engine sends, in whatever pieces."""

from __future__ import annotations

import asyncio
import itertools
import socket
from pathlib import Path
from typing import Any

import httptools
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.gateway.upstream import (
    CLIENT_BUFFER_BYTES,
    HEAD_BYTES_MAX,
    Broken,
    ClientGone,
    Connections,
    Event,
    Upstream,
)
from autellix.server.types import EngineAddress

OURS = b"X-Autellix-Version: 1\r\n"


class Pipe(asyncio.Transport):
    """A transport that remembers what was done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False
        self.reading = True
        self.buffered = 0

    def write(self, data: Any) -> None:
        """Remember."""
        self.written += bytes(data)

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self.closing

    def abort(self) -> None:
        """Close."""
        self.closing = True

    def get_write_buffer_size(self) -> int:
        """Return what the test says."""
        return self.buffered

    def pause_reading(self) -> None:
        """Stop."""
        self.reading = False

    def resume_reading(self) -> None:
        """Go on."""
        self.reading = True


class Answer:
    """An answer, parsed independently."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect."""
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        """Collect."""
        self.body += body

    def on_message_complete(self) -> None:
        """Note."""
        self.complete = True


def connect(*, dechunk: bool = False) -> tuple[Upstream, Pipe, Pipe]:
    """Return a connection in the middle of a call, the engine's pipe and the client's."""
    upstream = Upstream(EngineAddress("x", "", 0))
    engine, client = Pipe(), Pipe()
    upstream.connection_made(engine)
    upstream.send(b"POST / HTTP/1.1\r\n\r\n", client, OURS, dechunk=dechunk)
    return upstream, engine, client


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut data where told."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def chunked(parts: list[bytes]) -> bytes:
    """Return a chunked body."""
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts if p) + b"0\r\n\r\n"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.binary(max_size=60), max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_an_answer_in_any_pieces_arrives_whole(parts, is_chunked, interim, close, cuts):
    """Body and status are the engine's; our header is there once, hop headers are not."""

    async def run() -> None:
        upstream, engine, client = connect()
        body = b"".join(parts)
        framing = (
            b"Transfer-Encoding: chunked\r\n\r\n" + chunked(parts)
            if is_chunked
            else b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = (
            (b"HTTP/1.1 100 Continue\r\n\r\n" if interim else b"")
            + b"HTTP/1.1 201 Created\r\nX-Request-Id: secret\r\nX-Other: 1\r\n"
            + (b"Connection: close\r\n" if close else b"Connection: keep-alive\r\n")
            + framing
        )
        for piece in pieces(answer, cuts):
            upstream.data_received(piece)
        assert await upstream.wait() is Event.DONE
        assert upstream.status == 201
        assert upstream.reusable is not close
        got = Answer(client.written)
        assert got.complete
        assert got.body == body
        names = [name for name, _ in got.headers]
        assert names.count(b"x-autellix-version") == 1
        assert b"x-other" in names
        assert b"x-request-id" not in names
        assert b"connection" not in names
        assert not engine.closing

    asyncio.run(run())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=60), max_size=6),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_an_old_client_gets_the_body_without_chunks(parts, cuts):
    """HTTP/1.0 knows no chunks."""

    async def run() -> None:
        upstream, _, client = connect(dechunk=True)
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(parts)
        for piece in pieces(answer, cuts):
            upstream.data_received(piece)
        assert await upstream.wait() is Event.DONE
        head, _, body = client.written.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"".join(parts)

    asyncio.run(run())


@settings(max_examples=250, deadline=None)
@given(
    st.lists(
        st.binary(max_size=80)
        | st.sampled_from(
            [b"HTTP/1.1 200 OK\r\n", b"\r\n", b"\r\n\r\n", b"Content-Length: 5\r\n",
             b"5\r\nabcde\r\n", b"\n\n",
             b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"HTTP/1.1 99999999999 x\r\n"]
        ),
        max_size=10,
    )
)  # fmt: skip
def test_no_bytes_of_an_engine_break_the_gateway(parts):
    """Garbage ends as a broken connection or a finished answer, and no status line comes twice."""

    async def run() -> None:
        upstream, engine, client = connect()
        for part in parts:
            if engine.closing:
                break
            upstream.data_received(part)
        upstream.connection_lost(None)
        broken = None
        try:
            assert await upstream.wait() is Event.DONE
        except Broken as error:
            broken = error
        assert broken is None or broken.head_sent or client.written == b""
        assert client.written.count(OURS) <= 1

    asyncio.run(run())


async def test_a_full_client_stops_the_engine_until_it_has_drained():
    """Nothing polls: reading stands still between two events."""
    upstream, engine, client = connect()
    client.buffered = CLIENT_BUFFER_BYTES + 1
    upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab")
    assert await upstream.wait() is Event.CLIENT_FULL
    assert not engine.reading
    client.buffered = 0
    upstream.go_on()
    assert engine.reading
    upstream.data_received(b"cd")
    assert await upstream.wait() is Event.DONE


async def test_a_client_that_has_gone_closes_the_engines_connection():
    """That is how the engine learns of it."""
    upstream, engine, client = connect()
    client.closing = True
    upstream.data_received(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(ClientGone):
        await upstream.wait()
    assert engine.closing


async def test_a_head_without_end_is_refused():
    """The head is kept in memory: it has a bound."""
    upstream, engine, client = connect()
    upstream.data_received(b"HTTP/1.1 200 OK\r\n")
    while not engine.closing:
        upstream.data_received(b"X-Long: %s\r\n" % (b"y" * 8000))
    with pytest.raises(Broken):
        await upstream.wait()
    assert client.written == b""
    assert HEAD_BYTES_MAX < 1 << 20


async def test_an_answer_without_a_length_ends_with_the_connection():
    """As HTTP/1.0 engines do it."""
    upstream, _, client = connect()
    upstream.data_received(b"HTTP/1.0 200 OK\r\n\r\nabc")
    upstream.connection_lost(None)
    assert await upstream.wait() is Event.DONE
    assert client.written.endswith(b"\r\n\r\nabc")
    assert not upstream.reusable


async def test_bytes_that_nobody_asked_for_close_an_unused_connection():
    """A connection that is out of step is never used again."""
    upstream, engine, _ = connect()
    upstream.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert upstream.reusable
    upstream.rest()
    upstream.data_received(b"HTTP/1.1 200 OK\r\n")
    assert engine.closing


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_burst_waits_for_room_among_the_engines_new_connections(tmp_path: Path, loop_factory):
    """A unix socket whose queue is full refuses at once; the call is not the worse for it."""
    path = str(tmp_path / "engine.sock")

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(4)
            listener.setblocking(False)
            connections = Connections(connect_s=10, idle_s=1)
            address = EngineAddress(path, "", 0)
            burst = [asyncio.create_task(connections.acquire(address)) for _ in range(40)]
            await asyncio.sleep(0.1)
            assert sum(task.done() for task in burst) < 10
            loop = asyncio.get_running_loop()
            accepted = [(await loop.sock_accept(listener))[0] for _ in range(40)]
            for upstream in await asyncio.gather(*burst):
                upstream.abort()
            for each in accepted:
                each.close()
            with pytest.raises(OSError, match=r"."):
                await connections.acquire(EngineAddress(f"{path}.none", "", 0))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())

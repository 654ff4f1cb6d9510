"""A fake engine and a client for it, on raw protocols: what is measured is the relay between."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools

TICK_S = 1 / 30
CHUNK_BYTES = 200
ANSWER = json.dumps({"id": "x", "choices": [{"message": {"content": "x" * 900}}]}).encode()
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = b"data: " + b"x" * (CHUNK_BYTES - 8) + b"\n\n"
_CHUNK = b"%x\r\n%s\r\n" % (len(_EVENT), _EVENT)
_LAST = b"0\r\n\r\n"
_CHUNKS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')


class TickingEngine(asyncio.Protocol):
    """An engine without a model: 1 KB answers, or a chunk for every open stream at each tick.

    Args:
        streams: Of all connections: [connection, chunks left].
    """

    def __init__(self, streams: dict[TickingEngine, int]) -> None:
        self._streams = streams

    @staticmethod
    async def serve() -> asyncio.Server:
        """Serve on a free port of the loopback address, ticking."""
        streams: dict[TickingEngine, int] = {}
        loop = asyncio.get_running_loop()

        def tick() -> None:
            loop.call_later(TICK_S, tick)
            for stream, left in list(streams.items()):
                stream.step(left)

        tick()
        return await loop.create_server(lambda: TickingEngine(streams), "127.0.0.1", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read requests."""
        self._transport: Any = transport
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()

    def data_received(self, data: bytes) -> None:
        """Read."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router tries whether this speaks HTTP/2
            self._transport.close()

    def on_body(self, data: bytes) -> None:
        """Keep the body: it tells what is asked for."""
        self._body += data

    def on_message_complete(self) -> None:
        """Answer."""
        body, self._body = self._body, bytearray()
        found = _CHUNKS.search(body)
        if found is None:
            self._transport.write(_HEAD % (len(ANSWER), ANSWER))
            if not self._parser.should_keep_alive():  # the pool's probe reads to the end
                self._transport.close()
            return
        self._transport.write(_STREAM)
        self._streams[self] = int(found[1])

    def step(self, left: int) -> None:
        """Send a chunk, the last one with the end."""
        if left <= 1:
            del self._streams[self]
            self._transport.write(_CHUNK + _LAST)
        else:
            self._streams[self] = left - 1
            self._transport.write(_CHUNK)

    def connection_lost(self, _: Exception | None) -> None:
        """Forget the stream."""
        self._streams.pop(self, None)


class Connection(asyncio.Protocol):
    """A client's connection: one request at a time, its answer counted and thrown away."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read answers."""
        self._transport: Any = transport
        self._parser: Any = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self.events = 0

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done with the answer's last byte."""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Read."""
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Count events."""
        self.events += data.count(b"\n\n")

    def on_message_complete(self) -> None:
        """Wake the asker."""
        assert self._done is not None
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        if status == 200:
            self._done.set_result(None)
        else:
            self._done.set_exception(RuntimeError(f"answered {status}"))

    def connection_lost(self, _: Exception | None) -> None:
        """Fail the asker, if there is one."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(EOFError("the connection was closed"))

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


@dataclass
class Streamed:
    """What a round of streams was."""

    chunks: int
    resident_kib: int  # in the middle of it


class Load:
    """Calls to one port.

    Args:
        port: Of the engine or a relay, on the loopback address.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._number = 0

    async def calls(self, count: int, connections: int) -> float:
        """Make calls on so many connections at once; return the seconds it took."""
        opened = [await self._connect() for _ in range(connections)]
        left = iter(range(count))
        start_s = time.perf_counter()

        async def one(connection: Connection) -> None:
            for _ in left:
                await connection.ask(self._request())

        await asyncio.gather(*map(one, opened))
        took_s = time.perf_counter() - start_s
        for connection in opened:
            connection.close()
        return took_s

    async def paced(self, rate_per_s: float, seconds: float) -> list[float]:
        """Make calls at an even rate, whatever becomes of them; return how long each took."""
        idle: deque[Connection] = deque([await self._connect() for _ in range(16)])
        everyone = list(idle)
        taken_s: list[float] = []
        loop = asyncio.get_running_loop()

        async def one() -> None:
            connection = idle.popleft() if idle else await self._connect()
            start_s = time.perf_counter()
            await connection.ask(self._request())
            taken_s.append(time.perf_counter() - start_s)
            idle.append(connection)

        tasks = []
        start_s = loop.time()
        for number in range(round(rate_per_s * seconds)):
            await asyncio.sleep(start_s + number / rate_per_s - loop.time())
            tasks.append(asyncio.create_task(one()))
        await asyncio.gather(*tasks)
        for connection in {*everyone, *idle}:
            connection.close()
        return taken_s

    async def streams(self, count: int, chunks: int, resident_kib: Callable[[], int]) -> Streamed:
        """Open streams and read them to their ends."""
        opened = [await self._connect() for _ in range(count)]
        ends = [connection.ask(self._request(chunks)) for connection in opened]
        await asyncio.sleep(chunks * TICK_S / 2)
        middle_kib = resident_kib()
        await asyncio.gather(*ends)
        for connection in opened:
            connection.close()
        return Streamed(sum(c.events for c in opened), middle_kib)

    async def large(self, count: int, body_bytes: int = 1_000_000) -> list[float]:
        """Make calls with a large body, one after the other; return how long each took."""
        connection = await self._connect()
        taken_s = []
        for _ in range(count):
            request = self._request(words="y" * body_bytes)
            start_s = time.perf_counter()
            await connection.ask(request)
            taken_s.append(time.perf_counter() - start_s)
        connection.close()
        return taken_s

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return connection

    def _request(self, chunks: int = 0, words: str = "y" * 800) -> bytes:
        self._number += 1
        number = self._number
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": f"Say one word. {words}"}],
        }
        if chunks:
            body |= {"stream": True, "max_tokens": chunks}
        text = json.dumps(body, separators=(",", ":")).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"x-autellix-session: bench-%d\r\nx-autellix-thread: 0\r\nx-autellix-seq: %d\r\n"
            b"x-autellix-call: call-%d-%d\r\ncontent-length: %d\r\n\r\n%s"
            % (number // 10, number % 10, id(self), number, len(text), text)
        )


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

"""A small HTTP server inside the test, whose answers the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from autellix.server.types import EngineAddress

#: (path, request body) → answer body, or None for silence.
Handler = Callable[[str, bytes], bytes | None]


@asynccontextmanager
async def small_http(handler: Handler, port: int = 0) -> AsyncIterator[EngineAddress]:
    """Serve on loopback until the block ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if "Length" in line), 0
            )
            answer = handler(head.split(" ")[1], await reader.readexactly(length))
            if answer is None:
                await reader.read()  # until the asker has had enough
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        host, bound = server.sockets[0].getsockname()
        yield EngineAddress(None, host, bound)
    finally:
        server.close()

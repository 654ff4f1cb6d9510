"""A live feed as an event stream over HTTP: sent to who watches, and read by a sibling.

A gateway process of several has no dashboard. What the server's own process shows of its programs
it reads here, from the private socket that only siblings reach.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Final

from aiohttp import web

from ..client import GatewayClient
from ..errors import Busy
from ..state import GATEWAY, Gateway
from ..tasks import keep_running
from .feed import LiveFeed, TooManyViewers
from .joined import MESSAGE_BYTES_MAX
from .rows import TableRows

SLOW_S: Final = 10.0  # that one message may take


async def answer_live(request: web.Request, feed: LiveFeed, slow_s: float) -> web.StreamResponse:
    """Stream what changes; see `LiveFeed`.

    Args:
        request: Of who watches.
        feed: What is watched.
        slow_s: Who does not take in a message for so long is cut off.

    Raises:
        Busy: there are as many viewers already as are allowed.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            messages = await stack.enter_async_context(feed.watching())
        except TooManyViewers:
            raise Busy("viewers: as many watch already as this server allows") from None
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(request)
        try:
            async for message in messages:
                async with asyncio.timeout(slow_s):
                    await response.write(message)
        except TimeoutError:  # it does not read, so it would not read a goodbye either
            request.app[GATEWAY].count("viewer too slow")
            if request.transport is not None:
                request.transport.abort()
        return response


class ProcessFeed:
    """The live feed of one gateway process, for siblings.

    Args:
        gateway: Whose programs.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        rows = TableRows(gateway.table, gateway.clock)
        self.feed = LiveFeed(rows, lambda: (), gateway.clock, {})

    def hang(self, app: web.Application, path: str) -> None:
        """Add it to an application, which runs it from its start to its end."""
        app.router.add_get(path, self._live)
        app.cleanup_ctx.append(self._run)
        app.on_shutdown.append(self._say_goodbye)

    async def _live(self, request: web.Request) -> web.StreamResponse:
        return await answer_live(request, self.feed, SLOW_S)

    async def _run(self, _app: web.Application) -> AsyncIterator[None]:
        task = keep_running("live feed", self.feed.run, self._gateway)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _say_goodbye(self, _app: web.Application) -> None:
        """End the streams: a stop must not wait for them."""
        self.feed.close()


async def follow_feed(socket: Path, path: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield (name, data) of a sibling's feed until it ends; the connection ends with it.

    Args:
        socket: Where the process serves its siblings.
        path: Of its feed.

    Raises:
        CallError: there is none, it is cut off, or a message is too long.
    """
    client = GatewayClient(socket, 1)
    await client.open()
    try:
        async with contextlib.aclosing(client.feed(path, MESSAGE_BYTES_MAX)) as messages:
            async for message in messages:
                yield message
    finally:
        await client.close()

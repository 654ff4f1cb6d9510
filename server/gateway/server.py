"""The HTTP server under the application: its settings, and its errors in OpenAI's form.

What is no HTTP (a header over the limit, a broken request line) never becomes a request of the
application, so its error is made here.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from .errors import BadRequest
from .state import GATEWAY

FIELD_BYTES_MAX: Final = 16 << 10
FIRST_REQUEST_S: Final = 30.0


class Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_first_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the client some time to say what it wants; aiohttp does so from the second on."""
        super().connection_made(transport)
        self._first_timer = self._loop.call_later(FIRST_REQUEST_S, self._close_if_silent)
        server = self._manager
        assert isinstance(server, Server)
        server.open_connections += 1
        if server.open_connections > server.connections_max:
            self.force_close()  # without a word: it has not asked for anything yet

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the timer."""
        self._first_timer.cancel()
        if isinstance(self._manager, Server):
            self._manager.open_connections -= 1
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self._request_count == 0:
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, and close."""
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = (message or "").partition("\n")[0][:200]
        answer = BadRequest(
            f"request: {reason or 'it cannot be read'}; allowed is HTTP/1.1 with lines of at most "
            f"{FIELD_BYTES_MAX} bytes"
        ).response()
        answer.force_close()
        return answer


class Server(web.Server):
    """Makes our connections instead of aiohttp's."""

    open_connections: int
    connections_max: int

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._kwargs)


class GatewayRunner(web.AppRunner):
    """Runs the application on our server."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = Server  # the same object with another factory
        assert isinstance(server, Server)
        server.open_connections = 0
        server.connections_max = self.app[GATEWAY].config.connections_max
        return server


def make_runner(app: web.Application) -> web.AppRunner:
    """Return a runner with the settings that the relay needs.

    A handler is cancelled when its client hangs up, which is what cancels the engine's call.
    """
    return GatewayRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=75.0,
        max_line_size=FIELD_BYTES_MAX,
        max_field_size=FIELD_BYTES_MAX,
        shutdown_timeout=5.0,
    )

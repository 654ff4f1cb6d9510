"""The HTTP server under the application: its settings, and its errors in OpenAI's form.

What is no HTTP (a header over the limit, a broken request line) never becomes a request of the
application, so its error is made here.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from .errors import BadRequest
from .front import ROUTES, Front
from .state import GATEWAY, Gateway

FIELD_BYTES_MAX: Final = 16 << 10
FIRST_REQUEST_S: Final = 30.0


class Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_first_timer", "_slow_timer")
    _slow_timer: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the client some time to say what it wants; aiohttp does so from the second on."""
        super().connection_made(transport)
        self._slow_timer = None
        self._first_timer = self._loop.call_later(FIRST_REQUEST_S, self._close_if_silent)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the timers."""
        self._first_timer.cancel()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
        if isinstance(self._manager, Server):
            self._manager.connection_closed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give a client that does not read its answers some time, and no more."""
        super().pause_writing()
        if isinstance(self._manager, Server):
            slow_s = self._manager.gateway.config.slow_client_s
            self._slow_timer = self._loop.call_later(slow_s, self._cut_off)

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        if self._slow_timer is not None:
            self._slow_timer.cancel()
            self._slow_timer = None

    def _cut_off(self) -> None:
        if self.transport is not None and isinstance(self._manager, Server):
            self._manager.gateway.count("client too slow")
            self.transport.abort()

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
    """Every connection begins at a `Front`; aiohttp goes on with what is not for that."""

    gateway: Gateway
    fronts: set[Front]
    handshakes: set[asyncio.Task[None]]
    routes: dict[bytes, str]
    open_connections: int

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]
        """Return the protocol of a new connection."""
        return Front(self, self._loop)

    def make_connection(self) -> web.RequestHandler:
        """Return aiohttp's protocol for a connection that a front hands over."""
        return Connection(self, loop=self._loop, **self._kwargs)

    def connection_opened(self) -> bool:
        """Count a connection; return whether there is room for it."""
        self.open_connections += 1
        return self.open_connections <= self.gateway.config.connections_max

    def connection_closed(self) -> None:
        """Count it no more."""
        self.open_connections -= 1

    def pre_shutdown(self) -> None:
        """Take no further requests."""
        for front in list(self.fronts):
            front.close_when_idle()
        super().pre_shutdown()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Let the calls end, and cancel those that take too long."""
        calls = [front.call for front in self.fronts if front.call is not None]
        if calls:
            _, late = await asyncio.wait(calls, timeout=timeout)
            for call in late:
                call.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        handshakes = list(self.handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)
        for front in list(self.fronts):
            front.abort()
        await super().shutdown(timeout)


class GatewayRunner(web.AppRunner):
    """Runs the application on our server."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = Server  # the same object with another factory
        assert isinstance(server, Server)
        server.gateway = self.app[GATEWAY]
        server.fronts = set()
        server.handshakes = set()
        there = {resource.canonical for resource in self.app.router.resources()}
        server.routes = {f"POST {p} HTTP/1.1".encode(): p for p in ROUTES if p in there}
        server.open_connections = 0
        return server


def server_of(runner: web.AppRunner) -> Server:
    """Return the server of a runner of `make_runner` that is set up."""
    assert isinstance(runner.server, Server)
    return runner.server


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

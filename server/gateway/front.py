"""The short way in: calls of the two completion routes, read without aiohttp.

Theory of operation. Every connection of a client begins here. A plain HTTP/1.1 call of a completion
route (a POST with a Content-Length, nothing compressed, nothing to negotiate) is read, relayed and
answered by this protocol, which costs a fraction of aiohttp's time and memory. The first request
that is anything else hands the connection over to aiohttp for good, with all that was read and not
yet used. So this file has to be strict, not complete: everything unusual has one implementation.

One request at a time: what a client sends ahead waits, up to a bound. There is one timer for each
connection; it looks at a deadline that the states move: a head must come within `HEAD_S`, a body
within the configured time, and an idle connection is closed after `KEEP_ALIVE_S`. A client that
hangs up cancels its call.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

from aiohttp import web

from .errors import ApiError, SlowBody
from .keys import Tenant
from .relay import relay
from .request import ClientRequest, Line
from .state import Gateway
from .upstream import CLIENT_BUFFER_BYTES

HEAD_BYTES_MAX: Final = 16 << 10
HEAD_S: Final = 30.0
KEEP_ALIVE_S: Final = 75.0
AHEAD_BYTES_MAX: Final = 64 << 10
#: A connection of several programs is rather forwarded than moved to and fro: a move costs more
#: than a forwarded call, though not than a forwarded stream.
PATIENCE: Final = 2
_STREAM: Final = b'"stream"'
ROUTES: Final = ("/v1/chat/completions", "/v1/completions")
_LINES: Final = re.compile(
    rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*(?:\r\n|\Z))+\Z"
)
#: Headers by which a request says that it is not plain.
_UNUSUAL: Final = frozenset(
    ("transfer-encoding", "content-encoding", "expect", "upgrade", "te", "trailer")
)

_log = logging.getLogger(__name__)


class Asking(NamedTuple):
    """A request whose head has been read."""

    request: ClientRequest
    tenant: Tenant
    scope: str
    body_start: int
    body_end: int


class Listener(Protocol):
    """What a front needs of the server it belongs to."""

    gateway: Gateway
    fronts: set[Front]
    routes: dict[bytes, str]  # by the request's first line; empty: all is aiohttp's

    def make_connection(self) -> web.RequestHandler:
        """Return aiohttp's protocol for a connection that it is to go on with."""
        ...

    def connection_opened(self) -> bool:
        """Count a connection; return whether there is room for it."""
        ...

    def connection_closed(self) -> None:
        """Count it no more."""
        ...


class Front(asyncio.Protocol):
    """One client's connection, until aiohttp takes it.

    Args:
        listener: The server it belongs to.
        loop: The event loop.
        is_counted: Whether the server knows of it already.
        first: What another process has read of it.

    Attributes:
        was_connected: Whether asyncio has told of the connection.
    """

    __slots__ = (
        "_asking", "_astray", "_buffer", "_closing", "_deadline_s", "_drained", "_gateway",
        "_held_bytes", "_is_counted", "_is_full", "_listener", "_loop", "_patience", "_reading",
        "_task", "_timer", "_transport", "was_connected",
    )  # fmt: skip

    def __init__(
        self,
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        *,
        is_counted: bool = False,
        first: bytes = b"",
    ) -> None:
        self._listener = listener
        self._gateway = listener.gateway
        self._loop = loop
        self._buffer: bytes | bytearray = first
        self._asking: Asking | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None
        self._deadline_s = 0.0
        self._held_bytes = 0  # room that the body takes
        self._astray = 0  # calls in a row of programs that another process owns
        self._patience = PATIENCE if first else 0  # so many are forwarded before it moves
        self._is_full = self._closing = False
        self._reading = True
        self._is_counted = is_counted
        self.was_connected = False

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head."""
        self._transport = transport  # type: ignore[assignment]
        self.was_connected = True
        if not self._is_counted and not self._listener.connection_opened():
            self.abort()  # without a word: it has not asked for anything yet
            return
        _notice_silence(transport)
        self._listener.fronts.add(self)
        transport.set_write_buffer_limits(high=CLIENT_BUFFER_BYTES)  # type: ignore[attr-defined]
        self._deadline_s = self._loop.time() + HEAD_S
        self._timer = self._loop.call_at(self._deadline_s, self._look_at_deadline)
        if self._buffer:
            self._read()

    def connection_lost(self, _: Exception | None) -> None:
        """Cancel the call."""
        self._transport = None
        self._listener.connection_closed()
        self._forget()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ConnectionResetError("the client has gone"))
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._buffer:
            if not isinstance(self._buffer, bytearray):
                self._buffer = bytearray(self._buffer)
            self._buffer += data
        else:
            self._buffer = data
        if self._task is None:
            self._read()
        elif len(self._buffer) > AHEAD_BYTES_MAX and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Note that the client reads slowly."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Let the relay go on."""
        self._is_full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # what the relay and the server call

    async def drain(self) -> None:
        """Return when the client has read enough.

        Raises:
            ConnectionResetError: it has gone.
        """
        if self._transport is None:
            raise ConnectionResetError("the client has gone")
        if self._is_full:
            self._drained = self._loop.create_future()
            try:
                await self._drained
            finally:
                self._drained = None

    def close_when_idle(self) -> None:
        """Take no further request."""
        self._closing = True
        if self._task is None:
            self._end()

    def abort(self) -> None:
        """Close at once, whatever is still to be sent."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def call(self) -> asyncio.Task[None] | None:
        """The call that is being answered."""
        return self._task

    # reading

    def _read(self) -> None:
        """Begin the next call, if its request is all there."""
        if self._asking is None:
            try:
                self._asking = self._read_head()
            except ApiError as error:  # the key is wrong: the body is not waited for
                self._refuse(error)
                return
            if self._asking is None:
                return
        asking = self._asking
        there = len(self._buffer)
        if not self._hold(min(there, asking.body_end) - asking.body_start):
            self._asking = None
            self._hand_over()  # that one refuses it, or finds room by then
            return
        if there < asking.body_end:
            return
        if (
            self._astray
            and _STREAM in self._buffer
            and self._move(asking.request.headers, asking.scope)
        ):
            return
        body = bytes(self._buffer[asking.body_start : asking.body_end])
        self._cut(asking.body_end)
        self._asking = None
        self._task = self._loop.create_task(self._answer(asking, body))

    def _hold(self, count: int) -> bool:
        """Take room for so much of the body in all; return whether there was some."""
        if not self._gateway.bodies.take(count - self._held_bytes):
            return False
        self._held_bytes = count
        return True

    def _let_go(self) -> None:
        """Give the body's room back."""
        self._gateway.bodies.give(self._held_bytes)
        self._held_bytes = 0

    def _cut(self, count: int) -> None:
        """Forget the first bytes; a bytearray does so without copying what is left."""
        if isinstance(self._buffer, bytearray):
            del self._buffer[:count]
        elif count == len(self._buffer):
            self._buffer = b""
        else:
            self._buffer = bytearray(self._buffer[count:])

    def _read_head(self) -> Asking | None:
        """Return the next request, or None: it is not all there, or it was handed over."""
        buffer = self._buffer
        if not buffer:
            return None
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(buffer) > HEAD_BYTES_MAX or not b"POST /v1/".startswith(bytes(buffer[:9])):
                self._hand_over()
            elif self._deadline_s > self._loop.time() + HEAD_S:
                self._deadline_s = self._loop.time() + HEAD_S
                self._set_timer()
            return None
        head = bytes(buffer[:end])
        line, _, rest = head.partition(b"\r\n")
        path = self._listener.routes.get(line)
        if path is None or end > HEAD_BYTES_MAX or _LINES.match(rest) is None:
            self._hand_over()
            return None
        lines = [read_line(line) for line in rest.split(b"\r\n")]
        headers = {line.name: line.value for line in lines}
        length = headers.get("content-length", "")
        if (
            len(headers) < len(lines)  # something is said twice
            or not (length.isascii() and length.isdigit() and len(length) < 16)
            or int(length) > self._gateway.config.body_bytes_max
            or headers.get("connection", "keep-alive").lower() != "keep-alive"
            or not _UNUSUAL.isdisjoint(headers)
            or "host" not in headers
        ):
            self._hand_over()
            return None
        tenant, scope = self._gateway.authenticate(headers)
        assert self._transport is not None
        if self._is_astray(headers, scope) and self._move(headers, scope):
            return None
        request = ClientRequest(
            gateway=self._gateway, method="POST", path=path, target=path, headers=headers,
            lines=lines, transport=self._transport, drain=self.drain, keep_alive=True, old=False,
        )  # fmt: skip
        asking = Asking(request, tenant, scope, end + 4, end + 4 + int(length))
        if len(buffer) < asking.body_end:
            self._deadline_s = self._loop.time() + self._gateway.config.slow_body_s
            self._set_timer()
        return asking

    def _is_astray(self, headers: Mapping[str, str], scope: str) -> bool:
        """Return whether the connection is to go on at the process that owns the program."""
        siblings = self._gateway.siblings
        if siblings is None:
            return False
        if siblings.owner_by_headers(headers, scope) is None:
            self._astray, self._patience = 0, PATIENCE
            return False
        self._astray += 1
        return self._astray > self._patience

    def _move(self, headers: Mapping[str, str], scope: str) -> bool:
        """Let the process that owns the program go on; return whether it does."""
        siblings, transport = self._gateway.siblings, self._transport
        assert siblings is not None
        assert transport is not None
        owner = siblings.owner_by_headers(headers, scope)
        if owner is None or not siblings.mover.move(owner, transport, bytes(self._buffer)):
            return False  # the relay forwards the call
        self._gateway.count("connections moved")
        self._asking, self._buffer = None, b""
        self._let_go()
        transport.abort()  # which closes our end of it only
        return True

    def _hand_over(self) -> None:
        """Let aiohttp go on with the connection."""
        transport, buffer = self._transport, bytes(self._buffer)
        assert transport is not None
        assert self._task is None, "between two requests only"
        self._forget()
        self._transport, self._buffer = None, b""
        if not self._reading:
            transport.resume_reading()
        connection = self._listener.make_connection()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.data_received(buffer)

    # answering

    async def _answer(self, asking: Asking, body: bytes) -> None:
        try:
            keep_alive = await self._relay(asking, body)
            # small answers fill the buffer too, if the client asks ahead and does not read
            async with asyncio.timeout(self._gateway.config.slow_client_s):
                await self.drain()
        except ConnectionError:
            return  # the client has gone
        except TimeoutError:
            self._gateway.count("client too slow")
            self.abort()
            return
        finally:
            self._task = None
            self._let_go()
        self._go_on(keep_alive)

    async def _relay(self, asking: Asking, body: bytes) -> bool:
        """Answer one way or another; return whether the connection goes on."""
        try:
            return (await relay(asking.request, asking.tenant, asking.scope, body)).keep_alive
        except ApiError as error:
            self._say(error)
        except ConnectionError:
            return False  # there is nobody to tell
        except Exception:  # noqa: BLE001  (logged; the client is told)
            _log.exception("a mistake in the gateway")
            self._say(ApiError("the gateway made a mistake; its log says more"))
        return True

    def _go_on(self, keep_alive: bool) -> None:
        """Wait for the next request, or take the one that is there."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._closing or not keep_alive:
            self._end()
            return
        self._deadline_s = self._loop.time() + KEEP_ALIVE_S
        if self._buffer:
            self._read()
        if transport.is_closing():
            return
        if not self._reading and (self._task is None or len(self._buffer) <= AHEAD_BYTES_MAX):
            self._reading = True
            transport.resume_reading()

    def _end(self) -> None:
        """Close when all is sent, but do not wait for ever for a client that does not read."""
        transport = self._transport
        if transport is None:
            return
        transport.close()
        if transport.get_write_buffer_size():
            if self._timer is not None:
                self._timer.cancel()
            slow_s = self._gateway.config.slow_client_s
            self._timer = self._loop.call_later(slow_s, transport.abort)

    def _say(self, error: ApiError) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(error.as_http())

    def _refuse(self, error: ApiError) -> None:
        """Answer, and close: what of the request is still under way is not read."""
        assert self._transport is not None
        self._transport.write(error.as_http(close=True))
        self._end()

    # time

    def _set_timer(self) -> None:
        """Look earlier than was planned."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline_s, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        now_s = self._loop.time()
        if self._task is not None:  # the relay has limits of its own
            self._deadline_s = now_s + KEEP_ALIVE_S
        if now_s < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_deadline)
            return
        self._timer = None
        if self._transport is None or self._transport.is_closing():
            return
        if self._asking is not None:
            slow_s = self._gateway.config.slow_body_s
            self._refuse(SlowBody(f"body: did not arrive within {slow_s:g} s"))
        else:
            self._end()

    def _forget(self) -> None:
        self._listener.fronts.discard(self)
        self._let_go()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _notice_silence(transport: asyncio.BaseTransport) -> None:
    """Have the kernel find out when a client is gone without a word."""
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@lru_cache(maxsize=2048)
def read_line(line: bytes) -> Line:
    """Return a header; remembered, since a client says nearly the same each time."""
    name, _, value = line.partition(b":")
    return Line.of(name, value.strip(b" \t"))

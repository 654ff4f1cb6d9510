"""Connections to engines, whose response bytes go straight to the client's transport.

Theory of operation. An `Upstream` is one keep-alive connection. `send` hands it a request and the
client's transport; from then on every byte the engine sends is written there as it comes, but for
the head, which is rewritten once: hop-by-hop headers go, ours are added. The parser only watches
for the end of the message. `wait` returns when something needs the caller: the message is complete,
or the client's buffer is full. In the second case reading from the engine stands still until the
caller has seen the buffer drain and calls `go_on`; nothing polls.

An engine's death is `Broken`; ``head_sent`` says whether the client has seen a status line, after
which no other answer can be given. A connection is used again only after a complete message, and
only for a time well below the engine's own keep-alive, so that a request is never written into a
connection which the engine is about to close.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections import deque
from typing import Final

import httptools

from ..types import EngineAddress

HEAD_BYTES_MAX: Final = 64 << 10
CLIENT_BUFFER_BYTES: Final = 256 << 10
IDLE_MAX: Final = 512  # unused connections kept to one engine
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: |\Z)")
HOP: Final = (b"connection:", b"keep-alive:", b"proxy-connection:", b"x-request-id:", b"upgrade:")


class Broken(Exception):
    """The connection to the engine ended before the message did."""

    def __init__(self, message: str, *, head_sent: bool) -> None:
        super().__init__(message)
        self.head_sent = head_sent


class ClientGone(Exception):
    """The client's connection is closed."""


class Event(enum.Enum):
    """Why `Upstream.wait` returned."""

    DONE = 1
    CLIENT_FULL = 2


class Upstream(asyncio.Protocol):
    """One connection to an engine; see the module's theory of operation."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.closed = False
        self.bytes_sent = 0
        self.status = 0
        self.idle_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sink: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[Event] | None = None
        self._error: Exception | None = None
        self._reset(b"")

    def _reset(self, extra_head: bytes) -> None:
        self._extra_head = extra_head
        self._head = b""
        self._head_sent = False
        self._complete = False
        self._keep = False
        self._sized = False
        self._full = False
        self._dechunk = False
        self._body: list[bytes] = []
        self.bytes_sent = 0
        self.status = 0

    def send(
        self, request: bytes, sink: asyncio.Transport, extra_head: bytes, *, dechunk: bool = False
    ) -> None:
        """Send a request; its answer goes to ``sink``.

        Args:
            request: The whole request.
            sink: The client's transport.
            extra_head: Header lines to add to the answer, each with its line end.
            dechunk: The client speaks HTTP/1.0: no chunks, and the end is the close.
        """
        assert self._transport is not None, "not connected"
        assert self._sink is None, "one message at a time"
        self._reset(extra_head)
        self._dechunk = dechunk
        self._sink = sink
        # a parser watches one message: what is left of the last one cannot confuse it
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    async def wait(self) -> Event:
        """Return when the message is complete or the client's buffer is full.

        Raises:
            Broken: the engine's connection is gone.
            ClientGone: the client's is.
        """
        if self._error is not None:
            raise self._error
        if self._complete:
            return Event.DONE
        if self._full:
            return Event.CLIENT_FULL
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def go_on(self) -> None:
        """Read from the engine again: the client's buffer has drained."""
        self._full = False
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    @property
    def head_sent(self) -> bool:
        """Whether the client has got a status line."""
        return self._head_sent

    @property
    def reusable(self) -> bool:
        """Whether the message ended well and the engine keeps the connection open."""
        return self._complete and self._keep and not self.closed and self._error is None

    def rest(self) -> None:
        """Let go of the client, between two messages."""
        self._sink = self._parser = None

    def abort(self) -> None:
        """Close at once; the engine notices and cancels the call."""
        self.closed = True
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, reason: str) -> None:
        """Close at once and let the waiting caller know."""
        self._fail(Broken(reason, head_sent=self._head_sent))

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Pass ``data`` on."""
        sink, parser = self._sink, self._parser
        if sink is None or parser is None or self._complete:
            self.abort()  # nobody asked
            return
        if sink.is_closing():
            self._fail(ClientGone("the client closed the connection"))
            return
        if self._dechunk:
            self._body = []
        if not self._head_sent:
            self._head += data
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Broken(f"not HTTP: {error}", head_sent=self._head_sent))
            return
        if self._head_sent:
            out = b"".join(self._body) if self._dechunk else data
        else:
            out = self._cut_head()
        if out and not self.closed:
            sink.write(out)
            self.bytes_sent += len(out)
        if self._has_ended():  # the parser has said so, meanwhile
            self._wake(Event.DONE)
        elif self._parsed_whole():  # the parser is laxer about the end of a head than we are
            self._fail(Broken("the head of the answer has no proper end", head_sent=False))
        elif sink.get_write_buffer_size() > CLIENT_BUFFER_BYTES and not self._full:
            self._full = True
            if self._transport is not None:
                self._transport.pause_reading()
            self._wake(Event.CLIENT_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the caller, if a message is under way."""
        self.closed = True
        if self._sink is None or self._complete:
            return
        if self._head_sent and not self._sized:  # such a message ends with the connection
            self._complete = True
            self._wake(Event.DONE)
            return
        self._fail(Broken(str(exc or "connection closed"), head_sent=self._head_sent))

    # what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002  (the parser's signature)
        """Note whether the end of the message can be seen in it."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_body(self, body: bytes) -> None:
        """Keep the body without its chunks, for an HTTP/1.0 client."""
        if self._dechunk:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Note the end; only in here does the parser know whether the connection stays."""
        assert self._parser is not None
        if self._parser.get_status_code() < 200:
            return
        self._complete = True
        self._keep = self._parser.should_keep_alive()

    def _has_ended(self) -> bool:
        return self._complete and self._head_sent and self._error is None

    def _parsed_whole(self) -> bool:
        return self._complete and self._error is None

    def _cut_head(self) -> bytes:
        """Return the rewritten head and what follows it, or nothing if it is not all there."""
        while True:
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > HEAD_BYTES_MAX:
                    self._fail(Broken("the head of the answer is too long", head_sent=False))
                return b""
            lines = self._head[:end].split(b"\r\n")
            rest = self._head[end + 4 :]
            status = _STATUS_LINE.match(lines[0])
            if status is None:
                self._fail(Broken("the answer has no status line", head_sent=False))
                return b""
            self.status = int(status[1])
            if self.status >= 200:
                break
            self._head = rest  # an interim answer is for us, not for the client
        skip = (*HOP, b"transfer-encoding:") if self._dechunk else HOP
        kept = [line for line in lines if not line[:20].lower().startswith(skip)]
        self._head_sent, self._head = True, b""
        if self._dechunk:
            rest = b"".join(self._body)
        return b"\r\n".join(kept) + b"\r\n" + self._extra_head + b"\r\n" + rest

    def _wake(self, event: Event) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(event)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


class Connections:
    """The connections to all engines. Belongs to one event loop; `close` it at the end."""

    def __init__(self, *, connect_s: float, idle_s: float) -> None:
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: dict[EngineAddress, deque[Upstream]] = {}

    async def acquire(self, address: EngineAddress) -> Upstream:
        """Return a connection that nobody uses.

        Raises:
            OSError: the engine does not accept one; nothing was sent.
            TimeoutError: it does not do so in time.
        """
        idle = self._idle.get(address)
        while idle:
            upstream = idle.pop()
            if upstream.idle_timer is not None:
                upstream.idle_timer.cancel()
            if not upstream.closed:
                return upstream
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            if address.uds is not None:
                _, made = await loop.create_unix_connection(
                    lambda: Upstream(address), path=address.uds
                )
            else:
                _, made = await loop.create_connection(
                    lambda: Upstream(address), host=address.host, port=address.port
                )
        return made

    def release(self, upstream: Upstream) -> None:
        """Take a connection back: kept if its message ended well, closed otherwise."""
        if not upstream.reusable or self._idle_s <= 0:
            upstream.abort()
            return
        idle = self._idle.setdefault(upstream.address, deque())
        if len(idle) >= IDLE_MAX:
            upstream.abort()
            return
        upstream.rest()
        loop = asyncio.get_running_loop()
        upstream.idle_timer = loop.call_later(self._idle_s, self._expire, upstream)
        idle.append(upstream)

    def close(self) -> None:
        """Close every unused connection."""
        for idle in self._idle.values():
            for upstream in idle:
                if upstream.idle_timer is not None:
                    upstream.idle_timer.cancel()
                upstream.abort()
        self._idle.clear()

    def _expire(self, upstream: Upstream) -> None:
        upstream.abort()
        idle = self._idle.get(upstream.address)
        if idle is not None:
            if upstream in idle:
                idle.remove(upstream)
            if not idle:
                del self._idle[upstream.address]

"""Connections to engines, whose response bytes go straight to the client's transport.

Theory of operation. An `Upstream` is one keep-alive connection. `send` hands it a request and the
client's transport; from then on every byte the engine sends is written there as it comes, but for
the head, which is rewritten once: hop-by-hop headers go, ours are added. The parser only watches
for the end of the message. `wait` returns when something needs the caller: the message is complete,
or the client's buffer is full. In the second case reading from the engine stands still until the
caller has seen the buffer drain and calls `go_on`; nothing polls.

A client may ask to be told of its call in the answer itself (see `server.receipts`). Only then is
the head held until the caller calls `release_head`, and an event stream framed anew, so that the
caller can put a comment at its end with `finish`.

An engine's death is `Broken`; ``head_sent`` says whether the client has seen a status line, after
which no other answer can be given. A connection is used again only after a complete message, and
only for a time well below the engine's own keep-alive, so that a request is never written into a
connection which the engine is about to close.
"""

from __future__ import annotations

import asyncio
import enum
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import httptools

from ..types import EngineAddress

HEAD_BYTES_MAX: Final = 64 << 10
TAIL_BYTES: Final = 4096
CLIENT_BUFFER_BYTES: Final = 256 << 10
_QUEUE_FULL_S: Final = 0.004  # the first wait for room among an engine's new connections
IDLE_MAX: Final = 512  # unused connections kept to one engine
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: |\Z)")
HOP: Final = (b"connection:", b"keep-alive:", b"proxy-connection:", b"x-request-id:", b"upgrade:")


class Broken(Exception):
    """The connection to the engine ended before the message did.

    ``by_engine``: the engine's end of it went; else what came was no answer, or we broke it off.
    """

    def __init__(self, message: str, *, head_sent: bool, by_engine: bool = False) -> None:
        super().__init__(message)
        self.head_sent = head_sent
        self.by_engine = by_engine


class ClientGone(Exception):
    """The client's connection is closed."""


class Event(enum.Enum):
    """Why `Upstream.wait` returned."""

    DONE = 1
    CLIENT_FULL = 2
    HEAD_HELD = 3


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
        self._dechunk = self._bodiless = False
        self._late_head: Callable[[], bytes] | None = None
        self._hold = self._is_held = False
        self._append = self._is_stream = self._is_chunked = False
        self._body: list[bytes] = []
        self._last = self._last_but_one = b""
        self.head_at_s = 0.0
        self.bytes_sent = 0
        self.status = 0
        self.ends_by_close = False  # the answer's end is the end of the connection

    def send(
        self,
        request: bytes,
        sink: asyncio.Transport,
        extra_head: bytes,
        *,
        late_head: Callable[[], bytes] | None = None,
        dechunk: bool = False,
        bodiless: bool = False,
        hold_head: bool = False,
        append: bool = False,
    ) -> None:
        """Send a request; its answer goes to ``sink``.

        Args:
            request: The whole request.
            sink: The client's transport.
            extra_head: Header lines to add to the answer, each with its line end.
            late_head: Asked for more header lines when the head passes.
            dechunk: The client speaks HTTP/1.0: no chunks, and the end is the close.
            bodiless: The request is a HEAD: the answer ends with its head, whatever that says.
            hold_head: Let `wait` return when the head is there, and pass it at `release_head`.
            append: Leave the end of an event stream to `finish`; not together with ``dechunk``.
        """
        assert self._transport is not None, "not connected"
        assert self._sink is None, "one message at a time"
        self._reset(extra_head)
        self._dechunk, self._bodiless = dechunk, bodiless
        self._late_head = late_head
        self._hold, self._append = hold_head, append
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
        if self._is_held:
            return Event.HEAD_HELD
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

    def release_head(self) -> None:
        """Pass the head that was held, and read on."""
        self._hold = self._is_held = False
        out = self._cut_head()
        if self._sink is not None and not self.closed:
            self._sink.write(out)
            self.bytes_sent += len(out)
        self.go_on()

    @property
    def is_open_ended(self) -> bool:
        """Whether the client's event stream waits for `finish`."""
        return self._append and self._is_stream and self._is_chunked

    def finish(self, comment: bytes) -> None:
        """End an event stream with a comment."""
        if self._sink is not None and not self._sink.is_closing():
            self._sink.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(comment), comment))

    def tail(self) -> bytes:
        """Return the end of the answer: what came last, and what came before it."""
        if len(self._last) >= TAIL_BYTES:
            return self._last[-TAIL_BYTES:]
        return (self._last_but_one[-TAIL_BYTES:] + self._last)[-TAIL_BYTES:]

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
        self._last, self._last_but_one = self.tail(), b""  # an unused connection holds little

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
        self._last_but_one, self._last = self._last, data
        if (self._dechunk or self._append) and not self._is_held:
            self._body = []
        if not self._head_sent:
            self._head += data
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Broken(f"not HTTP: {error}", head_sent=self._head_sent))
            return
        if self._head_sent:
            out = self._framed(data)
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
        self._fail(
            Broken(str(exc or "connection closed"), head_sent=self._head_sent, by_engine=True)
        )

    # what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the end of the message can be seen in it, and what is in it."""
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._sized = True
            self._is_chunked |= lower == b"transfer-encoding"
        elif lower == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        """Keep the body without its chunks, where it is framed otherwise."""
        if self._dechunk or self._append:
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
        return self._complete and self._error is None and not self._is_held

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
        if self._hold:
            self._hold_head()
            return b""
        skip = (*HOP, b"transfer-encoding:") if self._dechunk else HOP
        kept = [line for line in lines if not line[:20].lower().startswith(skip)]
        self._head_sent, self._head = True, b""
        self._complete |= self._bodiless
        self.ends_by_close = not (self._sized or self._complete)
        self.head_at_s = time.monotonic()
        extra = self._extra_head
        if self._late_head is not None:
            extra += self._late_head()
        if (
            self.ends_by_close and b"Connection: close" not in extra
        ):  # the client's connection has to end as well
            extra += b"Connection: close\r\n"
        return b"\r\n".join(kept) + b"\r\n" + extra + b"\r\n" + self._framed(rest)

    def _framed(self, data: bytes) -> bytes:
        """Return what came of the body as the client is to get it: mostly as it is."""
        if self._dechunk:
            return b"".join(self._body)
        if self.is_open_ended:
            return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in self._body)
        return data

    def _hold_head(self) -> None:
        """Keep the head, and read no more until it is released."""
        self._is_held = True
        if self._transport is not None and not self.closed:
            self._transport.pause_reading()
        self._wake(Event.HEAD_HELD)

    def _wake(self, event: Event) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(event)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


async def _unix_socket(path: str) -> socket.socket:
    """Return a connected socket; waits while the engine's queue of new connections is full.

    A unix socket does not wait for that by itself, as TCP does, and of the event loops one reports
    an error and the other a connection that is none.

    Raises:
        OSError: nobody listens.
    """
    wait_s = _QUEUE_FULL_S
    while True:
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        try:
            made.connect(path)
        except BlockingIOError:
            made.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 16 * _QUEUE_FULL_S)
        except BaseException:
            made.close()
            raise
        else:
            return made


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
                    lambda: Upstream(address), sock=await _unix_socket(address.uds)
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

"""Connections of clients that move from one gateway process to another.

Theory of operation. All processes accept from one listening socket, so a connection begins at any
of them. When a front has read the head of a call whose program another process owns, it hands the
connection itself over: the kernel passes the socket (`SCM_RIGHTS`), and with it go the bytes that
were read and not used. From then on the answer takes no detour. Most connections carry one program,
so they move once.

A message is a packet: the bytes with one file, the connection; of more than `INLINE_BYTES` a second
file holds them. Packets are sent or not, never half. What cannot be sent is no harm: then the call
is forwarded, as is every call that has not come by a front (see `siblings`). The receiving sockets
are made by the server's process and outlive a gateway process: what comes while it starts again
waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Final

from .front import Front

if TYPE_CHECKING:
    from .server import Server

_log = logging.getLogger(__name__)

INLINE_BYTES: Final = 32 << 10
PACKETS_AT_ONCE: Final = 32  # taken before calls may go on
TAKING_MAX: Final = 4096  # connections that have come and have not begun
PAUSE_S: Final = 1.0  # when this process has no file left for another sender


def arrival_path(folder: str, index: int) -> str:
    """Return where connections that move to a process are received."""
    return f"{folder}/g{index}.moves"


class Mover:
    """Hands connections over; `close` it at the end."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ends: dict[int, socket.socket] = {}

    def move(self, owner: int, transport: asyncio.Transport, data: bytes) -> bool:
        """Hand a connection over that nothing is written to; return whether it has gone.

        If so, the caller lets go of the transport without a word.
        """
        peer = transport.get_extra_info("socket")
        if (
            peer is None
            or transport.get_extra_info("sslcontext") is not None  # its keys are in this process
            or transport.get_write_buffer_size()
        ):
            return False
        was_reading = transport.is_reading()
        transport.pause_reading()  # whatever comes now is for the other
        if self._send(owner, peer.fileno(), data):
            return True
        if was_reading:  # else its client has sent too much ahead
            transport.resume_reading()
        return False

    def close(self) -> None:
        """Close what packets are sent by."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()

    def _send(self, owner: int, connection: int, data: bytes) -> bool:
        try:
            end = self._ends.get(owner) or self._connect(owner)
            if len(data) <= INLINE_BYTES:
                socket.send_fds(end, [data], [connection])
            else:
                _send_long(end, data, connection)
        except BlockingIOError:
            return False  # it has much to do
        except OSError as error:  # that process has ended: the next one listens at the same place
            _log.debug("a connection could not be moved to gateway %d: %s", owner, error)
            if (gone := self._ends.pop(owner, None)) is not None:
                gone.close()
            return False
        return True

    def _connect(self, owner: int) -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            end.setblocking(False)
            end.connect(arrival_path(self._folder, owner))
        except OSError:
            end.close()
            raise
        self._ends[owner] = end
        return end


def _send_long(end: socket.socket, data: bytes, connection: int) -> None:
    """Send a packet whose bytes are in a file that is in memory only."""
    file = os.memfd_create("autellix", os.MFD_CLOEXEC)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
        socket.send_fds(end, [b"+"], [connection, file])
    finally:
        os.close(file)


class Arrivals:
    """Takes connections that other processes hand over; `close` it at the end.

    Args:
        listener: Where they come; it listens.
        server: Whose they are from now on.
    """

    def __init__(self, listener: socket.socket, server: Server) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._server = server
        self._senders: set[socket.socket] = set()
        self._taking: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    async def close(self) -> None:
        """Take no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for sender in list(self._senders):
            self._drop(sender)
        for task in self._taking:
            task.cancel()
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sender, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # it would be told of the same sender again, and at once
            _log.warning("no process can hand connections over for now: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(PAUSE_S, self._listen)
            return
        sender.setblocking(False)
        self._senders.add(sender)
        self._loop.add_reader(sender.fileno(), self._receive, sender)

    def _drop(self, sender: socket.socket) -> None:
        self._loop.remove_reader(sender.fileno())
        self._senders.discard(sender)
        sender.close()

    def _receive(self, sender: socket.socket) -> None:
        for _ in range(PACKETS_AT_ONCE):
            try:
                data, files, flags, _ = socket.recv_fds(
                    sender, INLINE_BYTES + 1, 2, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, files, flags = b"", [], 0
            if not data:  # that process has ended
                self._drop(sender)
                return
            if not files or flags & socket.MSG_CTRUNC:  # this process has no room for another file
                for file in files:
                    os.close(file)  # and the connection is closed by that
            else:
                self._take(data, files)

    def _take(self, data: bytes, files: list[int]) -> None:
        connection = socket.socket(fileno=files[0])
        if len(files) > 1:
            data = _read_file(files[1])
        if len(self._taking) >= TAKING_MAX:
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._begin(connection, data))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _begin(self, connection: socket.socket, data: bytes) -> None:
        front = Front(self._server, self._loop, first=data)
        try:
            await self._loop.connect_accepted_socket(lambda: front, connection)
        except OSError as error:
            _log.debug("a connection that was moved here has gone: %s", error)
            connection.close()


def _read_file(file: int) -> bytes:
    with os.fdopen(file, "rb", buffering=0) as content:  # no file more, of which there may be none
        content.seek(0)
        return content.read()

"""One end of the socket between the server's process and a gateway process."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final, Generic, TypeVar

import msgspec

from .messages import Down, Up

MESSAGE_BYTES_MAX: Final = 16 << 20
#: What the other end may owe us to read; one that reads so little is stuck.
OWED_BYTES_MAX: Final = 64 << 20
_LENGTH: Final = struct.Struct("!I")
_encoder: Final = msgspec.msgpack.Encoder()

InT = TypeVar("InT")
OutT = TypeVar("OutT")


class Link(Generic[InT, OutT]):
    """Sends messages of one kind and receives those of the other.

    What is sent in one turn of the event loop goes out together.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[InT],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._pending: list[bytes] = []

    def send(self, message: OutT) -> None:
        """Send a message, as soon as may be; to an end that is gone nothing is sent."""
        frame = _encoder.encode(message)
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending += (_LENGTH.pack(len(frame)), frame)

    async def receive(self) -> InT | None:
        """Return the next message; None: the other end is gone.

        Raises:
            msgspec.MsgspecError: it is none.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MESSAGE_BYTES_MAX:
                return None
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    @property
    def is_stuck(self) -> bool:
        """Whether the other end has stopped reading."""
        return self._writer.transport.get_write_buffer_size() > OWED_BYTES_MAX

    def close(self) -> None:
        """Hang up; what is still to be sent is not."""
        self._pending.clear()
        self._writer.transport.abort()

    def _flush(self) -> None:
        data, self._pending = b"".join(self._pending), []
        if data and not self._writer.transport.is_closing():
            self._writer.write(data)


async def link_down(end: socket.socket) -> Link[Up, Down]:
    """Return the server's end of a link."""
    reader, writer = await asyncio.open_connection(sock=end)
    return Link(reader, writer, msgspec.msgpack.Decoder(Up))


async def link_up(end: socket.socket) -> Link[Down, Up]:
    """Return a gateway process's end of a link."""
    reader, writer = await asyncio.open_connection(sock=end)
    return Link(reader, writer, msgspec.msgpack.Decoder(Down))

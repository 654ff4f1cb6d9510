"""Connections that are handed over where there is no room, and what then becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from autellix.server.gateway import moving
from autellix.server.gateway.moving import INLINE_BYTES, Arrivals, Mover, arrival_path
from autellix.server.gateway.server import server_of
from tests.gateway.conftest import running, until

CALL = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    b'{"model":"m","messages":[],"pad":"%s"}'
)
SHORT = CALL % (36, b"")
LONG = CALL % (36 + INLINE_BYTES, b"x" * INLINE_BYTES)


class Full(socket.socket):
    """A listener of a process that has no file left."""

    refused = 0
    has_room = False

    def accept(self) -> Any:
        """Refuse, until there is room."""
        if not self.has_room:
            self.refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Transport:
    """As much of a transport as is asked before its connection moves."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.reading = True

    def get_extra_info(self, name: str) -> Any:
        """Return the socket."""
        return self.peer if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        """Return what is not sent yet."""
        return 0

    def is_reading(self) -> bool:
        """Return whether what comes is read."""
        return self.reading

    def pause_reading(self) -> None:
        """Read no more."""
        self.reading = False

    def resume_reading(self) -> None:
        """Read on."""
        self.reading = True


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a client's connection."""
    ends = socket.socketpair()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@contextlib.asynccontextmanager
async def arriving(folder: Path) -> AsyncIterator[Full]:
    """Run a gateway that connections can be handed to; yields where they come."""
    listener = Full(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(arrival_path(str(folder), 0))
    listener.listen()
    async with running() as rig:
        arrivals = Arrivals(listener, server_of(rig.runner))
        try:
            yield listener
        finally:
            await arrivals.close()


async def answer(end: socket.socket) -> bytes:
    """Return what a client is told first; nothing: its connection was closed."""
    end.setblocking(False)
    async with asyncio.timeout(30):
        try:
            return await asyncio.get_running_loop().sock_recv(end, 12)
        except ConnectionResetError:  # what it had sent was not read
            return b""


@pytest.mark.parametrize("call", [SHORT, LONG])
async def test_a_process_without_room_for_a_sender_waits(
    tmp_path: Path, call: bytes, monkeypatch: pytest.MonkeyPatch
):
    """It looks again after a while, and not at once and for ever; then the call is answered."""
    monkeypatch.setattr(moving, "PAUSE_S", 0.2)
    mover = Mover(str(tmp_path))
    async with arriving(tmp_path) as listener:
        with connected() as (mine, theirs):
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            assert mover.move(0, Transport(theirs), call)
            theirs.close()
            await until(lambda: listener.refused >= 2, 30)
            assert listener.refused <= 2 + (loop.time() - began_s) / moving.PAUSE_S
            listener.has_room = True
            assert await answer(mine) == b"HTTP/1.1 200"
        mover.close()


@pytest.mark.parametrize("come", [0, 1])
async def test_a_connection_that_comes_without_its_bytes_is_closed(
    tmp_path: Path, come: int, monkeypatch: pytest.MonkeyPatch
):
    """What is left of it is no request: the client is to see that, and no answer to nothing."""
    whole = socket.recv_fds

    def part(*arguments: Any) -> Any:
        data, files, flags, address = whole(*arguments)
        for file in files[come:]:
            os.close(file)
        return data, files[:come], flags | socket.MSG_CTRUNC, address

    mover = Mover(str(tmp_path))
    async with arriving(tmp_path) as listener:
        listener.has_room = True
        monkeypatch.setattr(socket, "recv_fds", part)
        with connected() as (mine, theirs):
            assert mover.move(0, Transport(theirs), LONG)
            theirs.close()
            assert await answer(mine) == b""
        monkeypatch.undo()
        with connected() as (mine, theirs):  # the next one is whole
            assert mover.move(0, Transport(theirs), LONG)
            theirs.close()
            assert await answer(mine) == b"HTTP/1.1 200"
        mover.close()


@pytest.mark.parametrize("was_reading", [True, False])
def test_a_connection_that_stays_is_read_as_before(tmp_path: Path, was_reading: bool):
    """One that has sent too much ahead is still not read on."""
    with connected() as (_, theirs):
        transport = Transport(theirs)
        transport.reading = was_reading
        mover = Mover(str(tmp_path))  # where nobody listens
        assert not mover.move(0, transport, SHORT)
        assert transport.reading == was_reading
        mover.close()

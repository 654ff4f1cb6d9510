"""TLS: a handshake counts as a connection, and has as long as a head."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trustme
import uvloop

from autellix.server.gateway import front
from autellix.server.gateway.server import server_of
from autellix.server.gateway.tls import listen

from .conftest import Rig, running, until

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
CALL = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's side and a client's."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


@contextlib.asynccontextmanager
async def secured(tls: ssl.SSLContext, **settings: Any) -> AsyncIterator[tuple[Rig, int]]:
    """Run a gateway; yields it and its port with TLS."""
    async with running(**settings) as rig:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listening = await listen(server_of(rig.runner), listener, tls)
            try:
                yield rig, listener.getsockname()[1]
            finally:
                listening.close()


async def ask(port: int, tls: ssl.SSLContext, count: int = 1) -> None:
    """Make calls on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    for _ in range(count):
        writer.write(CALL)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        length = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
        await reader.readexactly(int(length))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def gone(reader: asyncio.StreamReader) -> bool:
    """Return whether the server closes a connection without a word of its own."""
    async with asyncio.timeout(5):
        try:
            return not await reader.read(1)
        except ConnectionError:
            return True


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_silent_client_is_closed_in_time(contexts, monkeypatch, loop):
    """One that says nothing, half a hello or no TLS; those that agree are served meanwhile."""
    monkeypatch.setattr(front, "HEAD_S", 0.3)

    async def main() -> None:
        async with secured(contexts[0]) as (rig, port):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for (_, writer), said in zip(silent, (b"", b"\x16\x03\x01", CALL), strict=True):
                writer.write(said)
            server = server_of(rig.runner)
            await until(lambda: server.open_connections >= 1)
            await ask(port, contexts[1], count=3)
            closed = [await gone(silent[0][0]), await gone(silent[1][0])]
            with contextlib.suppress(ConnectionError):
                await silent[2][0].read()  # an alert of TLS, if anything
            assert closed == [True, True]
            for _, writer in silent:
                writer.close()
            await until(lambda: server.open_connections == 0)
            await until(lambda: not server.handshakes)
            assert not server.fronts

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_handshake_counts_as_a_connection(contexts, loop):
    """Silent ones fill the limit; a place that is free again is given again."""

    async def main() -> None:
        async with secured(contexts[0], connections_max=2) as (rig, port):
            server = server_of(rig.runner)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await until(lambda: server.open_connections == 2)
            with pytest.raises(OSError):
                await ask(port, contexts[1])
            await until(lambda: server.open_connections == 2)
            silent[0][1].transport.abort()
            await until(lambda: server.open_connections == 1)
            await ask(port, contexts[1], count=2)
            await until(lambda: server.open_connections == 1)
            silent[1][1].close()  # politely, in the middle of a handshake
            await until(lambda: server.open_connections == 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def test_a_stop_does_not_wait_for_handshakes(contexts):
    """They are cut off."""
    async with asyncio.timeout(4):
        async with secured(contexts[0]) as (rig, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: len(server_of(rig.runner).handshakes) == 1)
        assert await gone(reader)
        writer.close()

"""Connections before TLS is agreed on.

asyncio's servers tell of a connection only when its handshake is over. So here connections are
accepted one by one: each counts from the moment it is there, and one whose handshake takes longer
than a head may is closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Final, Protocol

from . import front

if TYPE_CHECKING:
    from .server import Server

NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S: Final = 1.0  # when the process has no file left for a connection

_log = logging.getLogger(__name__)


class Listening(Protocol):
    """Something that accepts connections until it is closed."""

    def close(self) -> None:
        """Accept no more; those that are open go on."""
        ...


async def listen(
    server: Server, listener: socket.socket, tls: ssl.SSLContext | None, *, backlog: int = 128
) -> Listening:
    """Serve what connects to a socket that is bound."""
    if tls is None:
        loop = asyncio.get_running_loop()
        return await loop.create_server(server, sock=listener, backlog=backlog)
    listener.setblocking(False)
    listener.listen(backlog)
    return TlsListener(server, listener, tls)


class TlsListener:
    """Accepts connections and agrees on TLS with them.

    Args:
        server: Whose they are.
        listener: A socket that listens; it is closed with this.
        tls: The server's certificate.
    """

    def __init__(self, server: Server, listener: socket.socket, tls: ssl.SSLContext) -> None:
        self._server = server
        self._listener = listener
        self._tls = tls
        self._task = asyncio.create_task(self._accept(), name="accept TLS")

    def close(self) -> None:
        """Accept no more; handshakes under way end with the server."""
        self._task.cancel()
        self._task.add_done_callback(lambda _: self._listener.close())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # mostly of one client alone
                if self._listener.fileno() < 0:
                    return
                if error.errno in NO_FILES:
                    _log.warning("no connection can be accepted for now: %s", error)
                    await asyncio.sleep(PAUSE_S)
                continue
            if not self._server.connection_opened():
                self._server.connection_closed()
                peer.close()  # without a word: it has not asked for anything yet
                continue
            task = loop.create_task(self._agree(loop, peer))
            self._server.handshakes.add(task)
            task.add_done_callback(self._server.handshakes.discard)

    async def _agree(self, loop: asyncio.AbstractEventLoop, peer: socket.socket) -> None:
        after = front.Front(self._server, loop, is_counted=True)
        try:
            await loop.connect_accepted_socket(
                lambda: after, peer, ssl=self._tls, ssl_handshake_timeout=front.HEAD_S
            )
        except OSError as error:  # it has gone, is late, or speaks something else
            _log.debug("no TLS was agreed on: %s", error)
        finally:
            if not after.was_connected:
                self._server.connection_closed()

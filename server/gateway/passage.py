"""How an answer went to a client: the relay has written its bytes to the transport already."""

from __future__ import annotations

from typing import NamedTuple

from aiohttp import web


class Passage(NamedTuple):
    """How an answer went to the client: its bytes are gone already."""

    status: int
    keep_alive: bool  # whether the client's connection goes on


class Passed(web.StreamResponse):
    """The same, for aiohttp, which must not send anything more."""

    def __init__(self, passage: Passage) -> None:
        super().__init__(status=passage.status or 502)
        self._passed_keep_alive = passage.keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the client's connection goes on."""
        return self._passed_keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Send nothing: it is sent."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Send nothing: it is sent."""

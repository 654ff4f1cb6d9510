"""Reading a client's request, and writing the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from ..identity import ENGINE_HEADERS
from ..types import Engine
from .errors import BadRequest, SlowBody, too_large
from .state import BODY_BYTES, GATEWAY, Gateway, lower_headers

#: Never passed on: hop by hop, or said by the gateway itself.
DROPPED: Final = frozenset(
    name.encode()
    for name in (
        "connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "content-encoding",
        "accept-encoding", "expect", "authorization", "x-api-key", "cookie", *ENGINE_HEADERS,
    )
)  # fmt: skip


class Line(NamedTuple):
    """A header, and what of it goes on to the engine: a line, or nothing."""

    name: str  # lower case
    value: str
    passed: bytes

    @classmethod
    def of(cls, name: bytes, value: bytes) -> Line:
        """Return the header of a name and a value."""
        lower = name.lower()
        goes_on = lower not in DROPPED and not lower.startswith(b"x-autellix-")
        return cls(
            lower.decode("utf-8", "surrogateescape"),
            value.decode("utf-8", "surrogateescape"),
            b"%s: %s\r\n" % (lower, value) if goes_on else b"",
        )


@dataclass(slots=True, eq=False)
class ClientRequest:
    """What the relay needs of a client's request, whoever read it."""

    gateway: Gateway
    method: str
    path: str
    target: str  # the path and the query as they came
    headers: dict[str, str]  # by lower-case name; of a repeated one the last
    lines: Sequence[Line]
    transport: asyncio.Transport
    drain: Callable[[], Awaitable[None]]  # returns when the client has read enough
    keep_alive: bool
    old: bool  # HTTP/1.0, which knows no chunks

    @classmethod
    def of_web(cls, request: web.Request) -> ClientRequest:
        """Return what aiohttp has read.

        Raises:
            ConnectionResetError: the client has gone.
        """
        if request.transport is None:
            raise ConnectionResetError("the client has gone")
        old = request.version < (1, 1)
        return cls(
            gateway=request.app[GATEWAY],
            method=request.method,
            path=request.path,
            target=request.rel_url.raw_path_qs,
            headers=lower_headers(request),
            lines=[Line.of(name, value) for name, value in request.raw_headers],
            transport=request.transport,
            drain=request.writer.drain,
            keep_alive=request.keep_alive and not old,
            old=old,
        )


async def read_body(request: web.Request, limit_bytes: int, slow_s: float) -> bytes:
    """Return a request's body, decompressed; `give_room_back` when it is done with.

    Raises:
        TooLarge: it is longer than the limit.
        SlowBody: it does not come in time.
        Busy: the bodies of all requests together are too long.
    """
    if (request.content_length or 0) > limit_bytes:
        raise too_large(limit_bytes)
    room = request.app[GATEWAY].bodies
    body = bytearray()
    try:
        async with asyncio.timeout(slow_s):
            while piece := await request.content.readany():
                if len(body) + len(piece) > limit_bytes:
                    raise too_large(limit_bytes)
                if not room.take(len(piece)):
                    request.app[GATEWAY].count("refused body")
                    raise room.is_full()
                body += piece
                request[BODY_BYTES] = len(body)
    except TimeoutError:
        raise SlowBody(f"body: did not arrive within {slow_s:g} s") from None
    return bytes(body)


def give_room_back(request: web.Request) -> None:
    """Give back the room that a request's body took."""
    request.app[GATEWAY].bodies.give(request.pop(BODY_BYTES, 0))


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``.

    Raises:
        BadRequest: it is none.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if not body:
            raise BadRequest(
                "body: empty is not allowed; allowed is a JSON object", param="body"
            ) from None
        raise BadRequest(
            f"body: not JSON ({error}); allowed is a JSON object", param="body"
        ) from None
    if not isinstance(document, dict):
        kind = {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
            type(document), "number"
        )
        raise BadRequest(
            f"body: a JSON {kind} is not allowed; allowed is a JSON object", param="body"
        )
    return document


def encode_body(document: dict[str, Any]) -> bytes:
    """Return an edited body as JSON.

    Raises:
        BadRequest: it is nested deeper than can be written again.
    """
    try:
        return orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        raise BadRequest(
            f"body: cannot be passed on ({error}); allowed is JSON nested at most 250 deep",
            param="body",
        ) from None


def build_request(
    request: ClientRequest, engine: Engine, body: bytes, ours: tuple[tuple[bytes, bytes], ...]
) -> bytes:
    """Return the bytes of the request to the engine."""
    address = engine.address
    host = address.host if address.uds is None else "engine"
    parts = [f"{request.method} {request.target} HTTP/1.1\r\nhost: {host}\r\n".encode()]
    parts += [line.passed for line in request.lines]
    if engine.api_key is not None:
        parts += (b"authorization: Bearer ", engine.api_key.encode(), b"\r\n")
    for name, value in ours:
        parts += (name, b": ", value, b"\r\n")
    if body or request.method not in ("GET", "DELETE"):
        parts.append(b"content-length: %d\r\n" % len(body))
    parts += (b"\r\n", body)
    return b"".join(parts)


def prompt_tokens_of(document: dict[str, Any]) -> int | None:
    """Return the prompt's length if the client sent token ids."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return len(prompt)
        if isinstance(prompt[0], list):
            return sum(len(p) for p in prompt if isinstance(p, list))
    return None

"""Reading a client's request, and writing the engine's."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from aiohttp import web

from ..identity import ENGINE_HEADERS
from ..types import Engine
from .errors import BadRequest, SlowBody, too_large

#: Never passed on: hop by hop, or said by the gateway itself.
DROPPED: Final = frozenset(
    name.encode()
    for name in (
        "connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "content-encoding",
        "accept-encoding", "expect", "authorization", "x-api-key", "cookie", *ENGINE_HEADERS,
    )
)  # fmt: skip


async def read_body(request: web.Request, limit_bytes: int, slow_s: float) -> bytes:
    """Return a request's body, decompressed.

    Raises:
        TooLarge: it is longer than the limit.
        SlowBody: it does not come in time.
    """
    if (request.content_length or 0) > limit_bytes:
        raise too_large(limit_bytes)
    try:
        async with asyncio.timeout(slow_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limit_bytes) from None
    except TimeoutError:
        raise SlowBody(f"body: did not arrive within {slow_s:g} s") from None


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


def build_request(
    request: web.Request, engine: Engine, body: bytes, ours: tuple[tuple[bytes, bytes], ...]
) -> bytes:
    """Return the bytes of the request to the engine."""
    address = engine.address
    host = address.host if address.uds is None else "engine"
    parts = [
        request.method.encode(), b" ", request.rel_url.raw_path_qs.encode(),
        b" HTTP/1.1\r\nhost: ", host.encode(), b"\r\n",
    ]  # fmt: skip
    for name, value in request.raw_headers:
        lower = name.lower()
        if lower not in DROPPED and not lower.startswith(b"x-autellix-"):
            parts += (lower, b": ", value, b"\r\n")
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

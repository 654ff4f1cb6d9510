"""One question to an engine over HTTP/1.1, with a deadline: is it well, and what are its counters?

Hand-written over asyncio streams, as the pool must not depend on the gateway's HTTP library, and a
probe must share nothing with the connections it is to judge.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from ..types import EngineAddress

_ANSWER_BYTES_MAX: Final = 8 << 20


class Answer(NamedTuple):
    """What an engine said."""

    status: int
    body: bytes


async def ask(
    address: EngineAddress,
    path: str,
    *,
    api_key: str | None,
    deadline_s: float,
    body: bytes | None = None,
) -> Answer | None:
    """Return the engine's answer to ``GET path``, or None if none came in time.

    Args:
        address: Where the engine listens.
        path: With a leading slash.
        api_key: Sent as a bearer token.
        deadline_s: For everything: connect, send and the whole answer.
        body: JSON to POST instead.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await _exchange(address, path, api_key, body)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        return None


async def _exchange(
    address: EngineAddress, path: str, api_key: str | None, body: bytes | None
) -> Answer:
    """Send one request on a connection of its own and read to the end."""
    if address.uds is not None:
        reader, writer = await asyncio.open_unix_connection(address.uds)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        method = "GET" if body is None else "POST"
        lines = [f"{method} {path} HTTP/1.0", "Host: engine", "Connection: close"]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        answer = bytearray()
        while chunk := await reader.read(1 << 16):
            answer += chunk
            if len(answer) > _ANSWER_BYTES_MAX:
                raise ValueError(f"an answer of more than {_ANSWER_BYTES_MAX} bytes to {path}")
        return Answer(status, bytes(answer))
    finally:
        writer.close()


def counters(metrics: bytes) -> dict[str, float]:
    r"""Return Prometheus text as name → value, summed over labels; what is no number is left out.

    >>> counters(b'# HELP x\nvllm:n{engine="0"} 2.0\nvllm:n{engine="1"} 1.0\n')
    {'vllm:n': 3.0}
    """
    sums: dict[str, float] = {}
    for line in metrics.decode("utf-8", "replace").splitlines():
        if not line or line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0]
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums

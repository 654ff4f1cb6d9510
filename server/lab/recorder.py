"""``autellix trace record``: a relay in front of a running server that notes each call's counts.

Clients use the relay's address instead of the server's. Everything passes through unchanged; of an
answer only its ``usage`` is read, and of a request only who sent it. No text is kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

from . import record, trace

BODY_BYTES_MAX: Final = 64 << 20
TAIL_BYTES: Final = 64 << 10  # usage stands at the end of a stream
_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
_PROGRAM_HEADERS: Final = ("X-Autellix-Session", "X-Session-ID")


class Recorder:
    """The relay.

    Args:
        upstream: The server, such as ``http://127.0.0.1:8000``.
        rows_max: No more calls are noted than this; the relay goes on.
    """

    def __init__(self, upstream: str, rows_max: int = 1_000_000) -> None:
        self._upstream = upstream.rstrip("/")
        self._rows_max = rows_max
        self._client: Any = None
        self._untagged = 0
        self.rows: list[record.Row] = []

    def application(self) -> Any:
        """Return the aiohttp application."""
        from aiohttp import web

        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._relay)
        application.cleanup_ctx.append(self._session)
        return application

    async def _session(self, _application: Any) -> Any:
        import aiohttp

        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        yield
        await self._client.close()

    async def _relay(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        start_s = time.time()
        async with self._client.request(
            request.method, self._upstream + request.raw_path, data=body, headers=headers
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            tail = b""
            async for chunk in answer.content.iter_any():
                tail = (tail + chunk)[-TAIL_BYTES:]
                await response.write(chunk)
            await response.write_eof()
        if answer.status == 200:
            self._note(request.headers, tail, start_s)
        return response

    def _note(self, headers: Any, tail: bytes, start_s: float) -> None:
        usage = usage_in(tail)
        if usage is None or len(self.rows) >= self._rows_max:
            return
        name = next((headers[h] for h in _PROGRAM_HEADERS if h in headers), None)
        if name is None:  # a call without a tag is a program of its own
            self._untagged += 1
            name = f"untagged-{self._untagged}"
        details = usage.get("prompt_tokens_details") or {}
        self.rows.append(
            record.Row(
                program=name,
                thread=headers.get("X-Autellix-Thread", "0"),
                start_s=start_s,
                end_s=time.time(),
                prompt_tokens=int(usage["prompt_tokens"]),
                output_tokens=max(1, int(usage.get("completion_tokens") or 1)),
                hit_tokens=int(details.get("cached_tokens") or 0),
            )
        )


def usage_in(tail: bytes) -> dict[str, Any] | None:
    """Return the last usage object in the end of an answer, streamed or not; None for none."""
    at = tail.rfind(b'"usage":')
    while at >= 0:
        text = tail[at + len(b'"usage":') :].decode("utf-8", "replace").lstrip()
        try:
            usage, _ = json.JSONDecoder().raw_decode(text)
        except json.JSONDecodeError:
            usage = None
        if isinstance(usage, dict) and usage.get("prompt_tokens"):
            return usage
        at = tail.rfind(b'"usage":', 0, at)
    return None


async def serve(recorder: Recorder, port: int, stop: asyncio.Event) -> None:
    """Relay on a local port until ``stop`` is set."""
    from aiohttp import web

    runner = web.AppRunner(recorder.application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await stop.wait()
    finally:
        await runner.cleanup()


def save(recorder: Recorder, path: Path, kind: str) -> int:
    """Write what was noted as a trace and return the number of programs."""
    return trace.write(record.programs(recorder.rows, "recorded", kind), path)

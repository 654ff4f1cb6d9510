"""``autellix trace record``: a relay in front of a running server that notes each call's counts.

Clients use the relay's address instead of the server's. Everything passes through unchanged, but
that answers are asked for uncompressed; of an answer only its ``usage`` is read, and of a request
only who sent it. No text is kept. A call whose counts do not come is counted with the reason.
"""

from __future__ import annotations

import asyncio
import collections
import json
import time
from pathlib import Path
from typing import Any, Final

from . import record, trace

BODY_BYTES_MAX: Final = 64 << 20
TAIL_BYTES: Final = 64 << 10  # usage stands at the end of a stream
_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
_CALL_PATHS: Final = ("/completions", "/responses", "/messages")  # how paths of LLM calls end
CUT: Final = "cut before its end"
COMPRESSED: Final = "compressed"
NO_USAGE: Final = "no usage in the answer; a stream needs stream_options.include_usage"
UNREACHABLE: Final = "the server could not be reached"
_PROGRAM_HEADERS: Final = ("X-Autellix-Session", "X-Session-ID")


class Recorder:
    """The relay.

    Args:
        upstream: The server, such as ``http://127.0.0.1:8000``.
        rows_max: No more calls are noted than this; the relay goes on.

    Attributes:
        rows: The calls that are noted.
        skipped: How many calls are not noted, by reason.
    """

    def __init__(self, upstream: str, rows_max: int = 1_000_000) -> None:
        self._upstream = upstream.rstrip("/")
        self._rows_max = rows_max
        self._client: Any = None
        self._untagged = 0
        self.rows: list[record.Row] = []
        self.skipped: collections.Counter[str] = collections.Counter()

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
        """Pass a request on; a call that is not noted is counted, also when this is cancelled."""
        reason: str | None = CUT
        try:
            response, reason = await self._pass_on(request)
            return response
        finally:
            if reason is not None and _is_call(request):
                self.skipped[reason] += 1

    async def _pass_on(self, request: Any) -> tuple[Any, str | None]:
        """Return the answer, sent to its end or cut, and why the call is not noted if it is not."""
        import aiohttp
        from aiohttp import web

        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        headers = {k: v for k, v in headers.items() if k.lower() != "accept-encoding"}
        headers["Accept-Encoding"] = "identity"
        start_s = time.time()
        response: Any = None
        try:
            async with self._client.request(
                request.method, self._upstream + request.raw_path, data=body, headers=headers,
                allow_redirects=False,
            ) as answer:  # fmt: skip
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                tail = b""
                async for chunk in answer.content.iter_any():
                    tail = (tail + chunk)[-TAIL_BYTES:]
                    await response.write(chunk)
                await response.write_eof()
        except (aiohttp.ClientError, ConnectionError):
            if response is None:
                return web.Response(status=502, text=UNREACHABLE), UNREACHABLE
            if request.transport is not None:
                request.transport.abort()  # the client is to see that the answer is cut
            return response, CUT
        return response, self._note(request.headers, answer, tail, start_s)

    def _note(self, headers: Any, answer: Any, tail: bytes, start_s: float) -> str | None:
        """Note a call whose answer is over; return why not if its counts are not known."""
        if answer.status != 200:
            return f"status {answer.status}"
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            return COMPRESSED
        usage = usage_in(tail)
        if usage is None:
            return NO_USAGE
        if len(self.rows) >= self._rows_max:
            return f"more than {self._rows_max} calls"
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
        return None


def _is_call(request: Any) -> bool:
    return bool(request.method == "POST" and request.path.endswith(_CALL_PATHS))


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


def unnoted(recorder: Recorder) -> str:
    """Return one line per reason for which calls were not noted; empty if all were."""
    return "".join(
        f"{count} call{'s' * (count > 1)} without counts: {reason}\n"
        for reason, count in sorted(recorder.skipped.items())
    )


def save(recorder: Recorder, path: Path, kind: str) -> int:
    """Write what was noted as a trace and return the number of programs."""
    return trace.write(record.programs(recorder.rows, "recorded", kind), path)

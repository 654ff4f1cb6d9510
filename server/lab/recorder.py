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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from . import record, trace

BODY_BYTES_MAX: Final = 64 << 20
END_BYTES: Final = 64 << 10  # usage stands at the end of a stream, part of it at the beginning
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
        skipped: How many calls that ran are not noted, by reason.
        refused: How many calls did not run, by the answer; a trace does not miss them.
    """

    def __init__(self, upstream: str, rows_max: int = 1_000_000) -> None:
        self._upstream = upstream.rstrip("/")
        self._rows_max = rows_max
        self._client: Any = None
        self._untagged = 0
        self.rows: list[record.Row] = []
        self.skipped: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()

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

        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            self._refuse(request, error.status)
            return web.Response(status=error.status, text=error.text), None
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
                head = tail = b""
                async for chunk in answer.content.iter_any():
                    head += chunk[: END_BYTES - len(head)]
                    tail = (tail + chunk)[-END_BYTES:]
                    await response.write(chunk)
                await response.write_eof()
        except (aiohttp.ClientError, ConnectionError):
            if response is None:
                return web.Response(status=502, text=UNREACHABLE), UNREACHABLE
            if request.transport is not None:
                request.transport.abort()  # the client is to see that the answer is cut
            return response, CUT
        if answer.status >= 400:
            self._refuse(request, answer.status)
            return response, None
        ends = tail if len(tail) < END_BYTES else head + tail
        return response, self._note(request.headers, answer, ends, start_s)

    def _refuse(self, request: Any, status: int) -> None:
        if _is_call(request):
            self.refused[f"status {status}"] += 1

    def _note(self, headers: Any, answer: Any, ends: bytes, start_s: float) -> str | None:
        """Note a call whose answer is over; return why not if its counts are not known."""
        if answer.status != 200:
            return f"status {answer.status}"
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            return COMPRESSED
        counts = counts_in(ends)
        if counts is None:
            return NO_USAGE
        if len(self.rows) >= self._rows_max:
            return f"more than {self._rows_max} calls"
        name = next((headers[h] for h in _PROGRAM_HEADERS if h in headers), None)
        if name is None:  # a call without a tag is a program of its own
            self._untagged += 1
            name = f"untagged-{self._untagged}"
        self.rows.append(
            record.Row(name, headers.get("X-Autellix-Thread", "0"), start_s, time.time(), *counts)
        )
        return None


def _is_call(request: Any) -> bool:
    return bool(request.method == "POST" and request.path.endswith(_CALL_PATHS))


def counts_in(ends: bytes) -> tuple[int, int, int] | None:
    """Return tokens of prompt, output and prefix found in the cache; None where nothing says them.

    Args:
        ends: The beginning and the end of an answer, streamed or not.

    An answer of OpenAI's APIs has one ``usage`` with all counts. A stream of Anthropic's has the
    prompt's in its first event and the output's in its last, and leaves what was found in the cache
    out of the prompt's.
    """
    usage: dict[str, Any] = {}
    for found in _usages(ends):
        usage.update((name, value) for name, value in found.items() if value is not None)
    prompt = usage.get("prompt_tokens") or usage.get("input_tokens")
    if not prompt:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    hit = int(usage.get("cache_read_input_tokens") or 0)
    prompt += hit + int(usage.get("cache_creation_input_tokens") or 0)
    output = usage.get("completion_tokens") or usage.get("output_tokens") or 1
    return int(prompt), max(1, int(output)), hit or int(details.get("cached_tokens") or 0)


def _usages(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield the usage objects in a text, in their order; none that is inside a string."""
    for part in text.split(b'"usage":')[1:]:
        try:
            usage, _ = json.JSONDecoder().raw_decode(part.decode("utf-8", "replace").lstrip())
        except json.JSONDecodeError:
            continue
        if isinstance(usage, dict):
            yield usage


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
        f"{count} call{'s' * (count > 1)} {how}: {reason}\n"
        for how, reasons in (("without counts", recorder.skipped), ("refused", recorder.refused))
        for reason, count in sorted(reasons.items())
    )


def save(recorder: Recorder, path: Path, kind: str) -> int:
    """Write what was noted as a trace and return the number of programs."""
    return trace.write(record.programs(recorder.rows, "recorded", kind), path)

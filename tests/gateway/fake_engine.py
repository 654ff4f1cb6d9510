"""A fake engine on a unix socket: answers like vLLM, and can be told to stall and to die."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from autellix.server.types import EngineAddress, EngineState


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    body: Any


@dataclass
class FakeEngine:
    """One engine; satisfies `types.Engine`. Its behaviour is changed by its fields."""

    engine_id: str
    address: EngineAddress
    api_key: str | None = "engine-key"
    state: EngineState = EngineState.READY
    chunks: int = 5
    chunk_text: str = "word "
    stall_at: int | None = None  # the chunk before which it waits for `go`
    die_at: int | None = None  # the chunk before which its connection breaks; -1: before the head
    deaths: int | None = None  # how often it does so; None: always
    metrics: str | None = None  # what it says on /metrics
    usage: dict[str, int] | None = None  # what its answers say they took
    models: list[str] = field(default_factory=list)  # empty: it serves all but "unknown"
    seen: list[Seen] = field(default_factory=list)
    cancelled: int = 0
    finished: int = 0
    connections: set[int] = field(default_factory=set)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self.runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self.runner.setup()
        if self.address.uds is not None:
            await web.UnixSite(self.runner, self.address.uds).start()
            return
        await web.TCPSite(self.runner, self.address.host, self.address.port).start()
        self.address = self.address._replace(port=self.runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening; what is under way breaks."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        is_json = raw and "json" in request.headers.get("content-type", "")
        body = json.loads(raw) if is_json else None
        headers = {name.lower(): value for name, value in request.headers.items()}
        if request.version >= (1, 1):  # else it is only asked for its models
            self.seen.append(Seen(request.method, request.path_qs, headers, raw, body))
        self.connections.add(id(request.transport))
        self.arrived.set()
        try:
            response = await self._answer(request, body)
            self.finished += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            self.stopped.set()
            raise

    async def _answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        model = body.get("model") if isinstance(body, dict) else None
        if self.models and request.path == "/v1/models":
            rows = [{"id": name, "object": "model", "owned_by": self.engine_id}
                    for name in self.models]  # fmt: skip
            return web.json_response({"object": "list", "data": rows})
        if model == "unknown" or (self.models and model is not None and model not in self.models):
            error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError",
                     "param": "model", "code": 404}  # fmt: skip
            return web.json_response({"error": error}, status=404)
        if request.path == "/metrics" and self.metrics is not None:
            return web.Response(text=self.metrics)
        if self.die_at == -1 and self.deaths != 0:
            self.deaths = None if self.deaths is None else self.deaths - 1
            return self._die(request)
        if not (isinstance(body, dict) and body.get("stream")):
            await self._maybe_stall(0)
            text = self.chunk_text * self.chunks
            answer: dict[str, Any] = {"path": request.path, "choices": [{"text": text}]}
            if self.usage is not None:
                answer["usage"] = self.usage
            return web.json_response(answer)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(self.chunks):
            await self._maybe_stall(number)
            if self.die_at == number:
                return self._die(request)
            event = json.dumps({"n": number, "text": self.chunk_text})
            await response.write(f"data: {event}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _maybe_stall(self, number: int) -> None:
        if self.stall_at == number:
            await self.go.wait()

    def _die(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("the engine dies")


class FakePool:
    """Some engines; satisfies `types.Engines`."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.engines = engines
        self.failures: list[str] = []

    def all(self) -> list[FakeEngine]:
        """Return the engines."""
        return self.engines

    def note_failure(self, engine_id: str) -> None:
        """Remember whose connection broke."""
        self.failures.append(engine_id)


@asynccontextmanager
async def fake_engines(
    folder: Path, count: int, *, tcp: bool = False
) -> AsyncIterator[list[FakeEngine]]:
    """Run ``count`` engines on sockets in ``folder``, or on ports as engines elsewhere."""
    uds = EngineAddress(None, "127.0.0.1", 0) if tcp else EngineAddress("", "", 0)
    engines = [
        FakeEngine(f"e{i}", uds if tcp else uds._replace(uds=str(folder / f"e{i}.sock")))
        for i in range(count)
    ]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@contextmanager
def engine_in_thread(
    folder: Path,
) -> Iterator[tuple[FakeEngine, asyncio.AbstractEventLoop]]:
    """Run an engine on a port, in a thread of its own; yield it and the loop that it is in."""
    loop = asyncio.new_event_loop()
    made: list[FakeEngine] = []
    up, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        async with fake_engines(folder, 1, tcp=True) as engines:
            made.extend(engines)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert up.wait(30)
        yield made[0], loop
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()

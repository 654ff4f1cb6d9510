"""A gateway in front of fake engines."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from autellix.server import types
from autellix.server.clock import SystemClock
from autellix.server.gateway.app import create_app, make_runner
from autellix.server.gateway.config import GatewayConfig
from autellix.server.gateway.state import GATEWAY, Gateway
from autellix.server.process_table import Accounting, ProcessTable

from .fake_engine import FakeEngine, FakePool, fake_engines

KEY = b"a test's channel key"


@dataclass
class Rig:
    """A running gateway and what is round it."""

    url: str
    port: int
    table: ProcessTable
    engines: list[FakeEngine]
    pool: FakePool
    client: aiohttp.ClientSession
    app: web.Application
    runner: web.AppRunner
    placed: list[types.CallInfo] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    @property
    def gateway(self) -> Gateway:
        """What the handlers share."""
        return self.app[GATEWAY]

    @property
    def engine(self) -> FakeEngine:
        """The first engine."""
        return self.engines[0]

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """Post a chat completion; returns (status, headers, JSON)."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        url = f"{self.url}/v1/chat/completions"
        async with self.client.post(url, json=body, headers=headers) as response:
            return response.status, response.headers, await response.json()

    async def settled(self) -> None:
        """Wait until no call is in flight."""
        await until(lambda: self.table.in_flight == 0)
        assert self.table.check_integrity() == []
        assert self.table.counts["calls_begun"] == self.table.counts["calls_ended"]


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait until a condition holds, which something else brings about."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def running(
    count: int = 1,
    *,
    programs_max: int = 1000,
    accounting: Accounting = "plas",
    engines: list[FakeEngine] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Run a gateway with ``count`` fake engines, or those given, and the given settings."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ax"))
        if engines is None:
            engines = await stack.enter_async_context(fake_engines(Path(folder), count))
        clock = SystemClock()
        pool = FakePool(engines)
        table = ProcessTable(
            accounting=accounting,
            now_s=clock.now_s(),
            programs_max=programs_max,
            lease_s=settings.get("lease_s", 60.0),
        )
        placed: list[types.CallInfo] = []
        forgotten: list[str] = []

        def place(call: types.CallInfo, ready: Sequence[types.Engine]) -> types.Engine:
            placed.append(call)
            return min(ready, key=lambda e: call.loads.get(e.engine_id, 0))

        app = create_app(
            config=GatewayConfig(**settings),
            table=table,
            engines=pool,
            place=place,
            clock=clock,
            key=KEY,
            forget_programs=forgotten.extend,
            engine_views=lambda: [{"engine_id": e.engine_id} for e in engines],
        )
        runner = make_runner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        client = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{port}"
        yield Rig(url, port, table, engines, pool, client, app, runner, placed, forgotten)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway with one engine."""
    async with running() as made:
        yield made


@pytest.fixture
async def rig_of_two() -> AsyncIterator[Rig]:
    """A gateway with two engines."""
    async with running(2) as made:
        yield made

"""One process owns the pool: what it learns of engines and calls, the gateway processes get."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from autellix.server.clock import SystemClock
from autellix.server.config import PoolConfig, ServeConfig
from autellix.server.gateway import siblings
from autellix.server.gateways import keeper
from autellix.server.gateways.fleet import SpreadFleet
from autellix.server.listeners import bind
from autellix.server.process_table import program_id_of
from autellix.server.server_config import ServerConfig, effective
from tests.gateway.conftest import until
from tests.pool.fake_fleet import fake_engines as fake_engines
from tests.processes import is_alive

from .rig import API, CHAT, COUNT, LIMIT_S, session_of, tagged

pytestmark = pytest.mark.usefixtures("fake_engines")
OWNERS = range(COUNT)


class Running:
    """A fleet with engines of its own, its gateway processes, and a client."""

    def __init__(self, fleet: SpreadFleet, url: str, client: aiohttp.ClientSession) -> None:
        self.fleet, self.url, self.client = fleet, url, client

    async def call(self, session: str, tokens: int = 4) -> str:
        """Make a call; return its engine."""
        body = {"model": "fake", "messages": [], "max_tokens": tokens}
        async with self.client.post(
            f"{self.url}{CHAT}", json=body, headers=tagged(session)
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            return answer.headers["x-autellix-engine"]

    async def get(self, path: str) -> Any:
        """Return what a gateway says."""
        async with self.client.get(f"{self.url}{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def row(self, session: str) -> Any:
        """Return what is known of a session."""
        return await self.get(f"{API}/sessions/{session}")

    def pids(self) -> list[int]:
        """Return the gateway processes."""
        assert self.fleet.keeper is not None
        return [c.process.pid for c in self.fleet.keeper._children if c.process is not None]


@asynccontextmanager
async def running(folder: Path, *, replicas: int = 2) -> AsyncIterator[Running]:
    """Run a fleet until the block ends, and see that nothing of it stays."""
    config = ServerConfig(
        serve=ServeConfig(gateways=COUNT, replicas=replicas, state=":memory:"),
        pool=PoolConfig(stagger_s=0.0, stop_grace_s=2.0),
    )
    fleet = SpreadFleet(effective(config, "m"), folder, "m", (), SystemClock())
    fleet.create_app()
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    fleet.listen(listener)
    try:
        await fleet.start()
        await asyncio.wait_for(fleet.first_ready(), LIMIT_S)
        ready = [engine.engine_id for engine in fleet.pool.all()]
        await until(lambda: all(e.state.value == "ready" for e in fleet.pool.all()), LIMIT_S)
        assert len(ready) == replicas
        await fleet.settled()
        async with aiohttp.ClientSession() as client:
            made = Running(fleet, f"http://127.0.0.1:{port}", client)
            pids = made.pids()
            yield made
            pids += made.pids()
    finally:
        await fleet.stop_gateways(lambda: False)
        await fleet.stop()
    await until(lambda: not any(map(is_alive, pids)))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


async def reported(rig: Running, session: str, calls: int) -> Any:
    """Wait until the engines' reports of a session's calls have come; return its row."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            row = await rig.row(session)
            if row["calls_ended"] == calls and row["calls_by_wall_time"] == 0:
                return row
            await asyncio.sleep(0.02)


async def test_reports_reach_the_owner_of_their_program(tmp_path: Path):
    """Each call is charged what its engine has measured, once, in one process's table."""
    async with running(tmp_path) as rig:
        sessions = [session_of(owner) for owner in OWNERS]
        for _ in range(3):
            await asyncio.gather(*(rig.call(session) for session in sessions))
        for session in sessions:
            row = await reported(rig, session, 3)
            assert (row["prompt_tokens"], row["output_tokens"]) == (21, 12)
        document = await rig.get(f"{API}/programs")
        assert document["table"]["reports"] == 6
        assert document["table"].get("reports_unknown", 0) == 0
        await until(lambda: not rig.fleet.loads(), LIMIT_S)
        views = {view["engine"]: view for view in rig.fleet.engine_views()}
        assert sum(view["prompt_tokens"] for view in views.values()) == 42
        engines = (await rig.get(f"{API}/engines"))["engines"]
        assert {row["engine"] for row in engines} == {"e0", "e1"}


async def test_engines_come_and_go_for_all_processes(tmp_path: Path):
    """One that is drained gets no call of any process, and its calls end first."""
    async with running(tmp_path) as rig:
        sessions = [f"spread-{n}" for n in range(16)]
        assert set(await asyncio.gather(*map(rig.call, sessions))) == {"e0", "e1"}
        long = [asyncio.create_task(rig.call(f"long-{n}", 300)) for n in range(8)]
        await until(lambda: sum(rig.fleet.loads().values()) == 8, LIMIT_S)
        assert set(rig.fleet.loads()) == {"e0", "e1"}
        rig.fleet.remove("e0", LIMIT_S)
        await rig.fleet.settled()
        assert set(await asyncio.gather(*map(rig.call, sessions))) == {"e1"}
        assert set(await asyncio.gather(*long)) == {"e0", "e1"}, "none was moved or cut off"
        await until(lambda: [e.engine_id for e in rig.fleet.pool.all()] == ["e1"], LIMIT_S)
        added = rig.fleet.add_local()
        await until(lambda: rig.fleet.pool.get(added).state.value == "ready", LIMIT_S)
        await rig.fleet.settled()
        assert set(await asyncio.gather(*map(rig.call, sessions), *map(rig.call, "abcdefgh"))) == {
            "e1", added,
        }  # fmt: skip


async def test_the_policy_is_everybodys(tmp_path: Path):
    """Engines and processes switch, and a process that starts later is told."""
    async with running(tmp_path, replicas=1) as rig:
        await rig.fleet.set_policy("atlas", {})
        for _ in range(2 * COUNT):
            async with asyncio.timeout(LIMIT_S):
                while (await rig.get(f"{API}/info"))["accounting"] != "atlas":
                    await asyncio.sleep(0.02)
        before = rig.pids()
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: rig.pids()[0] != before[0], LIMIT_S)
        info = [await rig.get(f"{API}/info") for _ in range(4 * COUNT)]
        assert {each["accounting"] for each in info} == {"atlas"}
        for owner in OWNERS:
            await rig.call(session_of(owner))


async def test_engines_are_told_of_tools_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the owner of the pool talks to engines; what a process is told goes through it."""
    told: list[tuple[str, str | None]] = []

    async def note_tool(program_id: str, tool: str | None) -> None:
        told.append((program_id, tool))

    async with running(tmp_path, replicas=1) as rig:
        monkeypatch.setattr(rig.fleet._channel, "note_tool", note_tool)
        sessions = [session_of(owner) for owner in OWNERS]
        for session in sessions:
            await rig.call(session)
            for event in ("start", "end"):
                hint = {"event": event, "tool": "build", "id": "t-1"}
                path = f"{rig.url}{API}/sessions/{session}/tools"
                async with rig.client.post(path, json=hint) as answer:
                    assert answer.status == 204
        await until(lambda: len(told) == 2 * COUNT, LIMIT_S)
        assert [tool for _, tool in sorted(told, key=lambda each: each[0])] == ["build", None] * 2
        assert {program_id for program_id, _ in told} == {
            program_id_of("", session) for session in sessions
        }


async def test_a_process_that_stands_still_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Silence counts as an end; its sockets are there all along, so that a call waits for it."""
    monkeypatch.setattr(keeper, "SILENT_TICKS", 8)
    async with running(tmp_path, replicas=1) as rig:
        before = rig.pids()
        os.kill(before[1], signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_S):
            while True:  # a connection that it has taken already goes with it
                try:
                    await rig.call(session_of(1))
                except aiohttp.ClientError:
                    continue
                break
        assert rig.pids()[1] != before[1]


async def test_figures_come_though_a_process_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without its own: a scraper that waits for it as long as people may would have none."""
    monkeypatch.setattr(siblings, "ASK_S", 1e6)
    monkeypatch.setattr(siblings, "METRICS_S", 0.1)
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(siblings.private_path(str(tmp_path), 0))
    silent.listen()
    asker = siblings.Siblings(str(tmp_path), 1, None)
    await asker.open()

    async def own(_: web.Request) -> web.Response:
        return web.Response(text="autellix_up 1\n", content_type="text/plain")

    try:
        request = make_mocked_request("GET", "/metrics")
        page = await asyncio.wait_for(asker._all_metrics(request, own), LIMIT_S)
        assert page.text == 'autellix_up{gateway="pool"} 1\n'
    finally:
        await asker.close()
        silent.close()


async def test_a_process_that_cannot_be_kept_alive_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As engines that cannot do: whoever watches the server starts it again."""
    async with running(tmp_path, replicas=1) as rig:
        failed = asyncio.create_task(rig.fleet.failed())
        for _ in range(rig.fleet.config.pool.restart_limit):
            pids = rig.pids()
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: rig.pids() != pids or failed.done(), LIMIT_S)  # noqa: B023
        assert "gateway 0 ended with status" in await asyncio.wait_for(failed, LIMIT_S)

"""What an operator does while calls run: add, drain and remove engines, switch the policy."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from autellix.server import MultiEngine, admin_cli, fleet
from autellix.server.engine.launch import EngineCommand, EngineRun, EngineSpec
from autellix.server.gateway.admin import API, AdminConfig, AdminSite
from autellix.server.gateway.fleet_admin import FleetAdmin
from autellix.server.listeners import bind_admin
from autellix.server.types import EngineState
from tests.gateway.conftest import until
from tests.pool.fake_fleet import FAKE, fake_command
from tests.pool.fake_fleet import fake_engines as fake_engines

pytestmark = pytest.mark.usefixtures("fake_engines")
KEY = {"authorization": "Bearer operator"}
DIGEST = hashlib.sha256(b"operator").hexdigest()


class Operator:
    """Somebody with the admin key."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self.url = url
        self._client = client

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return (status, JSON)."""
        url = f"{self.url}{API}{path}"
        async with self._client.request(method, url, json=body, headers=KEY) as answer:
            return answer.status, await answer.json()

    async def states(self) -> dict[str, str]:
        """Return the state of each engine."""
        _, answer = await self.ask("GET", "/engines")
        return {view["engine"]: view["state"] for view in answer["engines"]}


@asynccontextmanager
async def operated(
    tmp_path: Path, model: str | None = "m", **arguments: Any
) -> AsyncIterator[tuple[MultiEngine, Operator]]:
    """Run engines and the admin site beside them."""
    async with MultiEngine(model, **arguments) as engine, aiohttp.ClientSession() as client:
        assert engine.fleet._gateway is not None
        site = AdminSite(engine.fleet._gateway, AdminConfig(keys=(f"ops:{DIGEST}",)), tmp_path)
        site.add(FleetAdmin(engine.fleet).routes())
        listener = bind_admin("127.0.0.1", 0, 0)
        await site.start(listener, None)
        try:
            yield engine, Operator(f"http://127.0.0.1:{listener.getsockname()[1]}", client)
        finally:
            await site.stop()


@asynccontextmanager
async def engine_elsewhere() -> AsyncIterator[str]:
    """Run an engine that is nobody's child; yields its URL."""
    with bind_admin("127.0.0.1", 0, 0) as probe:
        port = probe.getsockname()[1]
    argv = (sys.executable, str(FAKE), "--host", "127.0.0.1", "--port", str(port))
    process = await asyncio.create_subprocess_exec(*argv)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def test_engines_come_and_go_while_calls_run(tmp_path: Path):
    """A removed engine finishes its calls first; no call sees any of it; names are not reused."""
    async with operated(tmp_path) as (engine, operator), engine_elsewhere() as url:
        assert await operator.ask("POST", "/engines", {"local": True}) == (201, {"engine": "e1"})
        assert await operator.ask("POST", "/engines", {"url": url}) == (201, {"engine": "r0"})
        members = {member.engine_id: member for member in engine.fleet.pool.all()}
        await until(lambda: all(m.state is EngineState.READY for m in members.values()), 60)
        calls = [engine.generate("x", {"max_tokens": 150}, session=f"run-{n}") for n in range(30)]
        loads = engine.fleet.table.loads
        await until(lambda: len(loads()) == 3, 20)
        status, answer = await operator.ask("DELETE", "/engines/e0?drain_s=60")
        assert (status, answer["state"]) == (202, "draining")
        assert (await operator.states())["e0"] == "draining"
        assert (await operator.ask("DELETE", "/engines/e0"))[0] in (202, 404)
        later = [engine.generate("x", {"max_tokens": 2}, session=f"run-{n}") for n in range(30)]
        outputs = await asyncio.gather(*calls, *later)
        assert {len(output.token_ids) for output in outputs} == {150, 2}
        await until(lambda: len(engine.fleet.pool.all()) == 2, 30)
        assert set(await operator.states()) == {"e1", "r0"}
        assert await operator.ask("POST", "/engines", {"local": True}) == (201, {"engine": "e2"})
        assert engine.fleet.table.loads() == {}
        assert engine.fleet.balancer.faults({}) == []
        assert engine.fleet.balancer.leaks == 0


async def test_a_drain_ends_when_its_time_is_over(tmp_path: Path):
    """A call that takes longer is cut off, or goes elsewhere if it has no answer yet."""
    async with operated(tmp_path, replicas=1) as (engine, operator):
        call = engine.generate("x", {"max_tokens": 100_000})
        outputs = aiter(call)
        await anext(outputs)
        assert (await operator.ask("DELETE", "/engines/e0?drain_s=0"))[0] == 202
        with pytest.raises(Exception, match="cut off"):
            await call
        await until(lambda: not engine.fleet.pool.all(), 30)
        assert engine.fleet.table.in_flight == 0


async def test_the_policy_is_switched_and_no_call_is_lost(tmp_path: Path):
    """Calls before, during and after; a restarted or new engine learns it when it says hello."""
    async with operated(tmp_path, replicas=2) as (engine, operator):
        status, answer = await operator.ask("GET", "/policy")
        assert (status, answer["policy"]) == (200, "adaptive")
        members = engine.fleet.pool.all()
        await until(lambda: all(m.state is EngineState.READY for m in members), 60)
        calls = []
        for policy in ("atlas", "mlfq", "fcfs", "plas", "atlas"):
            calls += [engine.generate("x", {"max_tokens": 40}) for _ in range(40)]
            status, answer = await operator.ask("PUT", "/policy", {"policy": policy, "beta": 4.0})
            assert (status, answer["policy"]) == (200, policy)
        outputs = await asyncio.gather(*calls)
        assert {len(output.token_ids) for output in outputs} == {40}
        assert engine.fleet.table.counts["calls_ended"] == 200
        assert engine.fleet.table.accounting == "atlas"
        assert (await operator.ask("POST", "/engines", {"local": True}))[0] == 201

        def all_told() -> bool:
            told = engine.fleet.policy_view()["engines"]
            return told == dict.fromkeys(("e0", "e1", "e2"), "atlas")

        await until(all_told, 60)


async def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path):
    """Field, value, and what is allowed."""
    async with operated(tmp_path) as (engine, operator):
        for method, path, body, message in (
            ("POST", "/engines", {}, "allowed is either"),
            ("POST", "/engines", {"url": "ftp://x"}, "engine-url: 'ftp://x'"),
            ("POST", "/engines", {"url": 7}, "url: 7 is not allowed"),
            ("POST", "/engines", {"lokal": True}, "lokal: unknown"),
            ("DELETE", "/engines/e0?drain_s=-1", None, "drain_s: '-1' is not allowed"),
            ("PUT", "/policy", {}, "policy: None is not allowed"),
            ("PUT", "/policy", {"policy": "best"}, "policy: 'best' is not allowed"),
            ("PUT", "/policy", {"policy": "atlas", "beta": -1}, "beta = -1.0"),
            ("PUT", "/policy", {"policy": "atlas", "alpha": 1}, "alpha"),
        ):
            status, answer = await operator.ask(method, path, body)
            assert status == 400, (path, body, answer)
            assert message in answer["error"]["message"]
        assert (await operator.ask("DELETE", "/engines/e9"))[0] == 404
        assert engine.fleet.policy_view()["policy"] == "adaptive"
        assert len(engine.fleet.pool.all()) == 1


async def test_stock_engines_switch_by_their_priorities_only(tmp_path: Path):
    """Under ``program`` the gateway may treat all calls alike; there is no scheduler to tell."""
    async with operated(tmp_path, policy="program") as (engine, operator):
        assert (await operator.ask("PUT", "/policy", {"policy": "plas"}))[0] == 400
        assert (await operator.ask("PUT", "/policy", {"policy": "fcfs", "beta": 1}))[0] == 400
        assert (await operator.ask("PUT", "/policy", {"policy": "fcfs"}))[0] == 200
        assert engine.fleet._gateway is not None
        assert engine.fleet._gateway.config.policy == "fcfs"


async def test_the_command_line_asks_the_admin_site(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A line for each engine; an error is one line on standard error and status 2."""
    key = tmp_path / "key"
    key.write_text("operator\n")
    async with operated(tmp_path) as (_, operator):

        async def say(command: Any, *arguments: str) -> tuple[int, str]:
            where = ("--admin-url", operator.url, "--key-file", str(key))
            status = await asyncio.to_thread(command, [*where, *arguments])
            out, err = capsys.readouterr()
            return status, out + err

        assert await say(admin_cli.engines, "list") == (0, "e0       ready           0 calls\n")
        assert await say(admin_cli.engines, "add") == (0, "e1 is starting\n")
        assert await say(admin_cli.engines, "remove", "e1") == (0, "e1 is draining\n")
        status, text = await say(admin_cli.engines, "remove", "e9")
        assert (status, text) == (2, "autellix engines: engine: there is none named 'e9'\n")
        status, text = await say(admin_cli.policy, "atlas", "beta=2.5")
        assert (status, json.loads(text)["beta"]) == (0, 2.5)
        status, text = await say(admin_cli.policy, "atlas", "beta")
        assert (status, text) == (2, "autellix policy: settings: 'beta' is not allowed; "
                                     "allowed is NAME=JSON\n")  # fmt: skip


async def test_an_added_engine_gets_the_gpus_that_a_removed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each engine sees its own by CUDA_VISIBLE_DEVICES; one too many is refused by number."""
    devices: dict[str, str | None] = {}

    def command(spec: EngineSpec, run: EngineRun) -> EngineCommand:
        devices[spec.engine_id] = spec.devices
        return fake_command(spec, run)

    monkeypatch.setattr(fleet, "build_command", command)
    monkeypatch.setattr(fleet, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(fleet, "visible_devices", lambda: ["4", "5", "6"])
    async with operated(tmp_path, replicas=2) as (engine, operator):
        assert (await operator.ask("POST", "/engines", {"local": True}))[0] == 201
        status, answer = await operator.ask("POST", "/engines", {"local": True})
        assert (status, answer["error"]["message"]) == (
            400,
            "replicas: 4 engines of 1 GPUs are not allowed; allowed is what 3 GPUs hold",
        )
        await until(lambda: {"e0", "e1", "e2"} <= devices.keys(), 30)  # they start one by one
        assert (await operator.ask("DELETE", "/engines/e1?drain_s=0"))[0] == 202
        await until(lambda: len(engine.fleet.pool.all()) == 2, 30)
        assert await operator.ask("POST", "/engines", {"local": True}) == (201, {"engine": "e3"})
        await until(lambda: "e3" in devices, 30)
    assert devices == {"e0": "4", "e1": "5", "e2": "6", "e3": "5"}

"""The balancer on the path of real calls: every endpoint takes a ticket and gives it back."""

from __future__ import annotations

import asyncio
import json

import pytest

from autellix.errors import ConfigError
from autellix.server.balancing import EngineBalancer
from autellix.server.channel import CallReport, Heartbeat, Hello
from autellix.server.clock import ManualClock, SystemClock
from autellix.server.gateway.app import CALL_ROUTES
from autellix.server.types import CallInfo

from .conftest import Rig, running


def wire(rig: Rig, rule: str) -> EngineBalancer:
    """Let a rig's gateway place by a rule."""
    balancer = EngineBalancer(rule, SystemClock())
    rig.gateway.place = balancer.place
    rig.gateway.call_over = balancer.call_over
    return balancer


async def send(rig: Rig, path: str, number: int) -> int:
    """Post a call of a program; return the status."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 50}], "prompt": "x"}
    headers = {"X-Autellix-Session": f"s{number % 3}"}
    async with rig.client.post(f"{rig.url}{path}", json=body, headers=headers) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("rule", ["least-loaded", "autellix", "locality", "prefix-tree"])
async def test_every_endpoint_is_counted_and_counted_off(rule: str):
    """One path places them all: as many tickets as calls, none left."""
    async with running(2) as rig:
        balancer = wire(rig, rule)
        for number, path in enumerate(CALL_ROUTES):
            await send(rig, path, number)
            views = balancer.views()
            assert sum(row["placed"] for row in views.values()) == number + 1, path
        await rig.settled()
        assert balancer.faults(rig.table.loads()) == []
        assert all(row["calls"] == 0 for row in balancer.views().values())


async def test_counts_are_right_while_calls_fly_and_0_after_clients_hung_up():
    """Half of the clients hang up in the middle; the table and the tickets agree throughout."""
    async with running(2) as rig:
        balancer = wire(rig, "locality")
        for engine in rig.engines:
            engine.stall_at = 0
        tasks = [
            asyncio.create_task(send(rig, "/v1/chat/completions", number)) for number in range(20)
        ]
        async with asyncio.timeout(5):
            while sum(len(engine.seen) for engine in rig.engines) < 20:
                await asyncio.sleep(0.002)
        assert sum(rig.table.loads().values()) == 20
        assert balancer.faults(rig.table.loads()) == []
        for task in tasks[::2]:
            task.cancel()
        for engine in rig.engines:
            engine.go.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [a for a in answers[1::2] if a != 200] == []
        await rig.settled()
        assert balancer.faults(rig.table.loads()) == []
        assert balancer.leaks == 0


async def test_a_call_that_goes_elsewhere_leaves_no_ticket_behind():
    """The engine that died first has no call left, and neither has the other in the end."""
    async with running(2) as rig:
        balancer = wire(rig, "program-hash")
        rig.engines[0].die_at = -1
        for number in range(6):
            await send(rig, "/v1/completions", number)
        await rig.settled()
        assert balancer.faults(rig.table.loads()) == []
        assert all(row["calls"] == 0 for row in balancer.views().values())


async def test_calls_of_a_program_share_an_engine_and_programs_do_not():
    """What the default rule does on an idle pair of engines."""
    async with running(2) as rig:
        wire(rig, "locality")
        for number in range(12):
            assert await send(rig, "/v1/chat/completions", number) == 200
        homes: dict[str, set[str]] = {}
        for engine in rig.engines:
            for seen in engine.seen:
                homes.setdefault(seen.headers["x-session-id"], set()).add(engine.engine_id)
        assert len(homes) == 3
        assert all(len(engines) == 1 for engines in homes.values())
        assert len(set.union(*homes.values())) == 2


def report(call_id: str, prompt_tokens: int) -> CallReport:
    """Return what an engine says of a call."""
    return CallReport(
        seq=1, call_id=call_id, program_id="p", request_id="r", reason="stop", service_s=1.0,
        wait_s=0.0, preemptions=0, swaps=0, prompt_tokens=prompt_tokens, hit_tokens=0,
        output_tokens=50, level=0,
    )  # fmt: skip


def heartbeat(boot: str, running_calls: int = 0) -> Heartbeat:
    """Return an engine's figures."""
    return Heartbeat(
        boot_id=boot, last_seq=0, step=1, step_age_s=None, longest_step_s=0.1,
        running=running_calls, waiting=0, kv_blocks_free=1, computed_tokens=0,
        recomputed_tokens=0, preemptions=0, level_waiting=(),
    )  # fmt: skip


class OneEngine:
    """An engine that is ready."""

    engine_id = "e0"


def test_the_channel_teaches_lengths_pace_size_and_drift():
    """A report, a heartbeat and a hello; a new start of the engine begins anew."""
    balancer = EngineBalancer("locality", ManualClock())
    body = json.dumps({"prompt": "x" * 980}).encode()
    call = CallInfo("c1", "p", 0, "/v1/completions", "m", len(body), None, None, {}, body)
    assert balancer.place(call, [OneEngine()]).engine_id == "e0"
    hello = Hello(
        version=1, engine_id="e0", boot_id="b1", rank=0, pid=1, vllm_version="0", scheduler="s",
        policy="plas", async_scheduling=False, slots=8, kv_blocks=100, block_tokens=16,
    )  # fmt: skip
    balancer.beat("e0", heartbeat("b1", 1), hello)
    balancer.fold("e0", report("c1", 500))
    balancer.fold("e0", report("c1", 500))  # doubled
    view = balancer.views()["e0"]
    assert (view["slots"], view["kv_tokens"], view["calls"]) == (8, 1600, 1)
    assert view["pace_s"] == pytest.approx(0.02)
    assert balancer.drift() == {"e0": 0}
    balancer.call_over("c1")
    balancer.beat("e0", heartbeat("b2"), hello)
    assert balancer.views()["e0"]["pace_s"] is None
    assert balancer.drift() == {"e0": 0}
    balancer.forget_programs(["p"])
    balancer.forget_engine("e0")
    assert balancer.views() == {}


def test_a_rule_that_is_none_is_refused():
    """As a setting, with what is allowed."""
    with pytest.raises(ConfigError, match="balancer: 'closest' is not allowed; allowed is one of"):
        EngineBalancer("closest", ManualClock())

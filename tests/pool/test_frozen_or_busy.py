"""A frozen engine is ejected in less than 30 s, and a busy one never."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from autellix.server import MultiEngine
from autellix.server.config import PoolConfig
from autellix.server.pool import guard
from autellix.server.server_config import ServerConfig
from autellix.server.types import EngineState
from tests.gateway.conftest import until
from tests.pool.clean import check_clean
from tests.pool.fake_fleet import fake_engines as fake_engines

pytestmark = pytest.mark.usefixtures("fake_engines")
LIMIT_S = 30.0


def states_of(engine: MultiEngine, index: int = 0) -> list[EngineState]:
    """Return a list that grows with every change of an engine's state from now on."""
    member = engine.fleet.pool.all()[index]
    seen: list[EngineState] = []
    noted = member.on_state

    def note(changed: object) -> None:
        seen.append(member.state)
        noted(changed)

    member.on_state = note
    return seen


async def test_a_saturated_engine_is_not_taken_for_a_frozen_one(monkeypatch: pytest.MonkeyPatch):
    """Its front end answers a probe after half a second of other work at best, for eight seconds.

    The pool's times are a fifth of production's, so that this is longer than twice its limits.
    """
    monkeypatch.setitem(os.environ, "FAKE_BUSY_S", "0.005")
    pool = PoolConfig(
        probe_period_s=0.2, probe_deadline_s=2.0, frozen_floor_s=3.0, frozen_cap_s=5.0
    )
    async with MultiEngine("m", config=ServerConfig(pool=pool)) as engine:
        seen = states_of(engine)
        calls = [engine.generate("x", {"max_tokens": 100_000}) for _ in range(100)]
        await until(lambda: engine.fleet.table.in_flight == 100, 30)
        await asyncio.sleep(8)
        assert seen == [], "it was ready all the time"
        assert sum(len(call.output.token_ids) for call in calls) > 100
        for call in calls:
            call.cancel()
        await check_clean(engine)
        assert engine.fleet.pool.all()[0].state is EngineState.READY


@pytest.mark.parametrize("has_calls", [True, False])
@pytest.mark.heavy
async def test_a_stopped_engine_is_out_in_thirty_seconds(has_calls: bool):
    """SIGSTOP under the times of production, with calls under way and without; then SIGCONT."""
    async with MultiEngine("m", replicas=2) as engine:
        members = engine.fleet.pool.all()
        await until(lambda: all(m.state is EngineState.READY for m in members), 60)
        seen = states_of(engine)
        long = {"max_tokens": 100_000}
        calls = [engine.generate("x", long) for _ in range(20)] if has_calls else []
        if has_calls:
            await until(lambda: engine.fleet.table.loads().get("e0", 0) > 0, 20)
        session = members[0].session
        pids = guard.engine_pids(session, "-")
        began_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: EngineState.FROZEN in seen, 60)
        took_s = time.monotonic() - began_s
        assert took_s < LIMIT_S
        later = await asyncio.gather(
            *(engine.generate("x", {"max_tokens": 2}, session=f"s{n}") for n in range(10))
        )
        assert {output.text for output in later} == {"0 1 "}, "nothing new goes to it"
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: members[0].state is EngineState.READY, 30)
        for call in calls:
            call.cancel()
        await check_clean(engine)

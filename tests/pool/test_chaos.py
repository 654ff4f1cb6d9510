"""Kills, freezes, slow starts and aborts at random: nothing leaks and everybody is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from autellix.server import MultiEngine
from autellix.server.types import EngineState
from tests.gateway.conftest import until
from tests.pool.chaos import Tally, rage, squeezed
from tests.pool.clean import check_clean, open_sessions
from tests.pool.fake_fleet import fake_engines as fake_engines


async def settle(engine: MultiEngine, tally: Tally) -> None:
    """Check what must be so after chaos, while the engines that are left live on."""
    assert tally.forgotten == []
    assert tally.wrong == []
    fleet = engine.fleet
    await until(lambda: any(e.state is EngineState.READY for e in fleet.pool.all()), 240)
    await check_clean(engine, settle_s=90)
    await until(lambda: not open_sessions(engine), 90)  # by its owner, or its lease


async def chaos(seed: int, *, minutes: float, squeeze: float, replicas: int = 4) -> Tally:
    """Run so many minutes' worth of chaos on fake engines."""
    async with MultiEngine("m", replicas=replicas, config=squeezed(squeeze)) as engine:
        tally = await rage(
            engine, seed, clients=24, duration_s=minutes * 60 / squeeze, squeeze=squeeze
        )
        await settle(engine, tally)
    return tally


@pytest.mark.usefixtures("fake_engines")
async def test_three_minutes_worth_of_chaos_leave_nothing():
    """Twenty times as fast; every answer is whole, every error has been told."""
    tally = await chaos(1, minutes=3, squeeze=20)
    assert tally.outcomes["answered"] > 20
    assert sum(tally.faults.values()) > 3


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("fake_engines")
async def test_thirty_minutes_worth_of_chaos_leave_nothing():
    """Ten times as fast, so three minutes."""
    tally = await chaos(2, minutes=30, squeeze=10)
    print(tally)  # noqa: T201 - for the dated result in docs/reliability.md
    assert tally.outcomes["answered"] > 200
    assert len(tally.faults) >= 5


@pytest.mark.heavy
@pytest.mark.live
@pytest.mark.timeout(1200)
async def test_chaos_on_real_engines_leaves_nothing(tiny_model: Path):
    """Two real vLLM engines on the CPU, killed and frozen under their calls, twice as fast."""
    vllm_args = ("--max-num-seqs", "8", "--max-model-len", "512")
    config = squeezed(2)
    async with MultiEngine(
        str(tiny_model), replicas=2, config=config, vllm_args=vllm_args
    ) as engine:
        await until(lambda: all(e.state is EngineState.READY for e in engine.fleet.pool.all()), 300)
        tally = await rage(engine, 3, clients=8, duration_s=90, squeeze=2)
        print(tally)  # noqa: T201 - for the dated result in docs/reliability.md
        await settle(engine, tally)
    assert tally.outcomes["answered"] > 20
    assert sum(tally.faults.values()) >= 3

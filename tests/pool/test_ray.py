"""Engines on a Ray cluster of two nodes on this machine: placed, killed, started again, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from autellix.errors import ConfigError
from autellix.server import MultiEngine
from autellix.server.config import PoolConfig, ServeConfig
from autellix.server.pool import ray as ray_engines
from autellix.server.server_config import ServerConfig
from autellix.server.types import EngineState
from tests.gateway.conftest import until
from tests.pool.clean import check_clean
from tests.pool.fake_fleet import fake_engines as fake_engines

ROOT = Path(__file__).parents[2]
START_S = 240.0


def config_of(address: str, **pool: Any) -> ServerConfig:
    """Return settings for engines on a cluster."""
    times = {"backoff_s_min": 0.1, "stop_grace_s": 2.0, "probe_period_s": 0.2, **pool}
    return ServerConfig(
        serve=ServeConfig(launcher="ray"),
        pool=PoolConfig(ray_address=address, ray_cpus=1.0, **times),
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each, so that two engines cannot be on the same one."""
    utils = pytest.importorskip("ray.cluster_utils")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # The nodes' processes import what the tests do.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.add_node(**node)
        yield made
    finally:
        ray_engines.leave_cluster()
        made.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@asynccontextmanager
async def on_cluster(cluster: Any, model: str, replicas: int) -> AsyncIterator[MultiEngine]:
    """Run engines on the cluster until all are ready."""
    config = config_of(cluster.address)
    async with MultiEngine(model, replicas=replicas, config=config) as engine:
        members = engine.fleet.pool.all()
        await until(lambda: all(m.state is EngineState.READY for m in members), START_S)
        yield engine


def processes_of(engine_id: str) -> list[int]:
    """Return the processes of one engine, wherever they are on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            mark = f"AUTELLIX_ENGINE_ID={engine_id}".encode()
            if mark in environment and state not in "ZX":
                found.append(int(entry.name))
    return found


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fake_engines")
async def test_ray_places_engines_starts_them_again_and_nothing_is_left(cluster: Any):
    """One on each node; a killed engine and a killed actor come back; mixed with a local one."""
    async with on_cluster(cluster, "m", 2) as engine:
        first, second = engine.fleet.pool.all()
        assert first.node_id != second.node_id
        channel = engine.fleet._channel
        await until(lambda: set(channel.peers()) == {"ray0", "ray1"}, 30)
        assert engine.fleet.add_local() == "e2"
        calls = [engine.generate("x", {"max_tokens": 20}, session=f"s{n}") for n in range(40)]
        outputs = await asyncio.gather(*calls)
        assert {len(output.token_ids) for output in outputs} == {20}
        assert {p.calls_reported for p in engine.fleet.table.programs()} <= {0, 1}
        await check_clean(engine)

        starts = first.starts
        os.kill(processes_of("ray0")[0], signal.SIGKILL)
        await until(lambda: first.starts > starts and first.state is EngineState.READY, START_S)
        starts = first.starts
        import ray

        ray.kill(first._actor, no_restart=False)
        await until(lambda: first.starts > starts and first.state is EngineState.READY, START_S)
        assert (await engine.generate("x", {"max_tokens": 3})).text == "0 1 2 "
        await check_clean(engine)
    await until(lambda: not processes_of("ray0") and not processes_of("ray1"), 30)


@pytest.mark.heavy
@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_a_real_engine_on_the_cluster_answers_and_reports(cluster: Any, tiny_model: Path):
    """Over TCP with its key, our scheduler in it, its channel encrypted."""
    from vllm import SamplingParams

    async with on_cluster(cluster, str(tiny_model), 1) as engine:
        output = await engine.generate("Hello", SamplingParams(max_tokens=8), session="s")
        assert len(output.token_ids) == 8
        (program,) = engine.fleet.table.programs()
        await until(lambda: program.calls_reported == 1, 20)
        assert program.account.service_s > 0
        await check_clean(engine)
    await until(lambda: not processes_of("ray0"), 30)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
async def test_a_cluster_that_is_not_there_is_named():
    """Before any engine starts."""
    pytest.importorskip("ray")
    config = config_of("no-such-host:1")
    with pytest.raises(ConfigError, match="ray_address: 'no-such-host:1'"):
        async with MultiEngine("smollm2", config=config):
            pass


@pytest.mark.usefixtures("fake_engines")
async def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """The rest of the server needs no ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"launcher: ray is not installed here"):
        async with MultiEngine("m", config=config_of("auto")):
            pass

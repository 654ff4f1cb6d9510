"""Several gateways with one table, by way of a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from autellix.errors import ConfigError
from autellix.server.gateway.shared import SharedState
from autellix.server.gateway.state import GATEWAY
from autellix.server.process_table import program_id_of
from autellix.server.program import Program, ProgramState
from tests.redis_server import RedisServer, redis_server

from .conftest import Rig, running, until
from .fake_engine import FakeEngine, fake_engines

API = "/autellix/v1/sessions"
RUN = {"X-Autellix-Session": "run-1"}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """An empty Redis."""
    with redis_server() as server:
        yield server


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[FakeEngine]]:
    """Two engines that every gateway can reach."""
    async with fake_engines(tmp_path, 2, tcp=True) as made:
        yield made


@pytest.fixture
async def two(redis: RedisServer, engines: list[FakeEngine]) -> AsyncIterator[tuple[Rig, Rig]]:
    """Two gateways with one table."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(running(engines=engines, state=redis.url))
            for _ in range(2)
        ]
        yield first, second


def program_of(rig: Rig, session: str = "run-1") -> Program | None:
    """Return a program as one gateway knows it."""
    return rig.table.get(program_id_of("", session))


def service_s(rig: Rig, session: str = "run-1") -> float:
    """Return its service there."""
    program = program_of(rig, session)
    return program.account.service_s if program is not None else 0.0


async def call_for(rig: Rig, engine: FakeEngine, seconds: float, session: str = "run-1") -> None:
    """Make a call that takes some time."""
    before = engine.stall_at
    engine.go.clear()
    engine.arrived.clear()
    engine.stall_at = 0
    call = asyncio.create_task(rig.chat({"X-Autellix-Session": session}))
    await engine.arrived.wait()
    asyncio.get_running_loop().call_later(seconds, engine.go.set)
    status, _, _ = await call
    assert status == 200
    engine.stall_at = before


async def test_the_same_program_from_two_gateways_has_the_service_of_both(two, engines):
    """Both know the sum, within a second, and send it to engines as the priority."""
    first, second = two
    engines[1].state = engines[1].state.__class__.DRAINING
    await call_for(first, engines[0], 0.3)
    await until(lambda: service_s(second) == pytest.approx(service_s(first)), 2.0)
    assert service_s(second) > 0.29
    await call_for(second, engines[0], 0.2)
    assert int(engines[0].seen[-1].headers["x-vllm-priority"]) >= 290
    await until(lambda: service_s(first) == pytest.approx(service_s(second)), 2.0)
    assert service_s(first) > 0.49
    program = program_of(first)
    assert program is not None
    assert (program.calls_begun, program.calls_ended, program.home) == (2, 2, "e0")
    for rig in two:
        await rig.settled()


async def test_both_at_once_lose_nothing(two, engines):
    """Many calls of one program by way of both, side by side: the sum is the sum."""
    first, second = two

    async def some(rig: Rig) -> None:
        for _ in range(40):
            await rig.chat(RUN)

    await asyncio.gather(*(some(rig) for rig in two for _ in range(3)))
    own = [program_of(rig).account.sum.own_s for rig in two]  # type: ignore[union-attr]
    assert min(own) > 0
    await until(
        lambda: service_s(first) == pytest.approx(sum(own)) == pytest.approx(service_s(second)), 3.0
    )
    assert all(program_of(rig).calls_ended == 240 for rig in two)  # type: ignore[union-attr]


async def test_a_session_opened_here_is_open_and_ended_there(two):
    """Names, leases and ends travel; a heartbeat to either one is enough."""
    first, second = two
    url = f"{first.url}{API}/run-1"
    async with first.client.put(url, json={"name": "planner"}) as response:
        assert response.status == 200
    await until(lambda: program_of(second) is not None, 2.0)
    beat = f"{second.url}{API}/heartbeat"
    async with second.client.post(beat, json={"ids": ["run-1"]}) as response:
        assert (await response.json())["unknown"] == []
    there = program_of(second)
    here = program_of(first)
    assert there is not None
    assert here is not None
    assert there.name == "planner"
    await until(lambda: abs(here.lease_until_s - there.lease_until_s) < 0.01, 2.0)
    async with second.client.delete(f"{second.url}{API}/run-1") as response:
        assert response.status == 204
    await until(lambda: here.state(time.monotonic()) is ProgramState.ENDED, 2.0)
    await until(lambda: bool(first.forgotten), 3.0)
    async with first.client.put(url, json={}) as response:
        assert (await response.json())["state"] != "ended"
    await until(lambda: there.ended_s is None, 2.0)


async def test_a_call_in_flight_elsewhere_keeps_the_lease(redis: RedisServer, engines):
    """The other gateway does not take a program for dead that is at work."""
    async with (
        running(engines=engines, state=redis.url, lease_s=1.0) as first,
        running(engines=engines, state=redis.url, lease_s=1.0) as second,
    ):
        call = asyncio.create_task(call_for(first, engines[0], 2.5))
        await until(lambda: program_of(second) is not None, 2.0)
        await call
        assert not program_of(second).expired  # type: ignore[union-attr]
        await until(lambda: program_of(second).expired, 6.0)  # type: ignore[union-attr]


async def test_a_stored_response_is_found_by_way_of_the_other_gateway(two):
    """Its engine is known there within a second."""
    first, second = two
    body = {"model": "m", "input": "hi"}
    async with first.client.post(f"{first.url}/v1/responses", json=body) as response:
        assert response.status == 200
    engine = next(e for e in first.engines if e.seen)
    response_id = engine.seen[-1].body["request_id"]
    homes = second.app[GATEWAY].homes
    await until(lambda: homes.get(response_id, "") is not None, 2.0)
    async with second.client.get(f"{second.url}/v1/responses/{response_id}") as response:
        assert response.status == 200
    assert engine.seen[-1].path == f"/v1/responses/{response_id}"


async def test_what_a_dead_gateway_has_charged_stays(redis: RedisServer, engines):
    """A gateway that starts later knows it, threads and home included."""
    async with running(engines=engines, state=redis.url) as rig:
        await rig.chat({**RUN, "X-Autellix-Thread": "3", "X-Autellix-Parent": "0:1"})
        before_s = service_s(rig)
    async with running(engines=engines, state=redis.url) as rig:
        program = program_of(rig)
        assert program is not None
        assert program.account.service_s == pytest.approx(before_s)
        assert program.threads[3].parent == (0, 1)
        assert rig.table.check_integrity() == []


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_without_redis_each_goes_on_alone_and_later_all_is_put_right(
    two, redis, engines, how
):
    """Calls are served all the time; a Redis that lost its memory is told again; it is counted."""
    first, second = two
    await first.chat(RUN)
    await until(lambda: service_s(second) > 0, 2.0)
    redis.stop() if how == "killed" else redis.freeze()
    for rig in two:
        for _ in range(3):
            assert (await rig.chat(RUN))[0] == 200
    await until(lambda: all(r.app[GATEWAY].counts.get("shared state away") for r in two), 8.0)
    own = [program_of(rig).account.sum.own_s for rig in two]  # type: ignore[union-attr]
    redis.start() if how == "killed" else redis.thaw()
    await until(
        lambda: service_s(first) == pytest.approx(sum(own)) == pytest.approx(service_s(second)), 8.0
    )
    for rig in two:
        await rig.settled()


async def test_a_gateway_starts_without_redis(engines, tmp_path: Path):
    """It says so, and goes on alone."""
    async with running(engines=engines, state=f"unix://{tmp_path}/none.sock") as rig:
        assert (await rig.chat(RUN))[0] == 200
        assert rig.app[GATEWAY].counts["shared state away"] >= 1
    with pytest.raises(ConfigError, match=r"state: "):
        async with running(engines=engines, state="redis://host:port"):
            pass


async def test_the_longest_path_is_shared_under_atlas(redis: RedisServer, engines):
    """Paths are not added up."""
    async with (
        running(engines=engines, state=redis.url, accounting="atlas") as first,
        running(engines=engines, state=redis.url, accounting="atlas") as second,
    ):
        await call_for(first, engines[0], 0.2)
        await until(lambda: service_s(second) > 0.19, 2.0)
        assert service_s(second) == pytest.approx(service_s(first))


async def test_both_measures_are_shared(two, engines):
    """Each gateway may be switched to the other policy at any time."""
    first, second = two
    engines[0].stall_at = engines[1].stall_at = 0
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(first.chat(RUN))
        await until(lambda: len(engines[0].seen) + len(engines[1].seen) == 3)
        await asyncio.sleep(0.2)  # that is what they take
        for engine in engines:
            engine.go.set()
    assert service_s(first) > 0.6
    await until(lambda: service_s(second) == pytest.approx(service_s(first)), 2.0)
    for rig in two:
        rig.table.accounting = "atlas"
    assert 0.2 < service_s(first) < 0.4
    assert service_s(second) == pytest.approx(service_s(first))


async def test_calls_in_flight_on_two_gateways_do_not_raise_each_other(redis: RedisServer, engines):
    """Each hears of the other one's call many times, and no path is longer than they took."""
    async with (
        running(engines=engines, accounting="atlas") as first,
        running(engines=engines, accounting="atlas") as second,
    ):
        ends = [SharedState(redis.url, rig.gateway) for rig in (first, second)]
        engines[0].stall_at = engines[1].stall_at = 0
        begun_s = time.monotonic()
        calls = [asyncio.create_task(rig.chat(RUN)) for rig in (first, second)]
        await until(lambda: len(engines[0].seen) + len(engines[1].seen) == 2)
        for _ in range(20):
            for end in ends:
                await end.flush()
        for engine in engines:
            engine.go.set()
        await asyncio.gather(*calls)
        for rig in (first, second):
            await rig.settled()
        taken_s = time.monotonic() - begun_s
        for end in (*ends, *ends):
            await end.flush()
        assert 0 < service_s(first) == service_s(second) < taken_s
        for end in ends:
            await end.close()


async def test_a_call_does_not_come_after_one_that_runs_at_another_gateway(
    redis: RedisServer, engines
):
    """What has ended there is before it, what runs there is beside it."""
    async with (
        running(engines=engines, accounting="atlas") as first,
        running(engines=engines, accounting="atlas") as second,
    ):
        ends = [SharedState(redis.url, rig.gateway) for rig in (first, second)]
        engine, other = engines
        other.state = other.state.__class__.DRAINING
        await first.chat(RUN)
        ended_s = service_s(first)
        engine.stall_at = 0
        long = asyncio.create_task(first.chat(RUN))
        await until(lambda: len(engine.seen) == 2)
        await asyncio.sleep(0.3)  # that long it runs already
        for end in ends:
            await end.flush()
        assert service_s(second) > 0.29
        engine.stall_at, begun_s = None, time.monotonic()
        await second.chat(RUN)
        taken_s = time.monotonic() - begun_s
        program = program_of(second)
        assert program is not None
        assert program.account.path.own().service_s <= ended_s + taken_s
        engine.go.set()
        await long
        for end in ends:
            await end.close()


async def test_a_gateway_that_has_forgotten_a_program_learns_its_own_share_again(
    redis: RedisServer, engines
):
    """Also if it begins it anew before anybody tells."""
    async with running(engines=engines) as first, running(engines=engines) as second:
        here, there = ends = [SharedState(redis.url, rig.gateway) for rig in (first, second)]
        for rig in (first, second):
            await rig.chat(RUN)
        for end in (*ends, *ends):
            await end.flush()
        known = program_of(first)
        assert known is not None
        figures = (known.account.sum.own_s, known.account.service_s, known.calls_begun)
        assert figures[2] == 2
        first.table._drop(known)  # as if the table was full
        await second.chat(RUN)
        for end in (there, here):
            await end.flush()
        again = program_of(first)
        assert again is not None
        assert again is not known
        assert again.account.sum.own_s == figures[0]
        assert again.account.service_s > figures[1]
        assert (again.calls_begun, again.calls_ended) == (3, 3)
        first.table._drop(again)
        await first.chat(RUN)
        for end in ends:
            await end.flush()
        for rig in (first, second):
            program = program_of(rig)
            assert program is not None
            assert (program.calls_begun, program.calls_ended) == (4, 4)
            assert program.account.service_s > figures[1]
        assert service_s(first) == pytest.approx(service_s(second))
        for end in ends:
            await end.close()


@pytest.mark.parametrize(("accounting", "path_s"), [("atlas", 7.0), ("plas", 2.0)])
async def test_a_gateway_of_the_version_before_is_understood(
    redis: RedisServer, engines, accounting, path_s
):
    """It wrote the measure of its policy, a path under atlas, where sums are now."""
    import redis.asyncio as client

    async with running(engines=engines, accounting=accounting) as rig:
        end = SharedState(redis.url, rig.gateway)
        await rig.chat(RUN)
        await end.flush()
        item = f"p{program_id_of('', 'run-1')}"
        async with client.Redis.from_url(redis.url) as connection:
            figures = {"s:old": 7.0, "s:new": 9.0, "p:new": 2.0}
            await connection.hset(f"autellix:1:{item}", mapping=figures)
            place = await connection.incr("autellix:1:clock")
            await connection.zadd("autellix:1:index", {item: place})
        await end.flush()
        program = program_of(rig)
        assert program is not None
        assert program.account.sum.elsewhere_s == 16.0
        assert program.account.path.longest().service_s == path_s
        await end.close()


async def test_garbage_in_redis_is_counted_and_skipped(two, redis: RedisServer):
    """Another program wrote there."""
    import redis.asyncio as client

    first, _ = two
    async with client.Redis.from_url(redis.url) as connection:
        await connection.hset("autellix:1:pbad", mapping={"scope": "", "lease": "never"})
        await connection.set("autellix:1:rbad", "[1")
        await connection.zadd("autellix:1:index", {"pbad": 10**6, "rbad": 10**6})
        await connection.set("autellix:1:clock", 10**6)
    await until(lambda: first.app[GATEWAY].counts.get("shared state malformed", 0) >= 2, 3.0)
    assert (await first.chat(RUN))[0] == 200

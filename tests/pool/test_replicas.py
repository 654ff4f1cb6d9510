"""The pool runs every life, tells when none is left, and takes in engines run elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from autellix.errors import ConfigError
from autellix.server.clock import SystemClock
from autellix.server.pool.progress import ProgressLimits
from autellix.server.pool.remote import RemoteEngine, parse_engine_url
from autellix.server.pool.replicas import Pool
from autellix.server.pool.restarts import EngineFailedError
from autellix.server.pool.vitals import Vitals
from autellix.server.types import EngineAddress, EngineState
from tests.pool.small_http import small_http


class FakeEngine:
    """An engine whose life the test leads."""

    api_key = None
    address = EngineAddress("/nowhere", "", 0)

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.state = EngineState.STARTING
        self.on_state: Callable[[Any], None] = lambda _engine: None
        self.looks = 0
        self.fate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def enter(self, state: EngineState) -> None:
        """Change the state as an engine does."""
        self.state = state
        self.on_state(self)

    def look_now(self) -> None:
        self.looks += 1

    def drain(self) -> None:
        self.enter(EngineState.DRAINING)

    def stop(self) -> None:
        if not self.fate.done():
            self.fate.set_result(None)

    async def run(self) -> None:
        await self.fate


async def test_the_pool_fails_when_its_last_engine_is_given_up():
    """One engine is enough to go on."""
    pool = Pool()
    first, second = FakeEngine("e0"), FakeEngine("e1")
    pool.start([first, second])
    failed = asyncio.create_task(pool.failed())
    first.fate.set_exception(EngineFailedError("engine e0: worn out\nlast words"))
    await asyncio.sleep(0.01)
    assert not failed.done()
    second.fate.set_exception(EngineFailedError("engine e1: broken"))
    assert await failed == "engine e0: worn out; engine e1: broken"
    await pool.stop()


async def test_a_bug_in_an_engines_life_is_not_silence():
    """Whatever ends a life ends the waiting too."""
    pool = Pool()
    engine = FakeEngine("e0")
    pool.start([engine])
    engine.fate.set_exception(ZeroDivisionError())
    assert "ZeroDivisionError" in await pool.failed()


async def test_ready_drain_and_stop():
    """The pool passes on what concerns all engines."""
    pool = Pool()
    engine = FakeEngine("e0")
    pool.start([engine])
    ready = asyncio.create_task(pool.first_ready())
    await asyncio.sleep(0)
    assert not ready.done()
    engine.enter(EngineState.READY)
    await ready
    pool.note_failure("e0")
    pool.note_failure("unknown")
    assert engine.looks == 1
    pool.drain()
    assert engine.state is EngineState.DRAINING
    await pool.stop()


async def test_engines_come_and_go_at_run_time():
    """An id is taken once; a removed engine's life is over."""
    pool = Pool()
    engine = FakeEngine("e0")
    pool.add(engine)
    with pytest.raises(ValueError, match="already"):
        pool.add(FakeEngine("e0"))
    await pool.remove("e0")
    assert not pool.all()
    assert engine.fate.done()
    with pytest.raises(KeyError):
        await pool.remove("e0")


async def test_a_remote_engine_is_followed_up_and_down():
    """STARTING until it answers, FROZEN when it is gone, READY when it is back."""
    clock = SystemClock()
    vitals = Vitals(
        ProgressLimits(floor_s=0.2, cap_s=0.2),
        clock,
        period_s=0.02,
        deadline_s=0.05,
        pulse=lambda: None,
        in_flight=lambda: 0,
    )
    states: asyncio.Queue[EngineState] = asyncio.Queue()
    async with small_http(lambda _path, _body: b"") as address:
        engine = RemoteEngine("r0", address, None, vitals)
        engine.on_state = lambda engine: states.put_nowait(engine.state)
        assert engine.state is EngineState.STARTING
        life = asyncio.create_task(engine.run())
        assert await states.get() is EngineState.READY
    assert await states.get() is EngineState.FROZEN
    async with small_http(lambda _path, _body: b"", address.port):
        assert await states.get() is EngineState.READY
        engine.stop()
        await life
    assert engine.state is EngineState.DEAD


def test_an_engine_url_is_host_and_port():
    """What is no plain http address is refused with what is allowed."""
    assert parse_engine_url("http://[::1]:8001/") == EngineAddress(None, "::1", 8001)
    assert parse_engine_url("http://host") == EngineAddress(None, "host", 80)
    for bad in ("https://host:1", "host:1", "http://host:1/v1", "http://", "http://h:x"):
        with pytest.raises(ConfigError, match="allowed is http://HOST:PORT"):
            parse_engine_url(bad)

"""The pulse of an engine is taken from its channel, or from its metrics, and by a call in doubt."""

from __future__ import annotations

import pytest

from autellix.server.clock import ManualClock
from autellix.server.pool.probe import ask
from autellix.server.pool.progress import ProgressLimits
from autellix.server.pool.vitals import Pulse, Vitals
from autellix.server.types import EngineAddress
from tests.pool.small_http import small_http

METRICS = b"vllm:iteration_tokens_total_count 5\nvllm:num_requests_running %d\n"


class Engine:
    """What a stock engine answers, and what it was asked."""

    def __init__(self, *, running: int = 0, answers_calls: bool = True) -> None:
        self.running = running
        self.answers_calls = answers_calls
        self.calls = 0

    def __call__(self, path: str, body: bytes) -> bytes | None:
        """Answer one request."""
        if path == "/metrics":
            return METRICS % self.running
        if path == "/v1/models":
            return b'{"data": [{"id": "tiny"}]}'
        if path == "/v1/completions":
            self.calls += 1
            return b"{}" if self.answers_calls else None
        return b""


async def look_for(
    engine: Engine, seconds: int, *, pulse: Pulse | None = None, in_flight: int = 0
) -> str | None:
    """Look once a (virtual) second; return the first verdict."""
    clock = ManualClock()
    vitals = Vitals(
        ProgressLimits(),
        clock,
        period_s=0.0001,
        deadline_s=0.1,
        pulse=lambda: pulse,
        in_flight=lambda: in_flight,
    )
    async with small_http(engine) as address:
        vitals.begin()
        for _ in range(seconds):
            if (reason := await vitals.look(address, "key")) is not None:
                return reason
            clock.advance(1)
    return None


async def test_an_idle_engine_is_well():
    """Nothing runs, nothing steps, and nobody minds."""
    engine = Engine()
    assert await look_for(engine, 20) is None
    assert engine.calls == 0


async def test_a_stock_engine_whose_steps_stand_still_is_frozen():
    """Its metrics say that a call runs, and the same step count again and again."""
    reason = await look_for(Engine(running=1), 20)
    assert reason is not None
    assert "engine step" in reason


async def test_a_client_slow_to_read_makes_no_engine_frozen():
    """The gateway still has a call, the engine is idle: one token is asked for, and comes."""
    engine = Engine()
    assert await look_for(engine, 20, in_flight=1) is None
    assert engine.calls > 0


async def test_an_idle_engine_core_that_was_stopped_is_found():
    """The gateway has a call, the engine shows none, and answers no other call either."""
    reason = await look_for(Engine(answers_calls=False), 20, in_flight=1)
    assert reason is not None
    assert "engine step" in reason


async def test_the_channels_figures_are_used_where_there_is_a_channel():
    """A step counter that stands still, with calls waiting."""
    still = Pulse(7, is_busy=True, age_s=0.1, longest_step_s=0.1, long_step_expected=False)
    assert await look_for(Engine(), 20, pulse=still) is not None
    assert await look_for(Engine(running=1), 20, pulse=still._replace(is_busy=False)) is None


async def test_a_channel_that_fell_silent_is_a_sign():
    """An engine core that is stopped sends no more heartbeats, idle or not."""
    silent = Pulse(7, is_busy=False, age_s=9, longest_step_s=0.1, long_step_expected=False)
    assert await look_for(Engine(), 20, pulse=silent) is not None


async def test_a_probe_has_a_deadline_and_survives_nonsense():
    """Silence, an answer that is no HTTP, and nobody there are all no answer."""
    async with small_http(lambda _path, _body: None) as address:
        assert await ask(address, "/", api_key=None, deadline_s=0.05) is None
    assert await ask(address, "/", api_key=None, deadline_s=1) is None
    nowhere = EngineAddress("/nonexistent/socket", "", 0)
    assert await ask(nowhere, "/", api_key=None, deadline_s=1) is None


@pytest.mark.parametrize("what", ["grows", "stands still", "clients hang up"])
async def test_a_front_end_that_sends_is_alive_though_it_answers_no_probe(what: str):
    """Bytes of a call count; that calls end, since their clients give up, does not."""
    clock = ManualClock()
    heard = {f"call {n}": 100 for n in range(40)}
    vitals = Vitals(
        ProgressLimits(),
        clock,
        period_s=0.0001,
        deadline_s=0.02,
        pulse=lambda: Pulse(clock.now_s(), True, 0.0, 0.1, False),
        in_flight=lambda: 1,
        heard=lambda: dict(heard),
    )
    reasons = []
    async with small_http(lambda path, body: None) as address:
        vitals.begin()
        for second in range(20):
            reasons.append(await vitals.look(address, "key"))
            clock.advance(1)
            if what == "grows":
                heard["call 0"] += 1
            elif what == "clients hang up":
                del heard[f"call {second}"]
    assert (set(reasons) == {None}) == (what == "grows")
    assert reasons[-1] is None or "health probe" in reasons[-1]

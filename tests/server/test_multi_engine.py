"""The Python API: calls that never block, answers in pieces, programs run to their end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any

import pytest

import autellix
from autellix.errors import ConfigError
from autellix.server import CallError, MultiEngine, TooManyCallsError, run_on
from autellix.server.gateway.config import GatewayConfig
from autellix.server.server_config import ServerConfig
from autellix.server.types import EngineState
from tests.gateway.conftest import until
from tests.pool.fake_fleet import fake_engines as fake_engines

pytestmark = pytest.mark.usefixtures("fake_engines")
TEN = {"max_tokens": 10}


async def check_clean(engine: MultiEngine) -> None:
    """Fail unless every counter is back at nought."""
    table = engine.fleet.table
    # a call ends after its last byte, which the client may have read by then
    await until(lambda: table.in_flight == 0)
    assert table.loads() == {}
    assert table.check_integrity() == []
    assert engine.fleet.balancer.faults(table.loads()) == []
    assert engine.fleet.balancer.leaks == 0
    assert engine.calls_under_way == 0


async def test_a_call_is_awaited_iterated_or_both():
    """Outputs grow; the whole is there for everybody who asks."""
    async with MultiEngine("m") as engine:
        call = engine.generate("hello", TEN)
        seen = [output async for output in call]
        texts = [output.text for output in seen]
        assert texts[-1] == "".join(f"{n} " for n in range(10))
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert seen[-1].finished
        assert not seen[0].finished
        whole = await call
        assert whole.token_ids == list(range(10))
        assert whole.prompt_token_ids == [1, 2, 3]
        assert whole.outputs[0].finish_reason == "length"
        chat = await engine.chat([{"role": "user", "content": "hi"}], {**TEN, "n": 2})
        assert [part.text for part in chat.outputs] == [texts[-1]] * 2
        await check_clean(engine)


async def test_sampling_parameters_are_vllms():
    """Deltas hold what is new, a final output comes at once, what cannot be sent is refused."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind as Kind

    async with MultiEngine("m") as engine:
        deltas = SamplingParams(max_tokens=5, output_kind=Kind.DELTA)
        parts = [output.text async for output in engine.generate([5, 6], deltas)]
        assert len(parts) > 1
        assert "".join(parts) == "0 1 2 3 4 "
        final = SamplingParams(max_tokens=5, output_kind=Kind.FINAL_ONLY)
        (only,) = [output async for output in engine.generate("x", final)]
        assert (only.text, only.usage["completion_tokens"]) == ("0 1 2 3 4 ", 5)
        with pytest.raises(ConfigError, match=r"sampling_params.detokenize: False is not allowed"):
            engine.generate("x", SamplingParams(detokenize=False))


async def test_sessions_are_arguments():
    """A name, a session of the SDK, or the one around; without any a call is its own program."""
    async with MultiEngine("m") as engine:
        await engine.generate("a", TEN, session="run-1")
        await engine.generate("b", TEN, session="run-1", thread=1)
        with autellix.session("mine") as session:
            await engine.generate("c", TEN)
        await engine.generate("d", TEN, session=session)
        await engine.generate("e", TEN)
        programs = {p.session: p for p in engine.fleet.table.programs()}
        assert programs["run-1"].calls_begun == 2
        assert sorted(programs["run-1"].threads) == [0, 1]
        assert programs[session.id].calls_begun == 2
        assert programs[None].calls_begun == 1
        await engine.end_session("run-1")
        assert programs["run-1"].end_reason is not None
        with pytest.raises(ConfigError, match="session: 'a b' is not allowed"):
            engine.generate("x", session="a b")
        await check_clean(engine)


async def test_thousands_in_flight_block_nobody(monkeypatch: pytest.MonkeyPatch):
    """All are begun before one is answered; one more than the bound is refused."""
    monkeypatch.setitem(os.environ, "FAKE_STEP_S", "0.05")
    count = 1000
    async with MultiEngine("m", replicas=2, calls_max=count, in_flight_max=500) as engine:
        calls = [engine.generate("x", {"max_tokens": 3}) for _ in range(count)]
        assert not any(call.done for call in calls)
        with pytest.raises(TooManyCallsError, match=f"calls_max: {count} calls are under way"):
            engine.generate("one more")
        await until(lambda: engine.fleet.table.in_flight == 500, 60)
        outputs = await asyncio.gather(*calls)
        assert {output.text for output in outputs} == {"0 1 2 "}
        assert engine.fleet.table.counts["calls_ended"] == count
        await check_clean(engine)


async def test_the_bound_of_all_bodies_together_is_for_other_clients():
    """Long prompts at once, more than a server would hold: none of this process is refused."""
    gateway = GatewayConfig(body_bytes_max=1 << 20, body_bytes_total_max=1 << 20)
    async with MultiEngine("m", config=ServerConfig(gateway=gateway), in_flight_max=8) as engine:
        prompts = ["x" * 300_000] * 8
        outputs = await asyncio.gather(*(engine.generate(p, {"max_tokens": 3}) for p in prompts))
        assert {output.text for output in outputs} == {"0 1 2 "}
        await check_clean(engine)


async def test_cancelling_leaving_early_and_the_end_of_the_engine_end_calls():
    """In the engine too; whoever waits sees a cancellation."""
    long = {"max_tokens": 100_000}
    async with MultiEngine("m") as engine:
        call = engine.generate("x", long)
        outputs = aiter(call)
        await anext(outputs)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async for _ in engine.generate("y", long):
            break
        await until(lambda: engine.fleet.table.in_flight == 0)
        await check_clean(engine)
        left = engine.generate("z", long)
        outputs = aiter(left)
        await anext(outputs)
    assert left.done
    with pytest.raises(RuntimeError, match="outside of its"):
        engine.generate("x")


async def test_errors_are_told_with_their_code():
    """What an engine that dies in the middle of an answer leaves is not a whole answer."""
    async with MultiEngine("m", replicas=1) as engine:
        call = engine.generate("x", {"max_tokens": 100_000})
        outputs = aiter(call)
        await anext(outputs)
        (member,) = engine.fleet.pool.all()
        os.kill(member.session, signal.SIGKILL)
        with pytest.raises(CallError) as caught:
            await call
        assert caught.value.status == 502
        assert call.output.text.startswith("0 ")
        await until(lambda: member.state is not EngineState.READY)
        with pytest.raises(CallError) as caught:
            await engine.generate("y")
        assert caught.value.code in ("no_engine", "engine_died")
        await check_clean(engine)


async def test_programs_run_to_their_end(capsys: pytest.CaptureFixture[str]):
    """Results are in order, an error is one program's, and so many run at once at most."""
    running, most = 0, 0

    def program(index: int) -> Any:
        async def run(engine: Any) -> str:
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            try:
                first = await engine.generate("x", {"max_tokens": 2})
                if index == 3:
                    raise ValueError("it goes wrong")
                both = await asyncio.gather(
                    *(engine.chat([], {"max_tokens": 3}, thread=n) for n in (1, 2))
                )
                return first.text + both[0].text
            finally:
                running -= 1

        return run

    async with MultiEngine("m", replicas=2) as engine:
        done = await run_on(engine, [program(n) for n in range(10)], name="batch", at_once=4)
        await check_clean(engine)
        sessions = [p for p in engine.fleet.table.programs() if p.session]
    assert most == 4
    assert [r.index for r in done.results] == list(range(10))
    assert [r.error is not None for r in done.results] == [n == 3 for n in range(10)]
    assert done.values[0] == "0 1 0 1 2 "
    assert (done.calls, done.tokens) == (9 * 3 + 1, 9 * 8 + 2)
    assert done.makespan_s >= max(r.response_s for r in done.results)
    assert sorted(p.session for p in sessions) == sorted(f"batch-{n}" for n in range(10))
    assert all(p.ended_s is not None for p in sessions)
    assert "10/10" in capsys.readouterr().err


def test_arguments_that_cannot_be_meant_are_named():
    """Before anything starts."""
    with pytest.raises(ConfigError, match="model: nothing to run"):
        MultiEngine()
    with pytest.raises(ConfigError, match="replicas: -1 is not allowed"):
        MultiEngine("m", replicas=-1)
    with pytest.raises(ConfigError, match="policy: 'best' is not allowed"):
        MultiEngine("m", policy="best")
    with pytest.raises(ConfigError, match="calls_max: 0 is not allowed"):
        MultiEngine("m", calls_max=0)

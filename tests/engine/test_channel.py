"""The scheduler's end of the control channel: what a gateway hears of real calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from autellix.server.call_tag import CallTag, format_call, seal_program
from autellix.server.channel import (
    ENV_ENDPOINT,
    ENV_ENGINE_ID,
    ENV_KEY,
    CallReport,
    SessionEnded,
    digest_settings,
)
from autellix.server.clock import SystemClock
from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.pool.control import ControlServer

KEY = b"a key that nobody knows"
PROGRAM = "0badcafe"


async def wait_for(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    endpoint = f"ipc://{tmp_path}/c"
    monkeypatch.setenv(ENV_ENDPOINT, endpoint)
    monkeypatch.setenv(ENV_ENGINE_ID, "e3")
    monkeypatch.setenv(ENV_KEY, KEY.hex())
    return endpoint


def request_of(
    call: str, answer: int, *, key: bytes = KEY, service_ms: int = 0, by_path: bool = False
):
    return make_request(
        f"chatcmpl-{format_call(CallTag(call, 0, 250, 1000, by_path=by_path))}-bc4ca7c3",
        range(1000, 1006),
        answer,
        block_tokens=4,
        session_id=seal_program(PROGRAM, key),
        priority=service_ms,
    )


def play(pipeline: Pipeline, *, by_path: bool = False) -> None:
    pipeline.add(request_of("aaaaaaaa", 5, service_ms=2_000, by_path=by_path))
    pipeline.step()
    pipeline.add(request_of("bbbbbbbb", 5))
    pipeline.add(request_of("cccccccc", 5, key=b"forged"))
    for _ in range(2):
        pipeline.step()
    pipeline.abort(next(name for name in pipeline.tokens if "bbbbbbbb" in name))
    pipeline.run()


async def test_each_call_is_reported_once_with_its_figures(endpoint: str):
    """Finished, aborted and forged calls: one report each, with service, wait and identity."""
    reports: dict[str | None, CallReport] = {}
    server = ControlServer(endpoint, SystemClock(), lambda e, b, r: reports.update({r.call_id: r}))
    await server.start()
    pipeline = build_pipeline(AutellixScheduler, slots=3, policy_config={"policy": "plas"})
    scheduler = pipeline.scheduler
    try:
        await wait_for(lambda: "e3" in server.peers())
        play(pipeline)
        await wait_for(lambda: len(reports) == 3)
        peer = server.peers()["e3"]
        assert (peer.hello.policy, peer.hello.slots) == ("plas", 3)
        finished, aborted, forged = reports["aaaaaaaa"], reports["bbbbbbbb"], reports[None]
        assert (finished.program_id, finished.reason, finished.service_s) == (PROGRAM, "length", 5)
        assert (finished.prompt_tokens, finished.output_tokens) == (6, 5)
        assert (aborted.reason, aborted.service_s) == ("abort", 2)
        assert forged.program_id is None
        program = scheduler.autellix.ledger.get(PROGRAM)
        assert program.sum_s == 2 + 5 + 2  # the gateway's figure, and what was used here
        await wait_for(lambda: peer.heartbeat is not None and peer.heartbeat.last_seq == 3)
        assert peer.heartbeat.step == pipeline.steps
    finally:
        scheduler.shutdown()
        await server.close()


async def test_the_gateway_ends_programs_and_changes_the_policy(endpoint: str):
    """What comes down the channel is done at the next step; hello says the new policy."""
    server = ControlServer(endpoint, SystemClock(), lambda *_: None)
    await server.start()
    pipeline = build_pipeline(AutellixScheduler, policy_config={"policy": "plas"})
    scheduler = pipeline.scheduler
    try:
        await wait_for(lambda: "e3" in server.peers())
        assert server.peers()["e3"].hello.settings_digest == ""
        play(pipeline)
        await server.forget_programs([PROGRAM])
        await server.set_policy({"policy": "atlas"})
        await wait_for(lambda: len(scheduler.channel.inbox) == 2)
        pipeline = Pipeline(scheduler, 1, pipeline.clock, pipeline.runner)
        play(pipeline, by_path=True)
        await wait_for(lambda: server.peers()["e3"].hello.policy == "atlas")
        assert scheduler.config.policy == "atlas"
        digest = digest_settings({"policy": "atlas"})
        await wait_for(lambda: server.peers()["e3"].hello.settings_digest == digest)
        program = scheduler.autellix.ledger.get(PROGRAM)
        assert program.path_s == 2 + 5  # of this play only
        pipeline.add(request_of("dddddddd", 1, service_ms=60_000))  # a sum, on its way meanwhile
        assert (program.path_s, program.sum_s) == (2 + 5, 60)
        pipeline.run()
        await server.set_policy({"policy": "worst"})
        await wait_for(lambda: scheduler.channel.inbox)
        hello = server.peers()["e3"].hello
        play(Pipeline(scheduler, 1, pipeline.clock, pipeline.runner))
        assert scheduler.config.policy == "atlas"
        await wait_for(lambda: server.peers()["e3"].hello is not hello)
        assert server.peers()["e3"].hello == hello  # it says what it goes by, not what it refused
    finally:
        scheduler.shutdown()
        await server.close()


async def test_a_tool_that_a_program_waits_for_reaches_the_policy(endpoint: str):
    """Under the policy that keeps KV through gaps; engines with another are not told."""
    server = ControlServer(endpoint, SystemClock(), lambda *_: None)
    await server.start()
    pipeline = build_pipeline(AutellixScheduler, policy_config={"policy": "adaptive"})
    scheduler = pipeline.scheduler
    try:
        await wait_for(lambda: "e3" in server.peers())
        play(pipeline)
        await server.note_tool(PROGRAM, "build")
        await wait_for(lambda: scheduler.channel.inbox)
        scheduler._read_inbox()
        assert scheduler.autellix.ledger.get(PROGRAM).member.gap_key == "build"
        await server.set_policy({"policy": "plas"})
        await wait_for(lambda: scheduler.channel.inbox)
        scheduler._read_inbox()
        await wait_for(lambda: server.peers()["e3"].hello.policy == "plas")
        await server.note_tool(PROGRAM, "build")
        await server.forget_programs([PROGRAM])
        await wait_for(lambda: scheduler.channel.inbox)
        assert scheduler.channel.inbox.popleft() == SessionEnded(program_ids=(PROGRAM,))
    finally:
        scheduler.shutdown()
        await server.close()


def test_without_an_environment_there_is_no_channel():
    """Somebody's own engine with just the flag: it works, and there is no thread."""
    pipeline = build_pipeline(AutellixScheduler)
    play(pipeline)
    assert pipeline.scheduler.channel is None
    assert pipeline.scheduler.autellix.ledger.get(seal_program(PROGRAM, KEY)) is not None

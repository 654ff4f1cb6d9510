"""The control channel goes on over a mistake, and keeps engines that come and go informed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from autellix.server.channel import (
    ENV_CURVE,
    ENV_ENDPOINT,
    CallReport,
    ChannelCurve,
    Heartbeat,
    Hello,
    PolicyWanted,
)
from autellix.server.clock import SystemClock
from autellix.server.engine.control import ChannelSettings, EngineChannel, read_settings
from autellix.server.pool import control
from autellix.server.pool.control import ControlServer

ZEROS = {"wait_s": 0.0, "preemptions": 0, "swaps": 0, "prompt_tokens": 0, "hit_tokens": 0,
         "output_tokens": 0, "level": 1}  # fmt: skip
REPORT = CallReport(
    **{"seq": 0, "call_id": "c0ffee00", "program_id": None, "request_id": "r", "reason": "stop",
       "service_s": 1.0, **ZEROS}
)  # fmt: skip


def heartbeat(boot_id: str, last_seq: int) -> Heartbeat:
    """Return a heartbeat of an engine that does nothing."""
    return Heartbeat(
        boot_id=boot_id, last_seq=last_seq, step=1, step_age_s=None, longest_step_s=0.0, running=0,
        waiting=0, kv_blocks_free=1, computed_tokens=0, recomputed_tokens=0, preemptions=0,
        level_waiting=(),
    )  # fmt: skip


@contextmanager
def speaking(
    endpoint: str, engine_id: str = "e0", curve: ChannelCurve | None = None
) -> Iterator[EngineChannel]:
    """Run the engine's end of the channel."""

    def hello(boot_id: str) -> Hello:
        return Hello(
            version=1, engine_id=engine_id, boot_id=boot_id, rank=0, pid=1, vllm_version="0",
            scheduler="S", policy="plas", async_scheduling=False, slots=4, kv_blocks=64,
            block_tokens=16,
        )  # fmt: skip

    channel = EngineChannel(ChannelSettings(endpoint, engine_id, None, curve), hello, heartbeat)
    channel.start()
    try:
        yield channel
    finally:
        channel.close()


@asynccontextmanager
async def listening(tmp_path: Path, on_report: Any, **more: Any) -> AsyncIterator[ControlServer]:
    """Run the gateway's end of the channel."""
    server = ControlServer(f"ipc://{tmp_path}/c", SystemClock(), on_report, **more)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def until(condition: Any) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_mistake_in_taking_a_message_does_not_end_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It is in the log with its traceback, counted, and the next report is taken."""
    monkeypatch.setattr(control, "RESTART_AFTER_S", 0.01)
    got: list[int] = []

    def fold(engine_id: str, boot_id: str, report: CallReport) -> None:
        if report.seq == 1:
            raise KeyError("a mistake")
        got.append(report.seq)

    async with listening(tmp_path, fold) as server:
        with speaking(server.endpoint) as channel, caplog.at_level(logging.ERROR):
            await until(server.peers)
            channel.report(REPORT)
            await until(lambda: server.mistakes == 1)
            channel.report(REPORT)
            await until(lambda: got == [2])
    assert "KeyError: 'a mistake'" in caplog.text


async def test_an_engine_that_starts_after_a_switch_of_policy_is_told(tmp_path: Path):
    """A restarted engine has the policy of its arguments until then."""
    async with listening(tmp_path, lambda *_: None) as server:
        await server.set_policy({"policy": "atlas"})
        with speaking(server.endpoint) as channel:
            await until(lambda: channel.inbox)
            assert channel.inbox.popleft() == PolicyWanted(settings={"policy": "atlas"})


async def test_only_engines_of_this_pool_may_speak_as_they_come_and_go(tmp_path: Path):
    """An engine is admitted when it is added and dismissed when it is removed."""
    async with listening(tmp_path, lambda *_: None, engine_ids=["e0"]) as server:
        with speaking(server.endpoint, "e7"):
            await until(lambda: server.foreign)
            server.admit("e7")
            await until(lambda: "e7" in server.peers())
            server.dismiss("e7")
            assert not server.peers()


async def test_on_a_network_only_engines_with_keys_are_heard_and_for_themselves_only(
    tmp_path: Path,
):
    """No key, another server's key, and the key of another engine are as good as silence."""
    got: list[str] = []

    def fold(engine_id: str, boot_id: str, report: CallReport) -> None:
        got.append(engine_id)

    async with listening(tmp_path, fold, engine_ids=["e0", "y0", "y1"]) as server:
        endpoint = server.listen_on_network("127.0.0.1")
        good, foreign = server.curve_for("y0"), ChannelCurve(*zmq_keys(), zmq_keys()[0])
        with speaking(endpoint, "y0", good) as channel, speaking(server.endpoint, "e0") as local:
            await until(lambda: {"e0", "y0"} <= set(server.peers()))
            channel.report(REPORT)
            local.report(REPORT)
            await until(lambda: sorted(got) == ["e0", "y0"])
        await until(lambda: not server.peers())
        before = server.foreign
        with (
            speaking(endpoint, "y1", good),
            speaking(endpoint, "y1", foreign),
            speaking(endpoint, "y1"),
        ):
            await until(lambda: server.foreign > before)
            assert not server.peers()
        server.dismiss("y0")
        with speaking(endpoint, "y0", good), speaking(server.endpoint, "e0"):
            await until(server.peers)
            assert set(server.peers()) == {"e0"}


def zmq_keys() -> tuple[str, str]:
    """Return a key pair."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_an_engine_refuses_a_network_without_keys():
    """It would send what programs do in the clear."""
    environ = {ENV_ENDPOINT: "tcp://10.0.0.1:5000"}
    with pytest.raises(ValueError, match="a network is encrypted"):
        read_settings(environ)
    curve = read_settings({**environ, ENV_CURVE: "a b c"}).curve
    assert curve == ChannelCurve("a", "b", "c")

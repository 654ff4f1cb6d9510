"""From ``session(weight=…, deadline_s=…)`` in an agent to what an engine is told, and back."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import AsyncExitStack
from pathlib import Path

import openai
import pytest

import autellix
from autellix.server import call_tag
from autellix.server.process_table import program_id_of
from autellix.server.program import Program
from autellix.testing import autellix_server
from tests.redis_server import redis_server

from .conftest import Rig, running, until
from .fake_engine import fake_engines

__all__ = ["autellix_server"]

API = "/autellix/v1/sessions"
RUN = {"X-Autellix-Session": "run-1"}


def told(rig: Rig) -> call_tag.CallTag:
    """Return what the engine was told of the latest call."""
    tag = call_tag.find_call(rig.engine.seen[-1].headers["x-request-id"])
    assert tag is not None
    return tag


def program_of(rig: Rig, session: str = "run-1") -> Program:
    """Return a program of the table."""
    program = rig.table.get(program_id_of("", session))
    assert program is not None
    return program


async def told_of(rig: Rig, *args: object, **options: object) -> call_tag.CallTag:
    """Return what the engine is told of the first call of a session."""
    async with autellix.session(*args, **options):  # type: ignore[call-overload]
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="sk", max_retries=0)
        async with client:
            await client.completions.create(model="m", prompt="hi")
    return told(rig)


@pytest.mark.usefixtures("autellix_server")
async def test_what_a_session_says_reaches_the_engine(rig: Rig):
    """With its first call: the weight, the deadline on the arrivals' clock, the kind if known."""
    plain = await told_of(rig)
    assert (plain.weight, plain.deadline_ms, plain.kind) == (1.0, None, None)
    first = await told_of(rig, "trip", weight=2.5, deadline_s=60)
    assert (first.weight, first.kind) == (2.5, None)
    assert first.deadline_ms is not None
    assert 0 < first.deadline_ms - first.arrival_ms <= 60_000
    second = await told_of(rig, "trip")
    assert second.kind is not None
    await rig.settled()
    assert await asyncio.to_thread(autellix.flush, 5)


async def test_a_foreign_client_may_say_it_by_headers_or_at_the_start(rig: Rig):
    """A malformed header is named and the call served; a wrong field of a start is refused."""
    wrong = {"X-Autellix-Weight": "-3", "X-Autellix-Deadline": "soon"}
    status, headers, _ = await rig.chat({**RUN, **wrong})
    assert (status, headers["X-Autellix-Ignored"]) == (
        200,
        "X-Autellix-Weight, X-Autellix-Deadline",
    )
    assert (told(rig).weight, told(rig).deadline_ms) == (1.0, None)
    await rig.chat({**RUN, "X-Autellix-Weight": "0.25"})
    await rig.chat(RUN)
    assert told(rig).weight == 0.25, "it stays as long as nothing else is said"
    opener = {"weight": 3, "deadline_s": 20, "kind": "trip"}
    async with rig.client.put(f"{rig.url}{API}/run-1", json=opener) as response:
        assert response.status == 200
    await rig.chat(RUN)
    assert (told(rig).weight, told(rig).deadline_ms is not None) == (3.0, True)
    async with rig.client.get(f"{rig.url}{API}/run-1") as response:
        row = await response.json()
    assert (row["weight"], 0 < row["deadline_in_s"] <= 20) == (3.0, True)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("weight", 0, "a number from 0.01 to 100"),
        ("weight", "2", "a number from 0.01 to 100"),
        ("weight", True, "a number from 0.01 to 100"),
        ("deadline_s", 604_801, "a number of seconds from now, at most 604800 away"),
        ("deadline_s", [], "a number of seconds from now, at most 604800 away"),
        ("kind", "", "1 to 128 characters, none for control"),
    ],
)
async def test_a_wrong_field_is_named(rig: Rig, field: str, value: object, allowed: str):
    """Field, value and what is allowed."""
    async with rig.client.put(f"{rig.url}{API}/run-1", json={field: value}) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["param"] == field
    assert (
        answer["error"]["message"]
        == f"{field}: {str(value)!r} is not allowed; allowed is {allowed}"
    )


async def test_a_key_with_a_handicap_may_only_lower():
    """Neither a weight above 1 nor a deadline counts."""
    digest = hashlib.sha256(b"sk-slow").hexdigest()
    async with running(api_keys=(f"slow:{digest}:500",)) as rig:
        key = {**RUN, "Authorization": "Bearer sk-slow"}
        await rig.chat({**key, "X-Autellix-Weight": "9", "X-Autellix-Deadline": "5"})
        assert (told(rig).weight, told(rig).deadline_ms) == (1.0, None)
        await rig.chat({**key, "X-Autellix-Weight": "0.5"})
        assert told(rig).weight == 0.5
        await rig.settled()


async def test_it_outlives_the_gateway(tmp_path: Path):
    """In the journal, with the deadline at the same moment of the wall clock."""
    state = str(tmp_path / "state.sqlite")
    said = {"X-Autellix-Weight": "4", "X-Autellix-Deadline": "600", "X-Autellix-Kind": "trip"}
    async with running(state=state) as rig:
        await rig.chat({"X-Autellix-Session": "other", **said})
        await rig.chat({**RUN, **said})
        before, kind = program_of(rig).deadline_s, program_of(rig).kind
    async with running(state=state) as rig:
        program = program_of(rig)
        assert (program.weight, program.kind) == (4.0, kind)
        assert kind is not None
        assert program.deadline_s == pytest.approx(before, abs=1.0)  # the same monotonic clock
        await rig.chat(RUN)
        assert (told(rig).weight, told(rig).kind) == (4.0, kind)
        await rig.settled()


async def test_it_is_known_to_every_gateway_of_a_redis(tmp_path: Path):
    """Said at one, told by the other, to which the program is new or known; its end is theirs."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server())
        engines = await stack.enter_async_context(fake_engines(tmp_path, 1, tcp=True))
        first, second = [
            await stack.enter_async_context(running(engines=engines, state=redis.url))
            for _ in range(2)
        ]
        await first.chat(RUN)
        await until(lambda: second.table.get(program_id_of("", "run-1")) is not None)
        await first.chat({**RUN, "X-Autellix-Weight": "2", "X-Autellix-Deadline": "50"})
        await until(lambda: program_of(second).deadline_s is not None)
        left_s = program_of(second).deadline_s - time.monotonic()  # type: ignore[operator]
        assert program_of(second).weight == 2.0
        assert 0 < left_s <= 51
        async with first.client.delete(f"{first.url}{API}/run-1") as response:
            assert response.status == 204
        await until(lambda: program_of(second).weight is None)
        await first.settled()

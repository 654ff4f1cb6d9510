"""Clients hang up at any moment, again and again: the counters stay exact."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from autellix.server import MultiEngine
from tests.pool.clean import check_clean
from tests.pool.fake_fleet import fake_engines as fake_engines

pytestmark = pytest.mark.usefixtures("fake_engines")
AT_ONCE = 64
LIMIT_S = 120.0


async def hang_up_somewhere(socket: Path, choice: random.Random) -> str:
    """Make one call over a connection of its own, and leave it at a random moment."""
    stream = choice.random() < 0.7
    body = json.dumps({"max_tokens": choice.randrange(1, 40), "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"X-Autellix-Session: s{choice.randrange(200)}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    when = choice.choice(("head", "body", "sent", "later", "answer", "stream", "never"))
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        if when == "head":
            writer.write(head[: choice.randrange(len(head))])
        elif when == "body":
            writer.write(head + body[: choice.randrange(len(body))])
        else:
            writer.write(head + body)
        await writer.drain()
        if when == "later":
            await asyncio.sleep(choice.random() * 0.05)
        elif when == "answer":
            await reader.read(1)
        elif when == "stream":
            await reader.read(choice.randrange(1, 2000))
        elif when == "never":
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            ended = b"[DONE]" if stream else b"usage"
            while ended not in answer:
                chunk = await reader.read(65536)
                assert chunk, "an answer that nobody left is cut off"
                answer += chunk
    finally:
        if choice.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
    return when


async def abort_many(count: int, seed: int) -> Counter[str]:
    """Run ``count`` calls that are left at random moments; return how many at which."""
    choice = random.Random(seed)
    left = iter(range(count))
    moments: Counter[str] = Counter()
    async with MultiEngine("m", replicas=2) as engine:
        socket = engine.fleet.folder / "gateway.sock"

        async def client() -> None:
            for _ in left:
                async with asyncio.timeout(LIMIT_S):
                    moments[await hang_up_somewhere(socket, choice)] += 1

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        await check_clean(engine)
        table = engine.fleet.table
        assert table.counts["reports_duplicate"] == table.counts["reports_foreign"] == 0
        assert sum(p.calls_begun for p in table.programs()) == table.counts["calls_begun"]
        assert sum(p.calls_ended for p in table.programs()) == table.counts["calls_begun"]
    return moments


@pytest.fixture
def quick_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that answer in a moment."""
    monkeypatch.setitem(os.environ, "FAKE_STEP_S", "0.0005")


@pytest.mark.usefixtures("quick_steps")
async def test_two_thousand_aborts_leave_nothing():
    """In the request, before the answer, in the middle of it, or not at all."""
    moments = await abort_many(2000, seed=1)
    assert sum(moments.values()) == 2000
    assert len(moments) == 7


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quick_steps")
async def test_a_hundred_thousand_aborts_leave_nothing():
    """The same, fifty times as long."""
    moments = await abort_many(100_000, seed=2)
    assert sum(moments.values()) == 100_000

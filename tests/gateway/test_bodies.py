"""All request bodies together are bounded, whichever way they are read."""

from __future__ import annotations

import asyncio
import json

import pytest

from autellix.errors import ConfigError
from autellix.server.gateway.bodies import BodyRoom

from .conftest import Rig, running, until

LIMITS = {"body_bytes_max": 1 << 20, "body_bytes_total_max": 1 << 20}
BIG, BITS = 900_000, 800_000
PATHS = ("/v1/chat/completions", "/v1/embeddings")  # read by the front, and by aiohttp


def body_of(size: int) -> bytes:
    """Return a body of a length."""
    text = json.dumps({"model": "m", "input": "i", "messages": [], "user": ""}).encode()
    return text[:-2] + b"u" * (size - len(text)) + b'"}'


async def begin(rig: Rig, path: str, size: int, sent: int):
    """Send the head of a call and the first bytes of its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {size}\r\n\r\n".encode()
    )
    writer.write(body_of(size)[:sent])
    await writer.drain()
    return reader, writer


async def post(rig: Rig, path: str, size: int):
    """Post a body; returns (status, headers, JSON)."""
    headers = {"content-type": "application/json"}
    async with rig.client.post(rig.url + path, data=body_of(size), headers=headers) as response:
        return response.status, response.headers, await response.json()


def test_room_is_taken_and_given_back():
    """What does not fit takes nothing."""
    room = BodyRoom(10)
    assert room.take(6)
    assert not room.take(5)
    assert room.take(4)
    room.give(10)
    assert room.held_bytes == 0


@pytest.mark.parametrize("other", PATHS)
@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_finds_no_room_is_a_429(path: str, other: str):
    """It says when to come back; the one that was there first is served, and then others are."""
    async with running(**LIMITS) as rig:
        reader, writer = await begin(rig, path, BIG, BITS)
        await until(lambda: rig.gateway.bodies.held_bytes == BITS)
        for size in (300_000, 1 << 20):
            status, headers, answer = await post(rig, other, size)
            assert (status, headers["Retry-After"]) == (429, "1")
            assert answer["error"]["code"] == "limit_reached"
            assert f"together are {1 << 20} bytes" in answer["error"]["message"]
        assert rig.gateway.counts["refused body"] == 2
        assert (await post(rig, other, 100_000))[0] == 200
        writer.write(body_of(BIG)[BITS:])
        async with asyncio.timeout(10):
            assert b" 200 " in await reader.readline()
        writer.close()
        await until(lambda: rig.gateway.bodies.held_bytes == 0)
        assert (await post(rig, other, 300_000))[0] == 200
        await rig.settled()
        assert rig.gateway.bodies.held_bytes == 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_is_held_until_its_call_is_over(path: str):
    """Another engine may need it; a client that hangs up at any time holds nothing."""
    async with running(**LIMITS) as rig:
        _, writer = await begin(rig, path, BIG, BITS)
        await until(lambda: rig.gateway.bodies.held_bytes == BITS)
        writer.transport.abort()
        await until(lambda: rig.gateway.bodies.held_bytes == 0)
        rig.engine.stall_at = 0
        _, writer = await begin(rig, path, BIG, BIG)
        await asyncio.wait_for(rig.engine.arrived.wait(), 5)
        assert rig.gateway.bodies.held_bytes == BIG
        writer.transport.abort()
        await rig.settled()
        await until(lambda: rig.gateway.bodies.held_bytes == 0)


async def test_one_body_must_find_room():
    """A server that could never take its longest body does not start."""
    with pytest.raises(ConfigError, match=r"body_bytes_total_max: 2048 is not allowed"):
        async with running(body_bytes_total_max=2048):
            pass

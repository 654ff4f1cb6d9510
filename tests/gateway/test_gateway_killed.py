"""``kill -9`` of the whole gateway at random moments, under calls over HTTP."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.redis_server import redis_server

from .fake_engine import FakeEngine, fake_engines

ROOT = Path(__file__).parents[2]
SESSIONS = 3
LOSS_S = 1.0


class Books:
    """What is known of a session's service without the gateway, which must be between the two."""

    def __init__(self) -> None:
        self.engine_s = 0.0  # in the engine: the gateway has seen at least this
        self.client_s = 0.0  # at the client: it has seen at most this
        self.arrived_s: float | None = None  # of the call that is under way, at the engine
        self.begun_s: float | None = None  # and at the client

    def close_engine(self, now_s: float) -> None:
        """Count the call in the engine, which ends now."""
        if self.arrived_s is not None:
            self.engine_s += now_s - self.arrived_s
        self.arrived_s = None

    def close(self, now_s: float) -> None:
        """Count what is under way, which ends now."""
        self.close_engine(now_s)
        if self.begun_s is not None:
            self.client_s += now_s - self.begun_s
        self.begun_s = None


class Life:
    """A gateway that is killed and started again, with clients that go on."""

    def __init__(self, engine: FakeEngine, state: str) -> None:
        self.engine, self.state = engine, state
        self.port = 0
        self.process: Process | None = None
        self.books = {f"run-{n}": Books() for n in range(SESSIONS)}
        self.up = asyncio.Event()

    async def start(self) -> None:
        """Start the gateway, on the port that it had before."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.gateway.gateway_process",
            str(self.engine.address.port), self.state, str(self.port), cwd=ROOT, stdout=PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(await self.process.stdout.readline())
        self.up.set()

    async def kill(self) -> None:
        """Kill it; books are closed at this moment."""
        assert self.process is not None
        self.up.clear()
        self.process.kill()
        for book in self.books.values():
            book.close(time.monotonic())
        await self.process.wait()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    async def client(self, session: str, chance: random.Random) -> None:
        """Make one call after the other, of 10 to 900 ms in the engine."""
        book = self.books[session]
        async with aiohttp.ClientSession() as http:
            while True:
                await self.up.wait()
                body = {
                    "model": "m", "user": session, "seconds": chance.choice((0.01, 0.05, 0.9)),
                }  # fmt: skip
                book.begun_s = began_s = time.monotonic()
                try:
                    async with http.post(
                        f"{self.url}/v1/completions", json=body,
                        headers={"X-Autellix-Session": session},
                    ) as response:  # fmt: skip
                        assert response.status == 200
                        await response.read()
                except aiohttp.ClientError:
                    await asyncio.sleep(0.01)
                    continue
                if book.begun_s is None:
                    continue  # it was killed while the answer was on its way
                book.client_s += time.monotonic() - began_s
                book.begun_s = None

    async def programs(self) -> dict[str, dict[str, Any]]:
        """Return the sessions as the gateway shows them."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self.url}/autellix/v1/programs") as response,
        ):
            return {row["session"]: row for row in (await response.json())["programs"]}


def time_engine(life: Life) -> None:
    """Make the engine take the time that a call asks for, and keep the books of it."""
    answer = life.engine._answer

    async def timed(request: Any, body: Any) -> Any:
        book = life.books[body["user"]]
        book.arrived_s = arrived_s = time.monotonic()
        await asyncio.sleep(body["seconds"])
        if book.arrived_s == arrived_s:  # else the gateway was killed meanwhile
            book.close_engine(time.monotonic())
        return await answer(request, body)

    life.engine._answer = timed  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sqlite", "redis"])
async def test_a_killed_gateway_loses_less_than_a_second_of_service(tmp_path: Path, where: str):
    """Three kills at random moments; attained service, homes and open sessions are back."""
    chance = random.Random(11)
    async with fake_engines(tmp_path, 1, tcp=True) as (engine,):
        if where == "redis":
            with redis_server() as redis:
                await _live(Life(engine, redis.url), chance)
        else:
            await _live(Life(engine, str(tmp_path / "state.sqlite")), chance)


async def _live(life: Life, chance: random.Random) -> None:
    time_engine(life)
    await life.start()
    clients = [
        asyncio.create_task(life.client(session, random.Random(chance.random())))
        for session in life.books
    ]
    try:
        async with aiohttp.ClientSession() as http:
            url = f"{life.url}/autellix/v1/sessions/run-0"
            async with http.put(url, json={"name": "planner"}) as response:
                assert response.status == 200
        lost_s: list[float] = []
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            await life.kill()
            await life.start()
            rows = await life.programs()
            for session, book in life.books.items():
                got_s = rows[session]["service_s"] if session in rows else 0.0
                assert book.engine_s - LOSS_S < got_s < book.client_s + 0.1, (session, got_s)
                lost_s.append(book.engine_s - got_s)
                # from here on the next life's loss is measured; a call may have begun meanwhile
                book.engine_s = book.client_s = got_s
        assert max(lost_s) > 0, "no kill hit anything"
        assert rows["run-0"]["name"] == "planner"
        assert {row["home"] for row in rows.values()} == {"e0"}
        assert {row["state"] for row in rows.values()} <= {"active", "tool_wait", "idle"}
        for client in clients:
            assert not client.done(), client.exception()
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        if life.process is not None and life.process.returncode is None:
            life.process.kill()
            await life.process.wait()


AGENT = """
import sys, time, openai, autellix
autellix.init(sys.argv[1])
with autellix.session("steady"):
    client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k", max_retries=20)
    for number in range(12):
        client.completions.create(model="m", prompt="hi", user="run-0", extra_body={"seconds": 0.1})
        print(number, flush=True)
        time.sleep(0.1)
"""


@pytest.mark.slow
async def test_an_agent_with_the_sdk_goes_on_through_a_restart(tmp_path: Path):
    """It has no line for that: its client tries again, its session is what it was."""
    async with fake_engines(tmp_path, 1, tcp=True) as (engine,):
        life = Life(engine, str(tmp_path / "state.sqlite"))
        time_engine(life)
        await life.start()
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AGENT, life.url, cwd=ROOT, stdout=PIPE, stderr=PIPE
        )
        try:
            assert agent.stdout is not None
            for number in range(4):
                assert int(await agent.stdout.readline()) == number
            before = (await life.programs()).values()
            await life.kill()
            await asyncio.sleep(0.5)
            await life.start()
            _, errors = await asyncio.wait_for(agent.communicate(), 60)
            assert agent.returncode == 0, errors.decode()
            (row,) = (await life.programs()).values()
            assert {r["program_id"] for r in before} == {row["program_id"]}
            assert (row["name"], row["state"]) == ("steady", "ended")
            assert row["calls"] >= 12 - 4  # those of the last second before it died may be lost
            assert row["service_s"] > 12 * 0.1 - LOSS_S
        finally:
            if agent.returncode is None:
                agent.kill()
            await life.kill()

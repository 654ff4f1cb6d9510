"""AG2 1.x (``import ag2``): unmodified agents."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ag2", minversion="1")

from ag2 import Agent
from ag2.config import OpenAIConfig

import autellix
from autellix.testing import FakeServer

from .happens_before import is_one_fork_and_join
from .talk import Talk


def config(server: FakeServer) -> OpenAIConfig:
    return OpenAIConfig("fake", base_url=server.base_url, api_key="sk-fake", max_retries=0)


async def test_asking_twice(server: FakeServer):
    """A conversation of two turns is one session."""
    async with autellix.session() as session:
        reply = await Agent("a", config=config(server)).ask("one")
        await reply.ask("two")
    assert [c.session for c in server.calls] == [session.id] * 2


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_two_parallel_tools_that_call_the_model(kind: str, server: FakeServer, talk: Talk):
    """Tools of either kind are in the session, each on a thread of its own."""

    async def asearch(query: str) -> str:
        """Search."""
        await talk.aask(query)
        return "found"

    def search(query: str) -> str:
        """Search."""
        talk.ask(query)
        return "found"

    tool = asearch if kind == "async" else search
    server.tool_calls_next.append([(tool.__name__, {"query": q}) for q in ("q1", "q2")])
    server.together("q1", "q2")
    async with autellix.session() as session:
        await Agent("a", config=config(server), tools=[tool]).ask("go")
    assert is_one_fork_and_join(server, "go", "q1", "q2")
    assert {"q1", "q2"} <= set(talk.calls)
    assert len(server.calls) == 4
    assert talk.sessions == {session.id}


async def test_two_sessions_at_once(server: FakeServer):
    """Their calls do not mix."""

    async def one(name: str) -> str:
        async with autellix.session(name) as session:
            await Agent(name, config=config(server)).ask(name)
            return session.id

    ids = await asyncio.gather(one("x"), one("y"))
    assert {c.text: c.session for c in server.calls} == dict(zip("xy", ids, strict=True))


async def test_an_agent_as_a_tool(server: FakeServer):
    """The inner agent's calls are in the session."""
    inner = Agent("inner", config=config(server))
    outer = Agent(
        "outer", config=config(server), tools=[inner.as_tool(description="helps", name="helper")]
    )
    server.tool_calls_next.append([("helper", {"objective": "sub", "context": ""})])
    async with autellix.session() as session:
        await outer.ask("go")
    assert len(server.calls) >= 2
    assert {c.session for c in server.calls} == {session.id}

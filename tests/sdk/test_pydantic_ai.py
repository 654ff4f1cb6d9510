"""pydantic-ai: unmodified agents."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import autellix
from autellix.testing import FakeServer

from .happens_before import is_one_fork_and_join
from .talk import Talk


def model(server: FakeServer) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=server.base_url, api_key="sk-fake")
    return OpenAIChatModel("fake", provider=provider)


def test_run_sync_with_two_sync_tools(server: FakeServer, talk: Talk):
    """Sync tools run in worker threads of anyio."""
    agent = Agent(model(server))

    @agent.tool_plain
    def search(query: str) -> str:
        """Search."""
        talk.ask(query)
        return "found"

    server.tool_calls_next.append([("search", {"query": q}) for q in ("q1", "q2")])
    server.together("q1", "q2")
    with autellix.session() as session:
        agent.run_sync("go")
    assert is_one_fork_and_join(server, "go", "q1", "q2")
    assert {"q1", "q2"} <= set(talk.calls)
    assert len(server.calls) == 4
    assert talk.sessions == {session.id}


async def test_run_stream(server: FakeServer):
    """A streamed answer."""
    async with autellix.session() as session, Agent(model(server)).run_stream("go") as result:
        async for _ in result.stream_text():
            pass
    assert [c.session for c in server.calls] == [session.id]


async def test_two_sessions_at_once(server: FakeServer):
    """Their calls do not mix."""

    async def one(name: str) -> str:
        async with autellix.session(name) as session:
            await Agent(model(server)).run(name)
            return session.id

    ids = await asyncio.gather(one("x"), one("y"))
    assert {c.text: c.session for c in server.calls} == dict(zip("xy", ids, strict=True))

"""openai-agents: unmodified agents."""

from __future__ import annotations

import asyncio

import openai
import pytest

pytest.importorskip("agents.models.openai_chatcompletions")

import agents
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

import autellix
from autellix.testing import FakeServer

from .happens_before import is_one_fork_and_join
from .talk import Talk


@pytest.fixture
async def client(server: FakeServer):
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(max_retries=0) as client:
        yield client


def make(name: str, client: openai.AsyncOpenAI, **options: object) -> Agent:
    model = OpenAIChatCompletionsModel(model="fake", openai_client=client)
    return Agent(name=name, instructions=name, model=model, **options)


async def test_parallel_tools_of_both_kinds(client, server: FakeServer, talk: Talk):
    """Async and sync tools at once, each calling the model."""

    @function_tool
    async def asearch(query: str) -> str:
        await talk.aask(query)
        return "found"

    @function_tool
    def search(query: str) -> str:
        talk.ask(query)
        return "found"

    server.tool_calls_next.append([("asearch", {"query": "q1"}), ("search", {"query": "q2"})])
    server.together("q1", "q2")
    async with autellix.session() as session:
        await Runner.run(make("a", client, tools=[asearch, search]), "go")
    assert is_one_fork_and_join(server, "go", "q1", "q2")
    assert {"q1", "q2"} <= set(talk.calls)
    assert len(server.calls) == 4
    assert talk.sessions == {session.id}


async def test_streamed_and_drained_late(client, server: FakeServer):
    """The run belongs to where it was started."""
    async with autellix.session() as session:
        result = Runner.run_streamed(make("a", client), "go")
    async for _ in result.stream_events():
        pass
    assert [c.session for c in server.calls] == [session.id]


async def test_handoff_and_agent_as_tool(client, server: FakeServer):
    """Both ways to another agent."""
    inner = make("inner", client)
    outer = make("outer", client, handoffs=[inner], tools=[inner.as_tool("helper", "helps")])
    server.tool_calls_next.append([("helper", {"input": "sub"})])
    server.tool_calls_next.append([])
    server.tool_calls_next.append([("transfer_to_inner", {})])
    async with autellix.session() as session:
        await Runner.run(outer, "go")
        await Runner.run(outer, "again")
    assert len(server.calls) >= 4
    assert {c.session for c in server.calls} == {session.id}


async def test_two_sessions_at_once(client, server: FakeServer):
    """Their calls do not mix."""

    async def one(name: str) -> str:
        async with autellix.session(name) as session:
            await Runner.run(make(name, client), name)
            return session.id

    ids = await asyncio.gather(one("x"), one("y"))
    assert {c.text: c.session for c in server.calls} == dict(zip("xy", ids, strict=True))


def test_run_sync_and_the_responses_model(server: FakeServer):
    """The blocking way, with the other API."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(max_retries=0)
    agent = Agent(name="a", model=OpenAIResponsesModel(model="fake", openai_client=client))
    with autellix.session() as session:
        Runner.run_sync(agent, "go")
    assert [c.session for c in server.calls] == [session.id]
    assert server.calls[0].path.endswith("/responses")

"""AutoGen 0.7: unmodified agents and teams, every call in its session and thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("autogen_ext")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core.models import ModelFamily, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

import autellix
from autellix.testing import FakeServer

from .happens_before import dag_of
from .talk import Talk

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:autogen_.*")


@pytest.fixture
async def model(server: FakeServer):
    client = OpenAIChatCompletionClient(
        model="fake",
        base_url=server.base_url,
        api_key="sk-fake",
        max_retries=0,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": ModelFamily.UNKNOWN,
            "structured_output": False,
        },
    )
    yield client
    await client.close()


def agent(name: str, model: Any, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, model_client=model, system_message=name, **options)


def who(call: Any) -> str:
    """Return the agent that made a call: its name is its system message."""
    return str(call.body["messages"][0]["content"])


async def test_the_client_alone(model: Any, server: FakeServer):
    """Create and create_stream."""
    async with autellix.session() as session:
        await model.create([UserMessage(content="a", source="me")])
        async for _ in model.create_stream([UserMessage(content="b", source="me")]):
            pass
    assert [c.session for c in server.calls] == [session.id] * 2
    assert [(c.thread, c.seq) for c in server.calls] == [(1, 0), (1, 1)]  # it makes a task per call


async def test_wrap_of_the_model_client_needs_no_patch(model: Any, server: FakeServer):
    """The HTTP client inside is found and gets the hook."""
    autellix.init(patch=(), threads=False)
    async with autellix.session() as session:
        assert autellix.wrap(model) is model
        await model.create([UserMessage(content="a", source="me")])
    assert [c.session for c in server.calls] == [session.id]


async def test_an_agent_with_two_async_tools_and_a_sync_one(
    model: Any, server: FakeServer, talk: Talk
):
    """Tools that call the model: also the sync one, which runs in an executor."""

    async def search(query: str) -> str:
        await talk.aask(query)
        return "found"

    def lookup(query: str) -> str:
        talk.ask(query)
        return "known"

    tools = [
        FunctionTool(search, "searches"),
        FunctionTool(lookup, "looks up"),
    ]
    server.tool_calls_next.append(
        [("search", {"query": "s1"}), ("search", {"query": "s2"}), ("lookup", {"query": "l1"})]
    )
    server.together("s1", "s2", "l1")
    async with autellix.session() as session:
        await agent("a", model, tools=tools, reflect_on_tool_use=True).run(task="go")
    assert {"s1", "s2", "l1"} <= set(talk.calls)
    assert len(server.calls) == 5
    assert talk.sessions == {session.id}
    assert len({talk.threads[t][0] for t in ("s1", "s2", "l1")}) == 3


async def test_round_robin_is_one_chain(model: Any, server: FakeServer):
    """Four turns, each a task of its own, are one thread after the other."""
    team = RoundRobinGroupChat(
        [agent("a", model), agent("b", model)], termination_condition=MaxMessageTermination(5)
    )
    async with autellix.session() as session:
        await team.run(task="go")
    assert [who(c) for c in server.calls] == ["a", "b", "a", "b"]
    assert {c.session for c in server.calls} == {session.id}
    assert len({c.thread for c in server.calls}) == 1
    assert [c.seq for c in server.calls] == [0, 1, 2, 3]
    order = iter(["1", "2", "3", "4"])
    numbered = {call.order: next(order) for call in server.calls}
    found = dag_of(server, lambda call: numbered[call.order])
    assert found == {"1": set(), "2": {"1"}, "3": {"2"}, "4": {"3"}}


async def test_graph_flow_diamond(model: Any, server: FakeServer):
    """A → b, c → d: b and c on two threads."""
    a, b, c, d = (agent(n, model) for n in "abcd")
    builder = DiGraphBuilder()
    for each in (a, b, c, d):
        builder.add_node(each)
    builder.add_edge(a, b).add_edge(a, c).add_edge(b, d).add_edge(c, d)
    flow = GraphFlow([a, b, c, d], graph=builder.build())
    gate = server.gates["echo: go"] = threading.Event()  # b and c are answered once both are there
    async with autellix.session() as session:
        run = asyncio.create_task(flow.run(task="go"))
        await asyncio.to_thread(server.wait_for, calls=3)
        gate.set()
        await run
    assert dag_of(server, who) == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}
    by_name = {who(call): call for call in server.calls}
    assert set(by_name) == set("abcd")
    assert {call.session for call in server.calls} == {session.id}
    assert by_name["b"].thread != by_name["c"].thread


async def test_teams_at_once_reused_and_drained_late(model: Any, server: FakeServer):
    """Two teams in two sessions do not mix; a team object may be used again; late draining."""

    def team(name: str) -> RoundRobinGroupChat:
        return RoundRobinGroupChat(
            [agent(name, model), agent(name + name, model)],
            termination_condition=MaxMessageTermination(3),
        )

    async def one(chat: RoundRobinGroupChat) -> str:
        async with autellix.session() as session:
            await chat.run(task="go")
            return session.id

    x, y = team("x"), team("y")
    first, second = await asyncio.gather(one(x), one(y))
    await x.reset()
    third = await one(x)
    async with autellix.session() as last:
        stream = team("z").run_stream(task="go")
        await anext(stream)
        await anext(stream)
    async for _ in stream:
        pass
    owners = {who(c)[0]: set() for c in server.calls}
    for call in server.calls:
        owners[who(call)[0]].add(call.session)
    assert owners == {"x": {first, third}, "y": {second}, "z": {last.id}}
    assert len({first, second, third, last.id}) == 4


async def test_an_agent_as_a_tool(model: Any, server: FakeServer):
    """The inner agent's calls are in the session."""
    inner = agent("inner", model)
    outer = agent("outer", model, tools=[AgentTool(inner)], reflect_on_tool_use=True)
    server.tool_calls_next.append([("inner", {"task": "sub"})])
    async with autellix.session() as session:
        await outer.run(task="go")
    assert [who(c) for c in server.calls] == ["outer", "inner", "outer"]
    assert {c.session for c in server.calls} == {session.id}

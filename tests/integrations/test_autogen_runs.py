"""Runs of wrapped AutoGen teams that do not go straight: paused, stopped, cancelled, with tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import ExternalTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken
from autogen_ext.models.openai import OpenAIChatCompletionClient

import autellix
from autellix.integrations.autogen import wrap
from autellix.testing import FakeServer

INFO = {
    "family": "unknown",
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
}


@pytest.fixture
async def model(server: FakeServer) -> AsyncIterator[Any]:
    client = OpenAIChatCompletionClient(
        model="fake", model_info=INFO, max_retries=0, parallel_tool_calls=False
    )
    yield client
    await client.close()


def agent(model: Any, name: str, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, model, description=name, system_message=name, **options)


def who(call: Any) -> str:
    """Return the agent that made a call: its name is its system message."""
    return str(call.body["messages"][0]["content"])


async def reasons(server: FakeServer) -> list[str]:
    """Return why the sessions ended, in the order of their first calls; nothing stays open."""
    found = []
    for session in dict.fromkeys(call.session for call in server.calls):
        assert session is not None
        event = await asyncio.to_thread(server.wait_event, "DELETE", session)
        found.append(event.path.partition("reason=")[2])
    assert autellix.current_session() is None
    assert autellix.status().sessions == 0
    return found


def tools_told(server: FakeServer) -> list[tuple[str, str, Any]]:
    """Return what the server was told of tools: start or end, which, and whether it went well."""
    bodies = [e.body for e in server.events if "tool" in e.body]
    return [(body["event"], body["tool"], body.get("ok")) for body in bodies]


async def test_an_agent_as_a_tool_is_in_its_callers_program(
    model: Any, server: FakeServer, dag_of: Any
):
    """Three calls, one after the other, one program; the server hears of the tool."""
    helper = AgentTool(agent(model, "helper"), return_value_as_last_message=True)
    boss = agent(model, "boss", tools=[helper], reflect_on_tool_use=True)
    team = wrap(RoundRobinGroupChat([boss], max_turns=1), name="with-helper")
    server.tool_calls_next.append([("helper", {"task": "help"})])
    await team.run(task="go")
    assert [who(call) for call in server.calls] == ["boss", "helper", "boss"]
    assert await reasons(server) == ["ok"]
    numbered = {call.order: str(call.order) for call in server.calls}
    assert dag_of(server, lambda call: numbered[call.order]) == {"0": set(), "1": {"0"}, "2": {"1"}}
    assert tools_told(server) == [("start", "helper", None), ("end", "helper", True)]


async def test_a_paused_team_goes_on_as_the_program_it_was(model: Any, server: FakeServer):
    """Pause while a call runs, resume, run to the end: one program; run again: another."""
    team = wrap(RoundRobinGroupChat([agent(model, "a"), agent(model, "b")], max_turns=2))
    gate = server.gates["go"] = threading.Event()
    run = asyncio.create_task(team.run(task="go"))
    await asyncio.to_thread(server.wait_for, calls=1)
    await team.pause()
    await team.resume()
    gate.set()
    await run
    assert len({call.session for call in server.calls}) == 1
    await team.reset()
    await team.run(task="again")
    assert await reasons(server) == ["ok", "ok"]


async def test_a_stopped_team_that_is_run_again_is_a_new_program(model: Any, server: FakeServer):
    """Stopped from outside after a turn, and continued without a task."""
    stop = ExternalTermination()
    members = [agent(model, "a"), agent(model, "b")]
    team = wrap(RoundRobinGroupChat(members, termination_condition=stop, max_turns=4))
    gate = server.gates["go"] = threading.Event()
    run = asyncio.create_task(team.run(task="go"))
    await asyncio.to_thread(server.wait_for, calls=1)
    stop.set()
    gate.set()
    result = await run
    assert isinstance(result, TaskResult)
    before = len(server.calls)
    await team.run()
    assert len(server.calls) > before
    assert await reasons(server) == ["ok", "ok"]


@pytest.mark.parametrize("how", ["token", "task", "time"])
async def test_a_cancelled_run_says_so(model: Any, server: FakeServer, how: str):
    """By AutoGen's token, by asyncio, or because its time is up."""
    team = wrap(RoundRobinGroupChat([agent(model, "a")], max_turns=1))
    gate = server.gates["go"] = threading.Event()
    token = CancellationToken()

    async def work() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await team.run(task="go", cancellation_token=token)

    limits: list[asyncio.Timeout] = []
    run = asyncio.create_task(work())
    await asyncio.to_thread(server.wait_for, calls=1)
    if how == "token":
        token.cancel()
    if how == "task":
        run.cancel()
    if how == "time":
        limits[0].reschedule(0)
    # AutoGen lets a turn come to its end before a cancelled run does, unless the token says so.
    asyncio.get_running_loop().call_later(1.0, gate.set)
    with pytest.raises((asyncio.CancelledError, asyncio.TimeoutError)):
        await run
    assert await reasons(server) == ["cancelled"]


async def test_a_tool_that_fails_or_takes_too_long_is_told(model: Any, server: FakeServer):
    """AutoGen gives the error to the model, so the run goes on; the wait for the tool has ended."""

    async def look_up(word: str) -> str:
        """Look a word up, too slowly."""
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        return word

    one = agent(model, "a", tools=[look_up], reflect_on_tool_use=True)
    team = wrap(RoundRobinGroupChat([one], max_turns=1))
    server.tool_calls_next.append([("look_up", {"word": "fox"})])
    await team.run(task="go")
    assert await reasons(server) == ["ok"]
    assert tools_told(server) == [("start", "look_up", None), ("end", "look_up", False)]


async def test_a_run_left_early_leaves_nothing_open(model: Any, server: FakeServer):
    """The consumer of run_stream goes away in the middle of a tool."""
    started = asyncio.Event()

    async def look_up(word: str) -> str:
        """Look a word up, for ever."""
        started.set()
        await asyncio.Event().wait()
        return word

    one = agent(model, "a", tools=[look_up])
    server.tool_calls_next.append([("look_up", {"word": "fox"})])

    async def consume() -> None:
        async for _ in wrap(one, role="background").run_stream(task="go"):
            pass

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await reasons(server) == ["cancelled"]
    assert tools_told(server) == [("start", "look_up", None), ("end", "look_up", False)]
    assert server.calls[0].headers["x-autellix-role"] == "background"

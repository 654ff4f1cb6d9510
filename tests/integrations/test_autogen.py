"""AutoGen: a wrapped team is a program per run, and a shared runtime carries sessions."""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_core import (
    AgentId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    message_handler,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient

import autellix
from autellix.integrations.autogen import AutellixRuntime, wrap
from autellix.testing import FakeServer

INFO = {
    "family": "unknown",
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
}


@pytest.fixture
async def model(server: FakeServer):
    client = OpenAIChatCompletionClient(model="fake", model_info=INFO, max_retries=0)
    yield client
    await client.close()


def agents(model: Any, *names: str) -> list[AssistantAgent]:
    return [AssistantAgent(name, model, description=name) for name in names]


def round_robin(model: Any, turns: int = 4, **options: Any) -> RoundRobinGroupChat:
    return RoundRobinGroupChat(agents(model, "writer", "critic"), max_turns=turns, **options)


def sessions(server: FakeServer) -> list[str]:
    """Return the sessions of the calls, in order; each call has one."""
    found = [call.session for call in server.calls]
    assert None not in found
    return [str(session) for session in found]


def ended(server: FakeServer) -> None:
    """Wait for the end of every session."""
    for session in set(sessions(server)):
        server.wait_event("DELETE", session)
    assert autellix.current_session() is None


both_ways = pytest.mark.parametrize("way", ["run", "run_stream"])


async def result_of(team: Any, way: str) -> TaskResult:
    """Run a team in one of the two ways."""
    if way == "run":
        found: TaskResult = await team.run(task="go")
    else:
        found = [item async for item in team.run_stream(task="go")][-1]
    return found


async def test_a_run_of_a_team_is_one_program(model: Any, server: FakeServer):
    """A team used twice, by run and by run_stream, is two programs with the team's name."""
    team = wrap(round_robin(model), name="ads")
    await team.run(task="one")
    await team.reset()
    async for _ in team.run_stream(task="two"):
        pass
    found = sessions(server)
    assert len(found) == 8
    assert len(set(found[:4])) == len(set(found[4:])) == 1
    assert found[0] != found[4]
    assert server.wait_event("PUT").body["name"] == "ads"
    ended(server)


async def test_a_round_robin_is_one_thread(model: Any, server: FakeServer):
    """Turns follow each other: the calls are one chain."""
    await wrap(round_robin(model)).run(task="one")
    assert len({call.thread for call in server.calls}) == 1
    assert [call.seq for call in server.calls] == [0, 1, 2, 3]


async def test_an_agent_alone_can_be_wrapped(model: Any, server: FakeServer):
    """Each run of an agent is a program."""
    (agent,) = agents(model, "solo")
    assert wrap(agent) is agent
    wrap(agent)
    await agent.run(task="one")
    await agent.run(task="two")
    assert len(set(sessions(server))) == 2
    ended(server)


@both_ways
@pytest.mark.parametrize("chooser", ["function", "model"])
async def test_a_selector_is_one_program(model: Any, server: FakeServer, way: str, chooser: str):
    """The team chooses who speaks, by a function or by asking the model."""
    end = MaxMessageTermination(3)
    choose = lambda messages: "writer" if len(messages) % 2 else "critic"  # noqa: E731
    by_function = {"selector_func": choose}
    by_model = {"selector_prompt": "writer", "allow_repeated_speaker": True}
    selector = SelectorGroupChat(
        agents(model, "writer", "critic"), model, termination_condition=end,
        **(by_function if chooser == "function" else by_model),
    )  # fmt: skip
    await result_of(wrap(selector), way)
    assert len(server.calls) == (2 if chooser == "function" else 4)
    assert [call.seq for call in server.calls] == list(range(len(server.calls)))
    assert len(set(sessions(server))) == 1
    ended(server)


@both_ways
async def test_a_swarm_that_hands_off_is_one_program(model: Any, server: FakeServer, way: str):
    """The first agent hands off to the second by a tool; both are in the program."""
    first, second = (
        AssistantAgent(name, model, system_message=name, handoffs=[other])
        for name, other in (("first", "second"), ("second", "first"))
    )
    team = wrap(Swarm([first, second], termination_condition=TextMentionTermination("echo")))
    server.tool_calls_next.append([("transfer_to_second", {})])
    result = await result_of(team, way)
    assert [m.source for m in result.messages if m.type == "HandoffMessage"] == ["first"]
    assert result.messages[-1].source == "second"
    assert [call.body["messages"][0]["content"] for call in server.calls] == ["first", "second"]
    assert [call.seq for call in server.calls] == [0, 1]
    assert len(set(sessions(server))) == 1
    ended(server)


@both_ways
async def test_magentic_one_is_one_program(model: Any, server: FakeServer, way: str):
    """Facts, plan, ledger, the worker, ledger, final answer: six calls, one after the other."""
    team = wrap(MagenticOneGroupChat(agents(model, "worker"), model, max_turns=5))
    prompts = iter(range(9))

    def ledger() -> str:
        is_done = next(prompts) > 0
        entry = {"is_request_satisfied": is_done, "is_progress_being_made": True}
        entry |= {"is_in_loop": False, "instruction_or_question": "work", "next_speaker": "worker"}
        return json.dumps({key: {"reason": "so", "answer": value} for key, value in entry.items()})

    server.answers = Ledgers(ledger)
    result = await result_of(team, way)
    assert [m.source for m in result.messages][-2:] == ["worker", "MagenticOneOrchestrator"]
    assert [call.seq for call in server.calls] == list(range(6))
    assert len(set(sessions(server))) == 1
    ended(server)


class Ledgers(dict[str, Any]):
    """Answers that give a ledger to who asks for one."""

    def __init__(self, ledger: Callable[[], str]) -> None:
        self._ledger = ledger

    def get(self, text: str, default: Any = None) -> Any:
        """Return the answer to a text."""
        return self._ledger() if "is_request_satisfied" in text else default


@both_ways
async def test_a_diamond_of_agents_is_exact(
    model: Any, server: FakeServer, dag_of: Callable[..., Any], way: str
):
    """The two in the middle run side by side, in threads of one program; the last follows both."""
    nodes = [AssistantAgent(name, model, system_message=name) for name in "abcd"]
    a, b, c, d = nodes
    builder = DiGraphBuilder()
    for agent in nodes:
        builder.add_node(agent)
    builder.add_edge(a, b).add_edge(a, c).add_edge(b, d).add_edge(c, d)
    gate = server.gates["echo: go"] = threading.Event()  # b and c are answered once both are there
    team = wrap(GraphFlow(nodes, graph=builder.build()))
    run = asyncio.create_task(result_of(team, way))
    await asyncio.to_thread(server.wait_for, calls=3)
    gate.set()
    await run
    assert len(set(sessions(server))) == 1
    order = dag_of(server, lambda call: call.body["messages"][0]["content"])
    assert order == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}
    ended(server)


async def test_teams_at_once_do_not_mix(model: Any, server: FakeServer):
    """Two wrapped teams at the same time are two programs."""
    await asyncio.gather(*(wrap(round_robin(model)).run(task="go") for _ in range(2)))
    found = sessions(server)
    assert sorted(found.count(s) for s in set(found)) == [4, 4]
    ended(server)


async def test_a_shared_runtime_carries_the_session(model: Any, server: FakeServer):
    """A runtime that was started before the sessions serves two teams, each in its own."""
    runtime = AutellixRuntime()
    runtime.start()
    teams = [wrap(round_robin(model, runtime=runtime, name=name)) for name in ("one", "two")]
    await asyncio.gather(*(team.run(task="go") for team in teams))
    await runtime.stop_when_idle()
    found = sessions(server)
    assert sorted(found.count(s) for s in set(found)) == [4, 4]
    ended(server)


@dataclass
class Ask:
    text: str


class Asker(RoutedAgent):
    """An agent of the core API that asks the model."""

    def __init__(self, model: Any) -> None:
        super().__init__("asks")
        self._model = model

    @message_handler
    async def ask(self, message: Ask, ctx: MessageContext) -> str:
        from autogen_core.models import UserMessage

        said = [UserMessage(content=message.text, source="user")]
        return str((await self._model.create(said)).content)


async def test_core_agents_are_in_the_senders_session(model: Any, server: FakeServer):
    """Messages of two sessions and of none, on one runtime: each call is where its sender is."""
    runtime = AutellixRuntime()
    await Asker.register(runtime, "asker", lambda: Asker(model))
    runtime.start()
    recipient = AgentId("asker", "default")

    async def in_session(name: str) -> str:
        async with autellix.session(name) as session:
            await runtime.send_message(Ask(name), recipient)
            return session.id

    ids = await asyncio.gather(in_session("one"), in_session("two"))
    await runtime.send_message(Ask("none"), recipient)
    await runtime.stop_when_idle()
    by_text = {call.text: call.session for call in server.calls}
    assert (by_text["one"], by_text["two"]) == tuple(ids)
    assert by_text["none"] not in ids


class Silent(RoutedAgent):
    """An agent that answers nothing."""

    @message_handler
    async def take(self, message: Ask, ctx: MessageContext) -> None:
        """Take it."""


async def test_no_answer_is_no_warning_and_no_filter():
    """A handler that answers nothing answers None; the process's warnings are left as they are."""
    before = list(warnings.filters)
    runtime = AutellixRuntime()
    await Silent.register(runtime, "silent", lambda: Silent("silent"))
    runtime.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert await runtime.send_message(Ask("x"), AgentId("silent", "default")) is None
    await runtime.stop_when_idle()
    assert [w for w in caught if "Intervention handler" in str(w.message)] == []
    assert warnings.filters == before


def test_wrap_refuses_what_it_cannot_wrap():
    """The runtime class becomes ours; a runtime that exists, or anything else, is refused."""
    assert wrap(SingleThreadedAgentRuntime) is AutellixRuntime
    assert wrap(AutellixRuntime) is AutellixRuntime
    with pytest.raises(TypeError, match="no team, agent or runtime class"):
        wrap(SingleThreadedAgentRuntime())
    with pytest.raises(TypeError, match="int is no team"):
        wrap(3)


async def test_wrap_of_the_sdk_finds_the_adapter(model: Any, server: FakeServer):
    """``autellix.wrap`` takes a team."""
    await autellix.wrap(round_robin(model, turns=1)).run(task="one")
    assert len(server.calls) == 1
    ended(server)


async def test_a_failing_run_ends_its_program(model: Any, server: FakeServer):
    """An error of the model ends the session as an error."""
    server.status_next.extend([400] * 4)
    with pytest.raises(Exception, match="as told"):
        await wrap(round_robin(model)).run(task="one")
    event = server.wait_event("DELETE", sessions(server)[0])
    assert "error" in f"{event.path} {event.body}"


async def test_a_new_program_in_a_session_is_one_and_knows_its_parent(
    model: Any, server: FakeServer
):
    """``nested="new"``: a team's ``run`` calls its ``run_stream``, which opens none of its own."""
    team = wrap(round_robin(model, turns=1), nested="new")
    async with autellix.session("outer") as outer:
        await team.run(task="one")
        await team.reset()
        assert [item async for item in team.run_stream(task="two")]
    assert autellix.flush()
    assert len(set(sessions(server))) == 2
    assert {call.headers["x-autellix-parent-session"] for call in server.calls} == {outer.id}
    opened = {event.session for event in server.events if event.method == "PUT"}
    assert opened <= {outer.id, *sessions(server)}
    ended(server)

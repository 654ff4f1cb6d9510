"""A wrapped graph: each run is one program, however it is run, and nothing stays open."""

from __future__ import annotations

import asyncio
import operator
import threading
from typing import Annotated, Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

import autellix
from autellix.integrations.langgraph import Callback, wrap
from autellix.testing import FakeServer


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]


@pytest.fixture
async def model(server: FakeServer):
    with openai.DefaultHttpxClient() as client:
        async with openai.DefaultAsyncHttpxClient() as async_client:
            yield ChatOpenAI(
                model="fake", max_retries=0, http_client=client, http_async_client=async_client
            )


def node(model: ChatOpenAI, text: str):
    """A node that makes one call, sync or async as the graph is run."""
    from langchain_core.runnables import RunnableLambda

    def call(state: State) -> State:
        return {"said": [str(model.invoke(text).content)]}

    async def acall(state: State) -> State:
        return {"said": [str((await model.ainvoke(text)).content)]}

    return RunnableLambda(call, acall)


def chain(model: ChatOpenAI, *texts: str, name: str = "chain", **options: Any) -> Any:
    """A graph of calls, one after the other."""
    graph = StateGraph(State)
    for text in texts:
        graph.add_node(text, node(model, text))
    for before, after in zip((START, *texts), (*texts, END), strict=True):
        graph.add_edge(before, after)
    return graph.compile(name=name, **options)


def fork(model: ChatOpenAI) -> Any:
    """Plan → left, right → join."""
    graph = StateGraph(State)
    for text in ("plan", "left", "right", "join"):
        graph.add_node(text, node(model, text))
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "left")
    graph.add_edge("plan", "right")
    graph.add_edge(["left", "right"], "join")
    return graph.compile()


def programs(server: FakeServer) -> dict[str, list[str]]:
    """Return the calls by session, in the order of the sessions' first calls."""
    found: dict[str, list[str]] = {}
    for call in server.calls:
        assert call.session is not None, f"{call.text} carries no session"
        found.setdefault(call.session, []).append(call.text)
    return found


def ends(server: FakeServer, *sessions: str) -> list[str]:
    """Return the reasons with which these sessions ended, once they all have."""
    reasons = []
    for session in sessions:
        event = server.wait_event("DELETE", session)
        assert event.session == session
        reasons.append(event.body.get("reason") or event.path.partition("reason=")[2])
    assert autellix.current_session() is None
    return reasons


RUNS = {
    "invoke": lambda graph: graph.invoke({"said": []}),
    "stream": lambda graph: list(graph.stream({"said": []}, stream_mode="updates")),
    "with_config": lambda graph: graph.with_config(tags=["x"]).invoke({"said": []}),
    "pipe": lambda graph: (graph | (lambda state: state["said"])).invoke({"said": []}),
}
ASYNC_RUNS = {
    "ainvoke": lambda graph: graph.ainvoke({"said": []}),
    "astream": lambda graph: drain(graph.astream({"said": []})),
    "astream_events": lambda graph: drain(graph.astream_events({"said": []}, version="v2")),
}


async def drain(chunks: Any) -> list[Any]:
    """Return all chunks of an async iterator."""
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize("way", RUNS)
def test_a_run_is_one_program(model: ChatOpenAI, server: FakeServer, way: str):
    """Each of two runs has a session of its own, which ends with it."""
    graph = wrap(chain(model, "a", "b"))
    RUNS[way](graph)
    RUNS[way](graph)
    found = programs(server)
    assert list(found.values()) == [["a", "b"]] * 2
    assert ends(server, *found) == ["ok", "ok"]


@pytest.mark.parametrize("way", ASYNC_RUNS)
async def test_an_async_run_is_one_program(model: ChatOpenAI, server: FakeServer, way: str):
    """The same for the async ways."""
    graph = wrap(chain(model, "a", "b"))
    await ASYNC_RUNS[way](graph)
    await ASYNC_RUNS[way](graph)
    found = programs(server)
    assert list(found.values()) == [["a", "b"]] * 2
    assert ends(server, *found) == ["ok", "ok"]


def test_a_batch_is_a_program_per_item(model: ChatOpenAI, server: FakeServer):
    """Three items, three sessions."""
    wrap(chain(model, "a", "b")).batch([{"said": []}] * 3)
    found = programs(server)
    assert list(found.values()) == [["a", "b"]] * 3
    ends(server, *found)


async def test_runs_at_once_do_not_mix(model: ChatOpenAI, server: FakeServer):
    """Items of an async batch, and two graphs at the same time, are all programs of their own."""
    one, two = wrap(chain(model, "a", "b")), wrap(chain(model, "x", "y"))
    await asyncio.gather(one.abatch([{"said": []}] * 2), two.ainvoke({"said": []}))
    assert sorted(programs(server).values()) == [["a", "b"], ["a", "b"], ["x", "y"]]
    ends(server, *programs(server))


async def test_inside_a_session_a_run_joins_it_or_has_it_as_parent(
    model: ChatOpenAI, server: FakeServer
):
    """``join`` adds to the outer program; ``new`` opens one that names its parent."""
    graph = chain(model, "a")
    with autellix.session("outer") as outer:
        wrap(graph).invoke({"said": []})
        await wrap(graph, nested="new").ainvoke({"said": []})
    first, second = server.calls
    assert first.session == outer.id
    assert second.session != outer.id
    assert second.headers["x-autellix-parent-session"] == outer.id


def test_as_a_subgraph_it_joins(model: ChatOpenAI, server: FakeServer):
    """A wrapped graph in a wrapped graph is part of one program."""
    outer = StateGraph(State)
    outer.add_node("first", node(model, "first"))
    outer.add_node("inner", wrap(chain(model, "a", "b")))
    outer.add_edge(START, "first")
    outer.add_edge("first", "inner")
    wrap(outer.compile()).invoke({"said": []})
    found = programs(server)
    assert list(found.values()) == [["first", "a", "b"]]
    ends(server, *found)


def test_branches_and_sends_are_threads(model: ChatOpenAI, server: FakeServer):
    """A fork's branches, and each item of a map, are threads forked from the main one."""
    server.together("left", "right")
    wrap(fork(model)).invoke({"said": []})
    by_text = {call.text: call for call in server.calls}
    assert by_text["plan"].thread == by_text["join"].thread == 0
    branches = {by_text["left"].thread, by_text["right"].thread}
    assert len(branches | {0}) == 3
    assert by_text["left"].parent == by_text["right"].parent == (0, 1)

    assert autellix.flush()  # or a late message would be taken for the next one
    server.clear()
    graph = StateGraph(State)
    graph.add_node("split", node(model, "split"))
    graph.add_node("part", lambda state: {"said": [str(model.invoke(state["text"]).content)]})
    graph.add_edge(START, "split")
    graph.add_conditional_edges(
        "split", lambda _: [Send("part", {"text": f"p{i}"}) for i in range(3)], ["part"]
    )
    server.together("p0", "p1", "p2")
    wrap(graph.compile()).invoke({"said": []})
    assert len({call.thread for call in server.calls}) == 4
    assert len(programs(server)) == 1


def test_an_early_close_ends_the_program(model: ChatOpenAI, server: FakeServer):
    """Who stops reading a stream ends the program."""
    chunks = wrap(chain(model, "a", "b")).stream({"said": []})
    next(chunks)
    chunks.close()
    assert ends(server, *programs(server)) == ["ok"]


async def test_an_early_aclose_ends_the_program(model: ChatOpenAI, server: FakeServer):
    """The same for an async stream."""
    chunks = wrap(chain(model, "a", "b")).astream({"said": []})
    await anext(chunks)
    await chunks.aclose()
    assert ends(server, *programs(server)) == ["ok"]


def test_the_caller_is_not_in_the_session_between_chunks(model: ChatOpenAI, server: FakeServer):
    """A stream's session is in force inside its steps only."""
    for _ in wrap(chain(model, "a", "b")).stream({"said": []}):
        assert autellix.current_session() is None


def test_an_error_and_a_recursion_limit_end_it_as_an_error(model: ChatOpenAI, server: FakeServer):
    """The reason tells that the run failed."""

    def fail(state: State) -> State:
        model.invoke("before")
        raise ValueError("no")

    graph = StateGraph(State).add_node("fail", fail).add_edge(START, "fail").compile()
    with pytest.raises(ValueError, match="no"):
        wrap(graph).invoke({"said": []})
    assert ends(server, *programs(server)) == ["error"]

    assert autellix.flush()  # or a late message would be taken for the next one
    server.clear()
    loop = StateGraph(State).add_node("again", node(model, "again"))
    loop.add_edge(START, "again").add_conditional_edges("again", lambda _: "again", ["again"])
    with pytest.raises(GraphRecursionError):
        wrap(loop.compile()).invoke({"said": []}, {"recursion_limit": 3})
    assert ends(server, *programs(server)) == ["error"]


async def test_a_cancelled_run_and_a_time_out_say_so(model: ChatOpenAI, server: FakeServer):
    """A cancelled run ends as cancelled; a run whose time is up likewise."""
    server.gates["slow"] = threading.Event()
    task = asyncio.create_task(wrap(chain(model, "slow")).ainvoke({"said": []}))
    await asyncio.to_thread(server.wait_for, calls=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends(server, *programs(server)) == ["cancelled"]

    assert autellix.flush()  # or a late message would be taken for the next one
    server.clear()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(wrap(chain(model, "slow")).ainvoke({"said": []}), 0.3)
    server.gates["slow"].set()
    assert ends(server, *programs(server)) == ["cancelled"]


def test_the_thread_id_is_the_conversation(model: ChatOpenAI, server: FakeServer):
    """Two runs of a conversation are two programs that name it."""
    graph = wrap(chain(model, "a", checkpointer=InMemorySaver()))
    for _ in range(2):
        graph.invoke({"said": []}, {"configurable": {"thread_id": "user-7"}})
    assert [c.headers["x-autellix-conversation"] for c in server.calls] == ["user-7"] * 2
    assert len(programs(server)) == 2


@pytest.mark.parametrize(("resume", "count"), [("same", 1), ("new", 2)])
def test_a_resumed_run_is_the_same_program_or_a_new_one(
    model: ChatOpenAI, server: FakeServer, resume: Any, count: int
):
    """After an interrupt the run goes on in its program, or in a new one, as asked."""

    def ask(state: State) -> State:
        return {"said": [interrupt("sure?"), str(model.invoke("after").content)]}

    graph = StateGraph(State).add_node("a", node(model, "before")).add_node("ask", ask)
    graph.add_edge(START, "a").add_edge("a", "ask")
    wrapped = wrap(graph.compile(checkpointer=InMemorySaver()), resume=resume)
    config: Any = {"configurable": {"thread_id": "t"}}
    wrapped.invoke({"said": []}, config)
    assert wrapped.get_state(config).next == ("ask",)
    result = wrapped.invoke(Command(resume="yes"), config)
    assert result["said"] == ["echo: before", "yes", "echo: after"]
    assert len(programs(server)) == count


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word} is a word"


@tool
def broken(word: str) -> str:
    """Fail."""
    raise TimeoutError("too slow")


def tool_graph(model: ChatOpenAI, which: Any) -> Any:
    """Model → tool → model."""

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.bind_tools([which]).invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(think)
    graph.add_node("act", ToolNode([which], handle_tool_errors=False))
    graph.add_edge(START, "think").add_edge("act", "think")
    graph.add_conditional_edges("think", lambda s: "act" if s["messages"][-1].tool_calls else END)
    return graph.compile()


def test_a_tool_reports_its_start_and_end(model: ChatOpenAI, server: FakeServer):
    """The server learns the tool's name and how long the program waited for it."""
    server.tool_calls_next.append([("look_up", {"word": "fox"})])
    result = wrap(tool_graph(model, look_up)).invoke({"messages": [HumanMessage("go")]})
    assert isinstance(result["messages"][-1], AIMessage)
    ends(server, *programs(server))
    events = [e.body for e in server.events if "tool" in e.body]
    assert [(e["event"], e["tool"]) for e in events] == [("start", "look_up"), ("end", "look_up")]
    assert events[0]["id"] == events[1]["id"]


def test_a_tool_that_fails_is_reported_and_ends_the_program(model: ChatOpenAI, server: FakeServer):
    """A tool's time-out closes the wait, and the program ends as an error."""
    server.tool_calls_next.append([("broken", {"word": "fox"})])
    with pytest.raises(TimeoutError, match="too slow"):
        wrap(tool_graph(model, broken)).invoke({"messages": [HumanMessage("go")]})
    assert ends(server, *programs(server)) == ["error"]
    events = [e.body for e in server.events if "tool" in e.body]
    assert [e["event"] for e in events] == ["start", "end"]
    assert events[1]["ok"] is False


def test_it_is_still_a_graph(model: ChatOpenAI, server: FakeServer):
    """It is of the same type, draws, has state, and is not wrapped twice."""
    plain = chain(model, "a", checkpointer=InMemorySaver())
    graph = wrap(plain)
    assert isinstance(graph, type(plain))
    assert isinstance(graph, Pregel)
    assert wrap(graph) is graph
    assert graph is not plain
    assert "a" in graph.get_graph().draw_mermaid()
    assert type(graph.copy()) is type(graph)
    assert type(graph).__name__ == type(plain).__name__
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke({"said": []}, config)
    assert graph.get_state(config).values["said"] == ["echo: a"]


def test_wrap_of_the_sdk_finds_the_adapter(model: ChatOpenAI, server: FakeServer):
    """``autellix.wrap`` takes a graph and its options."""
    autellix.wrap(chain(model, "a"), name="planner").invoke({"said": []})
    (session,) = programs(server)
    assert server.wait_event("PUT", session).body["name"] == "planner"


def test_the_functional_api(model: ChatOpenAI, server: FakeServer):
    """An entrypoint is a graph too."""

    @entrypoint()
    def flow(text: str) -> str:
        return str(model.invoke(text).content)

    graph = wrap(flow)
    assert [graph.invoke("a"), graph.invoke("b")] == ["echo: a", "echo: b"]
    assert list(programs(server).values()) == [["a"], ["b"]]


def test_a_prebuilt_agent_can_be_wrapped(model: ChatOpenAI, server: FakeServer):
    """What an agent maker returns is a graph like any other."""
    from langgraph.prebuilt import create_react_agent

    with pytest.warns(DeprecationWarning, match="create_react_agent has been moved"):
        agent = wrap(create_react_agent(model, tools=[look_up]))
    server.tool_calls_next.append([("look_up", {"word": "fox"})])
    agent.invoke({"messages": [HumanMessage("hi")]})
    assert [len(calls) for calls in programs(server).values()] == [2]


def test_a_callback_does_for_who_cannot_wrap(model: ChatOpenAI, server: FakeServer):
    """One callback per run is one program per run, sync."""
    graph = chain(model, "a", "b")
    for _ in range(2):
        graph.invoke({"said": []}, {"callbacks": [Callback("planner")]})
    found = programs(server)
    assert list(found.values()) == [["a", "b"]] * 2
    ends(server, *found)


async def test_a_callback_works_async_too(model: ChatOpenAI, server: FakeServer):
    """And async, in a task of its own, so that the caller's context stays clean."""
    graph = chain(model, "a", "b")
    await asyncio.create_task(graph.ainvoke({"said": []}, {"callbacks": [Callback()]}))
    found = programs(server)
    assert list(found.values()) == [["a", "b"]]
    assert ends(server, *found) == ["ok"]

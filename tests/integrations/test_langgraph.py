"""A wrapped graph: each run is one program, however it is run, and nothing stays open."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
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

import autellix
from autellix.integrations.langgraph import Callback, wrap
from autellix.testing import FakeServer

from .graphs import State, chain, drain, ends, needs_timeout, node, programs


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


@needs_timeout
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
    arrived = asyncio.create_task(asyncio.to_thread(server.wait_for, calls=1))

    async def until_the_call_is_there() -> None:
        async with asyncio.timeout(None) as limit:
            arrived.add_done_callback(lambda _: limit.reschedule(0))
            await wrap(chain(model, "slow")).ainvoke({"said": []})

    with pytest.raises(asyncio.TimeoutError):
        await until_the_call_is_there()
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


@pytest.mark.parametrize(("session_per", "count"), [("run", 4), ("conversation", 3)])
def test_a_conversation_is_one_program_if_asked(
    model: ChatOpenAI, server: FakeServer, session_per: Any, count: int
):
    """Two runs of a thread are numbered on; a run without a thread is by itself."""
    graph = StateGraph(State).add_node("a", node(model, "turn"))
    graph.add_edge(START, "a")
    wrapped = wrap(graph.compile(checkpointer=InMemorySaver()), session_per=session_per)
    for thread in ("t", "t", "other"):
        wrapped.invoke({"said": []}, {"configurable": {"thread_id": thread}})
    without = wrap(graph.compile(), session_per=session_per)
    without.invoke({"said": []})
    assert len(programs(server)) == count
    first, second, *_ = server.calls
    assert (first.session == second.session) is (session_per == "conversation")
    assert len({(call.session, call.thread, call.seq) for call in server.calls}) == 4


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


@pytest.mark.parametrize("is_called", [False, True])
def test_a_tool_in_a_graph_in_a_graph_reports_once(
    model: ChatOpenAI, server: FakeServer, is_called: bool
):
    """Both graphs are wrapped: one watch does; and other callbacks still reach the inner graph."""

    class Seen(BaseCallbackHandler):
        tools = 0

        def on_tool_start(self, *_: Any, **__: Any) -> None:
            self.tools += 1

    inner, seen = wrap(tool_graph(model, look_up)), Seen()
    outer = StateGraph(MessagesState)
    outer.add_node("sub", (lambda state: inner.invoke(state)) if is_called else inner)
    outer.add_edge(START, "sub")
    start = {"messages": [HumanMessage("go")]}
    for graph in (wrap(outer.compile()), outer.compile()):
        server.tool_calls_next.append([("look_up", {"word": "fox"})])
        graph.invoke(start, {"callbacks": [seen]})
    ends(server, *programs(server))
    events = [e.body for e in server.events if "tool" in e.body]
    assert [e["event"] for e in events] == ["start", "end"] * 2
    assert seen.tools == 2


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


DIAMOND = {
    "plan": set(), "left": {"plan"}, "s1": {"plan"}, "s2": {"s1"}, "join": {"left", "s2"},
}  # fmt: skip


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "astream", "nested"])
async def test_the_dag_of_a_wrapped_graph_is_exact(
    model: ChatOpenAI, server: FakeServer, dag_of: Any, way: str
):
    """Plan → left, subgraph(s1 → s2) → join: also if the subgraph is wrapped, and with a role."""
    inner = chain(model, "s1", "s2", name="inner")
    graph = StateGraph(State).add_node("sub", wrap(inner) if way == "nested" else inner)
    for text in ("plan", "left", "join"):
        graph.add_node(text, node(model, text))
    graph.add_edge(START, "plan").add_edge("plan", "left").add_edge("plan", "sub")
    graph.add_edge(["left", "sub"], "join")
    wrapped = wrap(graph.compile(), role="delegated")
    server.together("left", "s1")
    if way == "invoke":
        await asyncio.to_thread(wrapped.invoke, {"said": []})
    elif way == "astream":
        await drain(wrapped.astream({"said": []}))
    else:
        await wrapped.ainvoke({"said": []})
    (session,) = programs(server)
    assert dag_of(server) == DIAMOND
    assert {call.headers["x-autellix-role"] for call in server.calls} == {"delegated"}
    assert await asyncio.to_thread(ends, server, session) == ["ok"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_exception_in_a_branch_leaves_nothing_open(
    model: ChatOpenAI, server: FakeServer, is_async: bool
):
    """One of two branches fails while the other's call runs; the program ends as an error."""
    failing = threading.Event()

    def fail(_: State) -> State:
        server.wait_for(calls=1)
        failing.set()
        raise RuntimeError("broken branch")

    graph = StateGraph(State).add_node("left", node(model, "left")).add_node("right", fail)
    graph.add_edge(START, "left").add_edge(START, "right")
    wrapped = wrap(graph.compile())
    server.gates["left"] = failing
    with pytest.raises(RuntimeError, match="broken branch"):
        await (
            wrapped.ainvoke({"said": []})
            if is_async
            else asyncio.to_thread(wrapped.invoke, {"said": []})
        )
    (session,) = programs(server)
    assert await asyncio.to_thread(ends, server, session) == ["error"]
    assert autellix.status().sessions == 0


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

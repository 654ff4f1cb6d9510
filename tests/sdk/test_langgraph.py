"""LangGraph and LangChain: unmodified graphs, every call in its session and thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")

import operator

import openai
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

import autellix
from autellix.testing import FakeServer

from .happens_before import dag_of
from .talk import Talk

#: What LangGraph says of a node does not reach async nodes before Python 3.11.
needs_context = pytest.mark.skipif(sys.version_info < (3, 11), reason="no context in async nodes")


class State(TypedDict):
    said: Annotated[list[str], operator.add]


@pytest.fixture
async def model(server: FakeServer):
    with openai.DefaultHttpxClient() as client:
        async with openai.DefaultAsyncHttpxClient() as async_client:
            yield ChatOpenAI(
                model="fake", max_retries=0, http_client=client, http_async_client=async_client
            )


def node(model: ChatOpenAI, text: str):
    def call(state: State) -> State:
        return {"said": [str(model.invoke(text).content)]}

    return call


def anode(model: ChatOpenAI, text: str):
    async def call(state: State) -> State:
        return {"said": [str((await model.ainvoke(text)).content)]}

    return call


def counted(make: Any, model: ChatOpenAI, name: str) -> Any:
    """Return a node that says its name and how often it has run."""
    runs = itertools.count()

    def call(state: State) -> Any:
        return make(model, f"{name}{next(runs)}")(state)

    async def acall(state: State) -> Any:
        return await make(model, f"{name}{next(runs)}")(state)

    return acall if make is anode else call


def node_of_messages(model: ChatOpenAI) -> Any:
    return lambda _: {"messages": [model.invoke("last")]}


def anode_of_messages(model: ChatOpenAI) -> Any:
    async def call(_: Any) -> Any:
        return {"messages": [await model.ainvoke("last")]}

    return call


def tool_loop(model: ChatOpenAI) -> Any:
    """Agent → tools, which ask the model → agent."""
    from langgraph.prebuilt import ToolNode, tools_condition

    def ask(question: str) -> str:
        return str(model.invoke(question).content)

    async def aask(question: str) -> str:
        return str((await model.ainvoke(question)).content)

    tool = StructuredTool.from_function(ask, aask, name="ask", description="Ask the model.")
    bound = model.bind_tools([tool])

    def call(state: MessagesState) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    async def acall(state: MessagesState) -> Any:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("agent", RunnableLambda(call, acall))
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "agent").add_edge("tools", "agent")
    graph.add_conditional_edges("agent", tools_condition)
    return graph.compile()


def diamond(make: Any, model: ChatOpenAI, **options: Any) -> Any:
    """Plan → b1, b2, sub(s1 → s2) → join."""
    inner = StateGraph(State)
    inner.add_node("s1", make(model, "s1"))
    inner.add_node("s2", make(model, "s2"))
    inner.add_edge(START, "s1")
    inner.add_edge("s1", "s2")
    inner.add_edge("s2", END)
    graph = StateGraph(State)
    for name in ("plan", "b1", "b2", "join"):
        graph.add_node(name, make(model, name))
    graph.add_node("sub", inner.compile())
    graph.add_edge(START, "plan")
    for name in ("b1", "b2", "sub"):
        graph.add_edge("plan", name)
    graph.add_edge(["b1", "b2", "sub"], "join")
    graph.add_edge("join", END)
    return graph.compile(**options)


def test_sync_diamond_with_subgraph(model: ChatOpenAI, server: FakeServer):
    """Plan and join on the main thread; three branches, and the subgraph is one chain."""
    talk = Talk(server)
    server.together("b1", "b2", "s1")
    with autellix.session() as session:
        diamond(node, model).invoke({"said": []})
    talk.close()
    threads = talk.threads
    assert talk.sessions == {session.id}
    assert threads["plan"] == (0, 0)
    assert threads["join"] == (0, 1)
    assert len({threads[n][0] for n in ("b1", "b2", "s1")} | {0}) == 4
    assert threads["s2"] == (threads["s1"][0], 1)
    assert {talk.calls[n].parent for n in ("b1", "b2", "s1")} == {(0, 1)}
    assert talk.calls["b1"].node is not None
    assert talk.calls["b1"].node.startswith("b1")


async def test_async_diamond_with_checkpointer(model: ChatOpenAI, server: FakeServer):
    """Nodes as tasks: right session, branches apart, and nothing of another run."""
    talk = Talk(server)
    graph = diamond(anode, model, checkpointer=InMemorySaver())

    async def one(name: str) -> str:
        async with autellix.session(name) as session:
            await graph.ainvoke({"said": []}, {"configurable": {"thread_id": name}})
            return session.id

    ids = await asyncio.gather(one("a"), one("b"))
    talk.close()
    for id in ids:
        mine = [c for c in server.calls if c.session == id]
        threads = {c.text: c.thread for c in mine}
        assert len(mine) == 6
        assert len({threads["b1"], threads["b2"], threads["s1"]}) == 3


async def test_streams_and_events(model: ChatOpenAI, server: FakeServer):
    """stream, astream, astream_events, ainvoke of sync nodes."""
    sync_graph, async_graph = diamond(node, model), diamond(anode, model)
    start: State = {"said": []}
    async with autellix.session() as session:
        list(sync_graph.stream(start, stream_mode="messages", subgraphs=True))
        await sync_graph.ainvoke(start)
        async for _ in async_graph.astream(start, stream_mode="updates"):
            pass
        async for _ in async_graph.astream_events(start, version="v2"):
            pass
    assert len(server.calls) == 24
    assert {c.session for c in server.calls} == {session.id}


def test_tool_loop_with_parallel_tools_that_call_the_model(model: ChatOpenAI, server: FakeServer):
    """Agent → two tools at once → agent: two forks, one join."""
    from langgraph.prebuilt import ToolNode, tools_condition

    talk = Talk(server)

    @tool
    def ask(question: str) -> str:
        """Ask the model."""
        return str(model.invoke(question).content)

    bound = model.bind_tools([ask])

    class Chat(TypedDict):
        messages: Annotated[list[Any], operator.add]

    graph = StateGraph(Chat)
    graph.add_node("agent", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([ask]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    server.tool_calls_next.append([("ask", {"question": "q1"}), ("ask", {"question": "q2"})])
    server.together("q1", "q2")
    with autellix.session() as session:
        graph.compile().invoke({"messages": [("user", "go")]})
    talk.close()
    assert talk.sessions == {session.id}
    first, last = (c for c in server.calls if c.text not in ("q1", "q2"))
    assert (first.thread, last.thread) == (0, 0)
    assert len({talk.threads["q1"][0], talk.threads["q2"][0], 0}) == 3


def make_agent(model: ChatOpenAI, tools: list[Any]) -> Any:
    """Return LangChain's agent; where LangChain is not installed, the one LangGraph still has."""
    try:
        from langchain.agents import create_agent
    except ImportError:
        from langgraph.prebuilt import create_react_agent

        with pytest.warns(DeprecationWarning, match="create_react_agent has been moved"):
            return create_react_agent(model, tools)
    return create_agent(model, tools)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=needs_context)])
async def test_a_created_agent(
    model: ChatOpenAI, server: FakeServer, is_async: bool, is_wrapped: bool
):
    """Agent → two tools at once that call the model → agent: exact, in its session or its own."""
    if is_wrapped:
        pytest.importorskip("autellix.integrations", reason="the adapters are not installed here")

    def ask(question: str) -> str:
        return str(model.invoke(question).content)

    async def aask(question: str) -> str:
        return str((await model.ainvoke(question)).content)

    ask_tool = StructuredTool.from_function(ask, aask, name="ask", description="Ask the model.")
    agent = make_agent(model, [ask_tool])
    agent = autellix.wrap(agent, name="agent") if is_wrapped else agent
    server.tool_calls_next.append([("ask", {"question": "q1"}), ("ask", {"question": "q2"})])
    server.together("q1", "q2")
    server.answers["q1"] = server.answers["q2"] = "known"
    start = {"messages": [("user", "go")]}
    async with contextlib.nullcontext() if is_wrapped else autellix.session("outer") as outer:
        result = await agent.ainvoke(start) if is_async else agent.invoke(start)
    assert [m.type for m in result["messages"]] == ["human", "ai", "tool", "tool", "ai"]
    (session,) = {call.session for call in server.calls}
    assert session is not None
    assert is_wrapped or session == outer.id
    assert server.wait_event("DELETE", session).path.endswith("reason=ok")
    assert dag_of(server) == {"go": set(), "q1": {"go"}, "q2": {"go"}, "known": {"q1", "q2"}}
    assert len([e for e in server.events if "tool" in e.body]) == (4 if is_wrapped else 0)


def test_batch_parallel_stream_and_send(model: ChatOpenAI, server: FakeServer):
    """The other ways in which LangChain makes threads."""
    talk = Talk(server)
    graph = StateGraph(State)
    graph.add_node("work", lambda state: {"said": [str(model.invoke(state["said"][-1]).content)]})
    server.together("send0", "send1", "send2")
    graph.add_conditional_edges(
        START, lambda _: [Send("work", {"said": [f"send{i}"]}) for i in range(3)], ["work"]
    )
    parallel = RunnableParallel(a=model, b=model.with_retry())
    with autellix.session() as session:
        model.batch(["x1", "x2", "x3"])
        parallel.invoke("both")
        list(model.stream("streamed"))
        graph.compile().invoke({"said": []})
    talk.close()
    assert len(server.calls) == 9
    assert talk.sessions == {session.id}
    assert len({talk.threads[f"send{i}"][0] for i in range(3)}) == 3


async def test_abatch_and_functional_api(model: ChatOpenAI, server: FakeServer):
    """abatch, and tasks of the functional API."""
    from langgraph.func import entrypoint, task

    @task
    def sync_part(text: str) -> str:
        return str(model.invoke(text).content)

    @task
    async def async_part(text: str) -> str:
        return str((await model.ainvoke(text)).content)

    @entrypoint()
    def sync_flow(texts: list[str]) -> list[str]:
        return [f.result() for f in [sync_part(t) for t in texts]]

    @entrypoint()
    async def async_flow(texts: list[str]) -> list[str]:
        return list(await asyncio.gather(*(async_part(t) for t in texts)))

    async with autellix.session() as session:
        await model.abatch(["a", "b"])
        await asyncio.to_thread(sync_flow.invoke, ["c", "d"])
        if sys.version_info >= (3, 11):  # LangGraph cannot do this one before
            await async_flow.ainvoke(["e", "f"])
    assert len(server.calls) in (4, 6)
    assert {c.session for c in server.calls} == {session.id}


def test_a_stream_drained_after_its_session_is_the_documented_limit(
    model: ChatOpenAI, server: FakeServer
):
    """The first step may be in the session, the rest is not: user error; a graph wrapper helps."""
    autellix.init(scope="explicit")
    with autellix.session() as session:
        steps = diamond(node, model).stream({"said": []})
        next(steps)
    list(steps)
    tagged = [c for c in server.calls if c.session == session.id]
    assert 1 <= len(tagged) < len(server.calls) == 6


def test_wrap_of_a_graph_makes_each_run_a_session(model: ChatOpenAI, server: FakeServer):
    """The adapter is found by the graph's package; the type stays a graph."""
    pytest.importorskip("autellix.integrations.langgraph")
    graph = diamond(node, model)
    wrapped = autellix.wrap(graph)
    assert isinstance(wrapped, type(graph))
    for _ in range(2):
        wrapped.invoke({"said": []})
    assert len({c.session for c in server.calls}) == 2
    assert len(server.calls) == 12


async def test_a_decorated_async_generator_round_astream(model: ChatOpenAI, server: FakeServer):
    """Stepped by a web framework, all calls are one session."""
    graph = diamond(anode, model)

    @autellix.session
    async def answer():
        async for update in graph.astream({"said": []}, stream_mode="updates"):
            yield update

    seen = [update async for update in answer()]
    assert len(seen) == 5
    assert len({c.session for c in server.calls}) == 1
    assert len(server.calls) == 6


DIAMOND = {
    "plan": set(),
    "b1": {"plan"},
    "b2": {"plan"},
    "s1": {"plan"},
    "s2": {"s1"},
    "join": {"b1", "b2", "s2"},
}


def test_the_diamond_is_exact_sync(model: ChatOpenAI, server: FakeServer):
    """Plan → b1, b2, sub(s1 → s2) → join: these parents and no others."""
    server.together("b1", "b2", "s1")
    with autellix.session():
        diamond(node, model).invoke({"said": []})
    assert dag_of(server) == DIAMOND


@needs_context
async def test_the_diamond_is_exact_async(model: ChatOpenAI, server: FakeServer):
    """The same with nodes as tasks: the subgraph's second step does not wait for b1 and b2."""
    server.together("b1", "b2", "s1")
    async with autellix.session():
        await diamond(anode, model).ainvoke({"said": []})
    assert dag_of(server) == DIAMOND


@pytest.mark.parametrize("make", [node, pytest.param(anode, marks=needs_context)])
async def test_a_subgraph_with_branches_is_exact(model: ChatOpenAI, server: FakeServer, make: Any):
    """Plan → b, sub(p → q1, q2 → r, in a loop of two) → join: steps inside, not across."""
    inner = StateGraph(State)
    for name in ("p", "q1", "q2", "r"):
        inner.add_node(name, counted(make, model, name))
    inner.add_edge(START, "p")
    inner.add_edge("p", "q1").add_edge("p", "q2")
    inner.add_edge(["q1", "q2"], "r")
    inner.add_conditional_edges("r", lambda s: "p" if len(s["said"]) < 8 else END)
    graph = StateGraph(State)
    for name in ("plan", "b", "join"):
        graph.add_node(name, make(model, name))
    graph.add_node("sub", lambda _: {"said": inner_graph.invoke({"said": []})["said"]})
    inner_graph = inner.compile()
    if make is anode:

        async def sub(_: State) -> State:
            return {"said": (await inner_graph.ainvoke({"said": []}))["said"]}

        graph.nodes.pop("sub")
        graph.add_node("sub", sub)
    graph.add_edge(START, "plan").add_edge("plan", "b").add_edge("plan", "sub")
    graph.add_edge(["b", "sub"], "join")
    server.together("b", "p0")
    server.together("q10", "q20")
    server.together("q11", "q21")
    async with autellix.session():
        if make is anode:
            await graph.compile().ainvoke({"said": []})
        else:
            await asyncio.to_thread(graph.compile().invoke, {"said": []})
    assert dag_of(server) == {
        "plan": set(), "b": {"plan"}, "p0": {"plan"},
        "q10": {"p0"}, "q20": {"p0"}, "r0": {"q10", "q20"},
        "p1": {"r0"}, "q11": {"p1"}, "q21": {"p1"}, "r1": {"q11", "q21"},
        "join": {"b", "r1"},
    }  # fmt: skip


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=needs_context)])
async def test_a_tool_loop_is_exact(model: ChatOpenAI, server: FakeServer, is_async: bool):
    """Agent → two tools at once that call the model → agent, at the top and in a subgraph."""
    outer = StateGraph(MessagesState)
    outer.add_node("agent", tool_loop(model))
    outer.add_node("last", anode_of_messages(model) if is_async else node_of_messages(model))
    outer.add_edge(START, "agent").add_edge("agent", "last")
    server.tool_calls_next.append([("ask", {"question": "q1"}), ("ask", {"question": "q2"})])
    server.together("q1", "q2")
    server.answers["q1"] = server.answers["q2"] = "known"
    server.answers["known"] = "said"
    start = {"messages": [("user", "go")]}
    async with autellix.session():
        if is_async:
            await outer.compile().ainvoke(start)
        else:
            await asyncio.to_thread(outer.compile().invoke, start)
    assert dag_of(server) == {
        "go": set(), "q1": {"go"}, "q2": {"go"}, "known": {"q1", "q2"}, "last": {"known"},
    }  # fmt: skip


@pytest.mark.parametrize("make", [node, anode])
async def test_a_fan_out_with_send_is_exact(model: ChatOpenAI, server: FakeServer, make: Any):
    """Split → three workers → reduce."""

    def call(state: State) -> State:
        return {"said": [str(model.invoke(state["said"][-1]).content)]}

    async def acall(state: State) -> State:
        return {"said": [str((await model.ainvoke(state["said"][-1])).content)]}

    graph = StateGraph(State).add_node("split", make(model, "split"))
    graph.add_node("work", call if make is node else acall)
    graph.add_node("reduce", make(model, "reduce"))
    graph.add_edge(START, "split").add_edge("work", "reduce")
    graph.add_conditional_edges(
        "split", lambda _: [Send("work", {"said": [f"w{i}"]}) for i in range(3)], ["work"]
    )
    server.together("w0", "w1", "w2")
    async with autellix.session():
        if make is node:
            await asyncio.to_thread(graph.compile().invoke, {"said": []})
        else:
            await graph.compile().ainvoke({"said": []})
    workers = {f"w{i}": {"split"} for i in range(3)}
    assert dag_of(server) == {"split": set(), **workers, "reduce": set(workers)}


@needs_context
async def test_the_functional_api_is_exact(model: ChatOpenAI, server: FakeServer):
    """A task, two at once, and a last one, with a call of the flow itself in between."""
    from langgraph.func import entrypoint, task

    @task
    async def part(text: str) -> str:
        return str((await model.ainvoke(text)).content)

    @entrypoint()
    async def flow(_: str) -> str:
        await part("a")
        await model.ainvoke("mine")
        await asyncio.gather(part("b"), part("c"))
        return await part("d")

    server.together("b", "c")
    async with autellix.session():
        await flow.ainvoke("go")
    found = dag_of(server)
    assert found["mine"] == {"a"}
    assert found["b"] == found["c"] == {"mine"}
    assert found["d"] == {"b", "c"}

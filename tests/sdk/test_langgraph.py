"""LangGraph and LangChain: unmodified graphs, every call in its session and thread."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")

import operator

import openai
from langchain_core.runnables import RunnableParallel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

import autellix
from autellix.testing import FakeServer

from .talk import Talk


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


def test_create_agent_batch_parallel_and_send(model: ChatOpenAI, server: FakeServer):
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
    import sys

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

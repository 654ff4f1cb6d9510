"""Runs of wrapped graphs that do not go straight: v3 streams, resumed, timed out; exact orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Command, Send, interrupt

import autellix
from autellix.integrations.langgraph import Callback, wrap
from autellix.testing import FakeServer

from .graphs import State, chain, drain, ends, needs_context, node, programs

T = TypeVar("T", bound=Callable[..., Any])


def v3(test: T) -> T:
    """Mark a test of ``version="v3"``, which only newer ones have, as an experiment."""
    is_older = "stream_events" not in vars(Pregel)
    is_quiet = pytest.mark.filterwarnings("ignore:The v3 streaming protocol:Warning")
    return pytest.mark.skipif(is_older, reason="this LangGraph has no v3")(is_quiet(test))


@v3
@pytest.mark.parametrize("part", ["output", "values"])
def test_a_v3_stream_is_one_program(model: ChatOpenAI, server: FakeServer, part: str):
    """Read by its values, or driven to its output; the caller is in no session meanwhile."""
    graph = wrap(chain(model, "a", "b"))
    for _ in range(2):
        run = graph.stream_events({"said": []}, version="v3")
        if part == "output":
            assert len(run.output["said"]) == 2
        else:
            assert [autellix.current_session() for _ in run.values] == [None] * 3
    assert list(programs(server).values()) == [["a", "b"]] * 2
    assert ends(server, *programs(server)) == ["ok"] * 2


@v3
async def test_an_async_v3_stream_is_one_program(model: ChatOpenAI, server: FakeServer):
    """Two readers of one run, each in a task of its own, drive it together."""
    run = await wrap(chain(model, "a", "b")).astream_events({"said": []}, version="v3")
    values, messages = await asyncio.gather(drain(run.values), drain(run.messages))
    assert (len(values), len(messages)) == (3, 2)
    assert list(programs(server).values()) == [["a", "b"]]
    assert await asyncio.to_thread(ends, server, *programs(server)) == ["ok"]


@v3
async def test_a_v3_stream_that_is_left_ends_its_program(model: ChatOpenAI, server: FakeServer):
    """Aborted by the end of its block, after the first call."""
    graph = wrap(chain(model, "a", "b"))
    with graph.stream_events({"said": []}, version="v3") as run:
        for _ in run:
            if server.calls:
                break
    async with await graph.astream_events({"said": []}, version="v3") as arun:
        async for _ in arun:
            if len(programs(server)) == 2:
                break
    assert await asyncio.to_thread(ends, server, *programs(server)) == ["ok"] * 2
    assert autellix.status().sessions == 0


@v3
def test_a_v3_stream_that_fails_ends_as_an_error(model: ChatOpenAI, server: FakeServer):
    """The error comes out where the run is driven."""

    def fail(_: State) -> State:
        model.invoke("before")
        raise ValueError("no")

    graph = StateGraph(State).add_node("fail", fail).add_edge(START, "fail").compile()
    run = wrap(graph).stream_events({"said": []}, version="v3")
    with pytest.raises(ValueError, match="no"):
        _ = run.output
    assert ends(server, *programs(server)) == ["error"]


@pytest.mark.parametrize("is_wrapped_inside", [False, True])
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=needs_context)])
async def test_an_interrupt_in_a_subgraph_resumes_as_the_same_program(
    model: ChatOpenAI, server: FakeServer, is_async: bool, is_wrapped_inside: bool
):
    """The run around it is resumed by its thread, and the subgraph goes on in its program."""

    def ask(_: State) -> State:
        return {"said": [interrupt("sure?")]}

    inner = StateGraph(State).add_sequence([("s1", node(model, "s1")), ask, node_of(model, "s2")])
    inside = inner.add_edge(START, "s1").compile()
    outer = StateGraph(State).add_node("plan", node(model, "plan"))
    outer.add_node("sub", wrap(inside) if is_wrapped_inside else inside)
    graph = wrap(outer.add_edge(START, "plan").add_edge("plan", "sub").compile(InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "t"}}
    for start in ({"said": []}, Command(resume="yes")):
        if is_async:
            await graph.ainvoke(start, config)
        else:
            graph.invoke(start, config)
    assert "yes" in graph.get_state(config).values["said"]
    assert list(programs(server).values()) == [["plan", "s1", "s2"]]


def node_of(model: ChatOpenAI, text: str) -> tuple[str, Any]:
    """Return a node and its name, for a sequence."""
    return text, node(model, text)


@pytest.mark.parametrize(("resume", "count"), [("same", 1), ("new", 2)])
async def test_a_run_that_goes_on_after_an_edit_is_the_same_program_or_a_new_one(
    model: ChatOpenAI, server: FakeServer, resume: Any, count: int
):
    """Stopped before a node, its state edited by a human, and continued with no input."""
    plain = chain(model, "a", "b", checkpointer=InMemorySaver(), interrupt_before=["b"])
    graph = wrap(plain, resume=resume)
    config: Any = {"configurable": {"thread_id": "t"}}
    await graph.ainvoke({"said": []}, config)
    await graph.aupdate_state(config, {"said": ["edited"]})
    result = await graph.ainvoke(None, config)
    assert result["said"] == ["echo: a", "edited", "echo: b"]
    assert len(programs(server)) == count
    assert await asyncio.to_thread(ends, server, *programs(server)) == ["ok"] * count


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_order_of_a_wrapped_map_is_exact(
    model: ChatOpenAI, server: FakeServer, dag_of: Callable[..., Any], is_async: bool
):
    """Split → three parts by ``Send`` → reduce."""

    async def apart(state: Any) -> State:
        return {"said": [str((await model.ainvoke(state["text"])).content)]}

    def part(state: Any) -> State:
        return {"said": [str(model.invoke(state["text"]).content)]}

    graph = StateGraph(State).add_node(*node_of(model, "split")).add_node(*node_of(model, "reduce"))
    graph.add_node("part", apart if is_async else part)
    graph.add_edge(START, "split").add_edge("part", "reduce")
    graph.add_conditional_edges(
        "split", lambda _: [Send("part", {"text": f"p{i}"}) for i in range(3)], ["part"]
    )
    server.together("p0", "p1", "p2")
    wrapped = wrap(graph.compile())
    if is_async:
        await wrapped.ainvoke({"said": []})
    else:
        await asyncio.to_thread(wrapped.invoke, {"said": []})
    parts = {f"p{i}": {"split"} for i in range(3)}
    assert dag_of(server) == {"split": set(), **parts, "reduce": set(parts)}
    assert await asyncio.to_thread(ends, server, *programs(server)) == ["ok"]


@needs_context
async def test_the_order_of_a_wrapped_entrypoint_is_exact(
    model: ChatOpenAI, server: FakeServer, dag_of: Callable[..., Any]
):
    """The functional API: a task, two at once, a last one; each run is a program."""

    @task
    async def part(text: str) -> str:
        return str((await model.ainvoke(text)).content)

    @entrypoint()
    async def flow(_: str) -> str:
        await part("a")
        await asyncio.gather(part("b"), part("c"))
        return await part("d")

    server.together("b", "c")
    assert await wrap(flow).ainvoke("go") == "echo: d"
    assert dag_of(server) == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}
    assert await asyncio.to_thread(ends, server, *programs(server)) == ["ok"]


async def test_an_async_recursion_limit_ends_it_as_an_error(model: ChatOpenAI, server: FakeServer):
    """Three steps of a loop that has no end."""
    loop = StateGraph(State).add_node("again", node(model, "again"))
    loop.add_edge(START, "again").add_conditional_edges("again", lambda _: "again", ["again"])
    with pytest.raises(GraphRecursionError):
        await wrap(loop.compile()).ainvoke({"said": []}, {"recursion_limit": 3})
    assert len(server.calls) == 3
    assert await asyncio.to_thread(ends, server, *programs(server)) == ["error"]
    assert autellix.status().sessions == 0


@pytest.mark.parametrize("how", ["time", "cancel", "untold"])
async def test_a_run_that_ends_in_a_tool_leaves_nothing_open(
    model: ChatOpenAI, server: FakeServer, how: str
):
    """LangGraph's own ``step_timeout``, or a cancelled task: the wait for the tool ends too."""
    begun = asyncio.Event()

    @tool
    async def look_up(word: str) -> str:
        """Look a word up, for ever."""
        begun.set()
        await asyncio.Event().wait()
        return word

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.bind_tools([look_up]).ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(think).add_node("act", ToolNode([look_up]))
    compiled = graph.add_edge(START, "think").add_edge("think", "act").compile()
    compiled.step_timeout = 2.0 if how == "time" else None
    server.tool_calls_next.append([("look_up", {"word": "fox"})])
    wrapped = wrap(compiled, tools=how != "untold")
    run = asyncio.create_task(wrapped.ainvoke({"messages": [HumanMessage("go")]}))
    await begun.wait()
    if how != "time":
        run.cancel()
    with pytest.raises(asyncio.TimeoutError if how == "time" else asyncio.CancelledError):
        await run
    reason = "error" if how == "time" else "cancelled"
    assert await asyncio.to_thread(ends, server, *programs(server)) == [reason]
    told = [(e.body["event"], e.body.get("ok")) for e in server.events if "tool" in e.body]
    assert told == ([] if how == "untold" else [("start", None), ("end", False)])
    assert autellix.status().sessions == 0


@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_a_run_with_a_callback_that_goes_wrong_says_so(
    model: ChatOpenAI, server: FakeServer, how: str
):
    """Who cannot wrap learns as much: an exception in a node, and a cancelled task."""

    async def fail(_: State) -> State:
        await model.ainvoke("before")
        if how == "cancelled":
            await asyncio.Event().wait()
        raise ValueError("no")

    graph = StateGraph(State).add_node("fail", fail).add_edge(START, "fail").compile()
    config: Any = {"callbacks": [Callback("planner")]}
    run = asyncio.create_task(graph.ainvoke({"said": []}, config))
    await asyncio.to_thread(server.wait_for, calls=1)
    if how == "cancelled":
        run.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else ValueError):
        await run
    assert await asyncio.to_thread(ends, server, *programs(server)) == [how]
    assert autellix.status().sessions == 0

"""Graphs for the adapter's tests, and what a server saw of their runs."""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

import autellix
from autellix.testing import FakeServer

#: What LangGraph says of a node does not reach async nodes before Python 3.11.
needs_context = pytest.mark.skipif(sys.version_info < (3, 11), reason="no context in async nodes")
needs_timeout = pytest.mark.skipif(sys.version_info < (3, 11), reason="no asyncio.timeout")


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]


def node(model: ChatOpenAI, text: str):
    """A node that makes one call, sync or async as the graph is run."""

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


async def drain(chunks: Any) -> list[Any]:
    """Return all chunks of an async iterator."""
    return [chunk async for chunk in chunks]

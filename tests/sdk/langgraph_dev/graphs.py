"""Wrapped graphs for LangGraph's development server; ``langgraph.json`` names them."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.types import Send, interrupt
from typing_extensions import TypedDict

from autellix.integrations.langgraph import wrap

model = ChatOpenAI(model="fake", max_retries=0)


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]
    text: str


def node(text: str) -> Any:
    """Return a node that makes one call."""

    async def call(_: State) -> State:
        return {"said": [str((await model.ainvoke(text)).content)]}

    return call


async def part(state: State) -> State:
    """Ask what the item of the map says."""
    return {"said": [str((await model.ainvoke(state["text"])).content)]}


def ask(_: State) -> State:
    """Ask a human."""
    return {"said": [interrupt("sure?")]}


def fail(_: State) -> State:
    """Fail."""
    raise ValueError("no")


def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word} is a word"


def split(_: State) -> list[Send]:
    """Map over two items."""
    return [Send("part", {"text": text}) for text in ("left", "right")]


graph = StateGraph(State).add_node("plan", node("plan")).add_node("join", node("join"))
graph.add_node(part).add_edge(START, "plan").add_edge("part", "join")
graph.add_conditional_edges("plan", split, ["part"])
mapped = wrap(graph.compile(name="mapped"))

graph = StateGraph(State).add_sequence([("before", node("before")), ask, ("after", node("after"))])
asking = wrap(graph.add_edge(START, "before").compile(name="asking"))

graph = StateGraph(State).add_sequence([("before", node("before")), fail])
failing = wrap(graph.add_edge(START, "before").compile(name="failing"))

agent = wrap(create_agent(model, [look_up], name="agent"))

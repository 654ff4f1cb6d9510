"""A map-reduce graph: one node per topic by `Send`, all at the same time, then a summary.

`wrap` makes each run of the graph one program; without it the whole script would be one.
"""

from __future__ import annotations

import operator
import os
from typing import Annotated, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.types import Send

from autellix.integrations.langgraph import wrap

model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"), temperature=0)


class State(TypedDict):
    topics: list[str]
    facts: Annotated[list[str], operator.add]
    summary: str


def spread(state: State) -> list[Send]:
    return [Send("find_fact", {"topic": topic}) for topic in state["topics"]]


def find_fact(part: dict) -> dict:
    prompt = f"Tell one fact about the {part['topic']}."
    return {"facts": [model.invoke(prompt, max_tokens=24).text]}


def sum_up(state: State) -> dict:
    return {"summary": model.invoke("Sum up:\n" + "\n".join(state["facts"]), max_tokens=32).text}


builder = StateGraph(State).add_node(find_fact).add_node(sum_up)
builder.add_conditional_edges(START, spread, ["find_fact"]).add_edge("find_fact", "sum_up")
graph = wrap(builder.compile(name="facts"))

if __name__ == "__main__":
    for topics in (["sun", "moon", "sea"], ["fox", "crow"]):
        result = graph.invoke({"topics": topics, "facts": []})
        print(f"map-reduce: {len(result['facts'])} facts;", " ".join(result["summary"].split()))

"""A LangGraph graph of two parallel tool loops; the first turns of each must call the tool."""

from __future__ import annotations

import operator
import os
from typing import Annotated, TypedDict

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

import autellix  # the only line that autellix needs

model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"), temperature=0)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


def think(state: MessagesState) -> dict:
    turns = sum(message.type == "tool" for message in state["messages"])
    choice = "required" if turns < 2 else "none"
    with_tool = model.bind_tools([multiply], tool_choice=choice, strict=True)
    return {"messages": [with_tool.invoke(state["messages"], max_tokens=40)]}


def act_or_end(state: MessagesState) -> str:
    return "act" if state["messages"][-1].tool_calls else END


loop = StateGraph(MessagesState).add_node(think).add_node("act", ToolNode([multiply]))
loop.add_edge(START, "think").add_conditional_edges("think", act_or_end).add_edge("act", "think")
solver = loop.compile()


class Report(TypedDict):
    notes: Annotated[list[str], operator.add]
    text: str


def branch(question: str):
    return lambda _: {"notes": [solver.invoke({"messages": [question]})["messages"][-1].text]}


def report(state: Report) -> dict:
    return {"text": model.invoke("Sum up:\n" + "\n".join(state["notes"]), max_tokens=32).text}


graph = StateGraph(Report).add_node(report)
graph.add_node("apples", branch("An apple costs 6 cents. What do 7 apples cost?"))
graph.add_node("pears", branch("A pear costs 8 cents. What do 9 pears cost?"))
graph.add_edge(START, "apples").add_edge(START, "pears").add_edge(["apples", "pears"], "report")

if __name__ == "__main__":
    print("langgraph agent:", " ".join(graph.compile().invoke({"notes": []})["text"].split()))

"""A ReAct agent with two tools on LangGraph: think, act, look at the result, think again.

The bundled model calls no tool by itself, so the first turns must call one and the last must not;
with a larger model, leave `tool_choice` out. `wrap` makes each question a program, and tells the
server when a tool begins and ends.
"""

from __future__ import annotations

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from autellix.integrations.langgraph import wrap

FORCED_TURNS = 2
PRICES = {"apple": 6, "pear": 8}


@tool
def price(fruit: str) -> str:
    """Look up what one fruit costs, in cents."""
    return f"{PRICES.get(fruit.lower().rstrip('s'), 5)} cents"


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


TOOLS = [price, multiply]
model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"), temperature=0)


def think(state: MessagesState) -> dict:
    turns = sum(message.type == "tool" for message in state["messages"])
    name = TOOLS[turns].name if turns < FORCED_TURNS else "none"
    choice = name if name == "none" else {"type": "function", "function": {"name": name}}
    with_tools = model.bind_tools(TOOLS, tool_choice=choice, strict=True)
    return {"messages": [with_tools.invoke(state["messages"], max_tokens=40)]}


def act_or_end(state: MessagesState) -> str:
    return "act" if state["messages"][-1].tool_calls else END


builder = StateGraph(MessagesState).add_node(think).add_node("act", ToolNode(TOOLS))
builder.add_edge(START, "think").add_conditional_edges("think", act_or_end)
agent = wrap(builder.add_edge("act", "think").compile(name="shopping"))

if __name__ == "__main__":
    for question in ("What do 7 apples cost?", "What do 9 pears cost?"):
        messages = agent.invoke({"messages": [question]})["messages"]
        used = [message.name for message in messages if message.type == "tool"]
        print(f"react agent: {question} {used}:", " ".join(messages[-1].text.split())[:60])

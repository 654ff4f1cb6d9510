"""openai-agents: a triage agent hands the question to an agent with a tool.

The bundled model hands over and calls the tool only because it must (`tool_choice`); after a tool
the library lets the model speak.
"""

from __future__ import annotations

import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

import autellix

set_tracing_disabled(True)  # its traces would go to api.openai.com
MUST = ModelSettings(tool_choice="required", max_tokens=40, temperature=0)


@function_tool
@autellix.tool("timetable")
def next_train(town: str) -> str:
    """Say when the next train leaves."""
    return f"The next train to {town} leaves at 14:05."


@autellix.session("travel desk")
def main() -> None:
    name = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    model = OpenAIChatCompletionsModel(name, openai_client=AsyncOpenAI())
    trains = Agent(
        "trains",
        instructions="You answer questions about trains.",
        tools=[next_train],
        model=model,
        model_settings=MUST,
    )
    triage = Agent(
        "triage",
        instructions="You hand each question to the right agent.",
        handoffs=[trains],
        model=model,
        model_settings=MUST,
    )
    result = Runner.run_sync(triage, "When does the next train to Lyon leave?")
    answer = " ".join(str(result.final_output).split())[:80]
    print(f"hand-off: answered by {result.last_agent.name}: {answer}")


if __name__ == "__main__":
    main()

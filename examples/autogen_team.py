"""An AutoGen team of two: a writer and a critic take turns.

The package is `autogen-agentchat`, with the client from `autogen-ext[openai]`; `pyautogen` 0.10 is
an empty proxy for it.
"""

from __future__ import annotations

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

import autellix  # the only line that autellix needs

TURNS = 4


async def main() -> None:
    """Run the team."""
    client = OpenAIChatCompletionClient(
        model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"),
        max_tokens=24,
        temperature=0,
        model_info={
            "family": "unknown",
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "structured_output": False,
        },
    )
    writer = AssistantAgent("writer", client, system_message="You write short advertisements.")
    critic = AssistantAgent("critic", client, system_message="You say what to improve.")
    team = RoundRobinGroupChat([writer, critic], max_turns=TURNS)
    result = await team.run(task="An advertisement for a bicycle bell.")
    await client.close()
    last = result.messages[-1]
    print(f"autogen team: {len(result.messages) - 1} turns; {last.source} ended with:", end=" ")
    print(" ".join(last.to_text().split())[:80])


if __name__ == "__main__":
    asyncio.run(main())

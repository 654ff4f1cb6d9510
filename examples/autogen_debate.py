"""A debate in AutoGen: two sides speak at the same time, hear each other, and a judge decides.

Each agent is an AutoGen agent; who speaks when is plain asyncio. A round is a fork of two threads
of one program and a join: no line says so.
"""

from __future__ import annotations

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

import autellix

ROUNDS = 2
QUESTION = "Should a town ban cars from its centre?"
PRO = "You argue for it in one sentence."
CONTRA = "You argue against it in one sentence."


async def say(agent: AssistantAgent, task: str) -> str:
    """Return what an agent answers; it remembers what it was told before."""
    result = await agent.run(task=task)
    return " ".join(result.messages[-1].to_text().split())


@autellix.session("debate")
async def main() -> None:
    client = OpenAIChatCompletionClient(
        model=os.environ.get("OPENAI_MODEL", "gpt-4o-mini"),
        max_tokens=24,
        model_info={
            "family": "unknown",
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "structured_output": False,
        },
    )
    pro = AssistantAgent("pro", client, system_message=PRO)
    contra = AssistantAgent("contra", client, system_message=CONTRA)
    judge = AssistantAgent("judge", client, system_message="You say who was more convincing.")
    pro_said = contra_said = QUESTION
    for _ in range(ROUNDS):
        pro_said, contra_said = await asyncio.gather(say(pro, contra_said), say(contra, pro_said))
    verdict = await say(judge, f"{QUESTION}\nPro: {pro_said}\nContra: {contra_said}")
    await client.close()
    print(f"debate: {ROUNDS} rounds; the judge:", verdict[:80])


if __name__ == "__main__":
    asyncio.run(main())

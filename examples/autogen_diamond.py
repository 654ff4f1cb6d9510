"""An AutoGen graph of four agents: one drafts, two review at the same time, one decides.

`wrap` makes each run of the team one program; the two reviewers are threads of it.
"""

from __future__ import annotations

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow
from autogen_ext.models.openai import OpenAIChatCompletionClient

from autellix.integrations.autogen import wrap

TASKS = {
    "drafter": "You write one sentence.",
    "optimist": "You say what is good about it.",
    "pessimist": "You say what is bad about it.",
    "editor": "You decide.",
}


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
    agents = {n: AssistantAgent(n, client, system_message=text) for n, text in TASKS.items()}
    builder = DiGraphBuilder()
    for agent in agents.values():
        builder.add_node(agent)
    for reviewer in ("optimist", "pessimist"):
        builder.add_edge(agents["drafter"], agents[reviewer])
        builder.add_edge(agents[reviewer], agents["editor"])
    team = wrap(GraphFlow([*agents.values()], graph=builder.build()), name="review")
    result = await team.run(task="A slogan for a bakery.")
    await client.close()
    print("diamond:", ", ".join(dict.fromkeys(m.source for m in result.messages)))


if __name__ == "__main__":
    asyncio.run(main())

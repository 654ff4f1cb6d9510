"""Microsoft's Agent Framework: a writer drafts, two reviewers read at the same time, it rewrites.

The framework needs no adapter: `import autellix`, and a session where a program begins.
"""

from __future__ import annotations

import asyncio
import os

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

import autellix

OPTIONS = {"max_tokens": 24, "temperature": 0}


@autellix.session("poster")
async def main() -> None:
    name = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    client = OpenAIChatCompletionClient(name)
    writer = Agent(client, "You write one line for a poster.", name="writer")
    kind = Agent(client, "You say what is good about a text.", name="kind")
    strict = Agent(client, "You say what is bad about a text.", name="strict")
    draft = await writer.run("A poster for a summer fair.", options=OPTIONS)
    reviews = await asyncio.gather(*(a.run(draft.text, options=OPTIONS) for a in (kind, strict)))
    notes = "\n".join(review.text for review in reviews)
    final = await writer.run(f"Write it again.\n{draft.text}\n{notes}", options=OPTIONS)
    print(f"agent framework: {len(reviews)} reviews;", " ".join(final.text.split())[:80])


if __name__ == "__main__":
    asyncio.run(main())

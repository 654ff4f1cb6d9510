"""AG2 (`import ag2`): a planner is asked, two experts answer side by side, the planner goes on.

AG2 needs no adapter: `import autellix`, and a session where a program begins.
"""

from __future__ import annotations

import asyncio
import os

from ag2 import Agent
from ag2.config import OpenAIConfig

import autellix

PLACES = ("the old harbour", "the castle")


@autellix.session("day trip")
async def main() -> None:
    config = OpenAIConfig(os.environ.get("OPENAI_MODEL", "gpt-4o-mini"), max_completion_tokens=24)
    planner = Agent("planner", "You plan day trips.", config=config)
    guide = Agent("guide", "You describe a place in one sentence.", config=config)
    plan = await planner.ask(f"We want to see {' and '.join(PLACES)}. Where do we begin?")
    described = await asyncio.gather(*(guide.ask(f"Describe {place}.") for place in PLACES))
    texts = "\n".join(reply.body or "" for reply in described)
    last = await plan.ask(f"This is what the guide says:\n{texts}\nSum it up.")
    print(f"ag2: {len(described)} places;", " ".join((last.body or "").split())[:80])


if __name__ == "__main__":
    asyncio.run(main())

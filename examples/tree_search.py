"""A small tree search: five candidates at each level, scored at the same time; the best grows.

Each level is a fork of five threads of one program, and a join: no line says so.
"""

from __future__ import annotations

import asyncio
import os
import re

from openai import AsyncOpenAI

import autellix  # the only line that autellix needs

CHILDREN = 5
DEPTH = 2
MODEL = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")


async def ask(client: AsyncOpenAI, prompt: str, max_tokens: int, temperature: float) -> str:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=temperature,
    )
    return (answer.choices[0].message.content or "").strip()


async def expand(client: AsyncOpenAI, story: str) -> tuple[float, str]:
    """Return one continuation with its score: two calls, one after the other."""
    line = await ask(client, f"Go on with this story in one sentence:\n{story}", 24, 1.0)
    mark = await ask(client, f"Rate this from 1 to 9, with one digit:\n{line}", 4, 0.0)
    digits = re.findall(r"[1-9]", mark)
    return float(digits[0]) if digits else 0.0, line


async def main() -> None:
    async with AsyncOpenAI() as client:
        story = "A fox met a crow at the river."
        for _ in range(DEPTH):
            children = await asyncio.gather(*(expand(client, story) for _ in range(CHILDREN)))
            story += " " + max(children)[1]
    print(f"tree search: {DEPTH} levels of {CHILDREN};", " ".join(story.split())[:80])


if __name__ == "__main__":
    asyncio.run(main())

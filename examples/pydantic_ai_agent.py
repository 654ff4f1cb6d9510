"""pydantic-ai: three reviews are read at the same time into a typed answer, then summed up.

`NativeOutput` sends the type as a JSON schema, which the server's engine enforces: even a small
model returns a valid `Review`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel

import autellix

REVIEWS = (
    "The kettle boils fast and looks good. I would buy it again.",
    "It broke after two days. The shop did not answer.",
    "A fine lamp, and cheap.",
)


class Review(BaseModel):
    mood: Literal["happy", "angry"]
    stars: Literal[1, 2, 3, 4, 5]


model = OpenAIChatModel(os.environ.get("OPENAI_MODEL", "gpt-4o-mini"))
settings = {"max_tokens": 40, "temperature": 0}
reader = Agent(model, output_type=NativeOutput(Review), model_settings=settings)
writer = Agent(model, model_settings=settings)


@autellix.session("reviews")
async def main() -> None:
    runs = await asyncio.gather(*(reader.run(f"Rate this review: {text}") for text in REVIEWS))
    found = [run.output for run in runs]
    summary = await writer.run(f"Customers were {', '.join(r.mood for r in found)}. Sum it up.")
    print("reviews:", ", ".join(f"{r.mood} {r.stars}" for r in found), end="; ")
    print(" ".join(summary.output.split())[:60])


if __name__ == "__main__":
    asyncio.run(main())

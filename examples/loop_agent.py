"""A plain loop on the OpenAI client: write a story line by line, then shorten it. Many calls.

Run it against any OpenAI-compatible server; OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL say
which. With autellix behind that URL, all its calls are one program.
"""

from __future__ import annotations

import os

from openai import OpenAI

import autellix  # the only line that autellix needs

LINES = 4
MODEL = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
client = OpenAI()


def ask(prompt: str, max_tokens: int) -> str:
    """Return the model's answer to one prompt."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
    )
    return (answer.choices[0].message.content or "").strip()


def main() -> None:
    """Run the agent."""
    story = ["A fox met a crow at the river."]
    for _ in range(LINES):
        story.append(ask("Go on with this story:\n" + "\n".join(story[-2:]), max_tokens=32))
    summary = ask("Say this in one short sentence:\n" + " ".join(story)[-600:], max_tokens=20)
    print(f"loop agent: {len(story)} parts; in short: {summary.splitlines()[0]}")


if __name__ == "__main__":
    main()

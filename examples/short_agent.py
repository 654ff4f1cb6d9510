"""A short agent: a few small questions, one after the other, each awaited.

Such a program suffers most where calls queue first come, first served: each of its small calls
waits behind somebody's long one.
"""

from __future__ import annotations

import os

from openai import OpenAI

import autellix  # the only line that autellix needs

MODEL = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru")


def main() -> None:
    """Run the agent."""
    client = OpenAI()
    answers = []
    for country in COUNTRIES:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
            max_tokens=10,
            temperature=0,
        )
        answers.append((answer.choices[0].message.content or "").strip())
    print("short agent:", " ".join(answers))


if __name__ == "__main__":
    main()

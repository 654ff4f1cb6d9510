"""Best-of-N rollouts: many short programs on engines inside this process, scored as they end.

No server and no HTTP client of ours: `MultiEngine` starts the engines, and `run_on` makes each
rollout a program of its own. A rollout answers, then is asked to name only the city.
"""

from __future__ import annotations

import asyncio
import collections

from autellix.server import MultiEngine, ProgramEngine, run_on

N = 4
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}


def reward_of(country: str, answer: str) -> float:
    """Return how good an answer is: right first, then short."""
    return (CAPITALS[country] in answer) + 1 / (2 + len(answer))


def rollout(country: str, seed: int):
    """Return one rollout, as a program that returns its country, answer and reward."""

    async def program(engine: ProgramEngine) -> tuple[str, str, float]:
        said = [{"role": "user", "content": f"What is the capital of {country}? Say why."}]
        params = {"max_tokens": 24, "temperature": 1.0, "seed": seed}
        said.append({"role": "assistant", "content": (await engine.chat(said, params)).text})
        said.append({"role": "user", "content": "Now name only the city."})
        answer = " ".join((await engine.chat(said, {**params, "max_tokens": 8})).text.split())
        return country, answer, reward_of(country, answer)

    return program


async def best_of_n(engine: MultiEngine) -> dict[str, tuple[float, str]]:
    """Return the reward and the answer of the best rollout for each country."""
    programs = [rollout(country, seed) for country in CAPITALS for seed in range(N)]
    run = await run_on(engine, programs, name="rollout", progress=False)
    best: dict[str, tuple[float, str]] = collections.defaultdict(lambda: (0.0, ""))
    for country, answer, reward in filter(None, run.values):
        best[country] = max(best[country], (reward, answer))
    print(f"best of {N}: {len(programs)} rollouts, {run.calls} calls, {len(run.failed)} failed")
    return best


async def main() -> None:
    args = ("--max-model-len", "1024", "--max-num-seqs", "8")
    async with MultiEngine("smollm2", vllm_args=args) as engine:
        for country, (reward, answer) in (await best_of_n(engine)).items():
            print(f"  {country}: {answer!r} (reward {reward:.2f})")


if __name__ == "__main__":
    asyncio.run(main())

"""Live: a mix of chat, function-calling and tree-search programs on an engine short of KV.

Stock vLLM and policies of ours serve the same 24 programs on this machine, in turn. No program of
the two agent traces has calls as short as 2,000 tokens, so all their token counts are divided by 4
(``--shrink``); a program's shape, its calls, forks and prefixes, stays. Programs that generate more
than 1,000 tokens after that are left out: they would take an hour here. The load is 1.2 times what
stock vLLM sustains, measured first: as many programs at once as it has slots, the next when one
ends.

    python -m benchmarks.scheduler_mix --rounds 3 --policy plas,adaptive
    python -m benchmarks.scheduler_mix --rounds 20 --policy plas,adaptive --simulated

Asked for: mean program token latency at most 0.6 × stock, throughput at least 0.95 ×, and greedy
answers identical, or different first where the two best tokens are within 1e-3 (at most 1 %); that
is asked of the calls whose prompts are the same in both, as a prompt holds the answers before it.
Fidelity of the ratio depends on the machine being otherwise idle.

``--simulated`` plays the same in virtual time, with the fitted profile of the development machine's
CPU, in seconds: what to expect, and over how many rounds a ratio is steady.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from autellix.server.lab import cost_model, serve_arms, trace, workload
from autellix.server.lab.replay import Answered, Replay, ReplayedProgram, Target
from autellix.server.lab.run_state import ProgramRun
from autellix.server.lab.simulate import Simulation
from autellix.server.lab.trace import Call, Prefix, Program
from autellix.server.lab.workload import Arrival, Waits

TRACES = ("chat-sharegpt", "bfcl-gt", "lats")
PROGRAMS, TOKENS_MAX, OUTPUT_MAX, SEED = 24, 2000, 1000, 1
LOAD = 1.2
LATENCY_MAX, THROUGHPUT_MIN = 0.6, 0.95
NEAR_TIE, TIES_MAX = 1e-3, 0.01
SLOTS, BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 4, 47, 128, 512  # 6,016 tokens of KV
VLLM = (
    "--dtype float32 --enforce-eager --gpu-memory-utilization 0.3 "
    f"--block-size {BLOCK_TOKENS} --num-gpu-blocks-override {BLOCKS} --max-num-seqs {SLOTS} "
    f"--max-num-batched-tokens {CHUNK_TOKENS} --max-model-len {TOKENS_MAX + 48}"
)


def shrunk(program: Program, divisor: int) -> Program:
    """Return a program with its token counts divided, and its shape."""

    def part(prefix: Prefix | None) -> Prefix | None:
        return None if prefix is None else Prefix(prefix.group, prefix.tokens // divisor)

    def smaller(call: Call) -> Call:
        return call._replace(
            prompt_tokens=math.ceil(call.prompt_tokens / divisor),
            output_tokens=math.ceil(call.output_tokens / divisor),
            prefix_tokens=call.prefix_tokens // divisor,
        )

    return program._replace(
        shared_prefix=part(program.shared_prefix),
        role_prefixes={k: Prefix(v.group, v.tokens // divisor)
                       for k, v in program.role_prefixes.items()},
        calls=tuple(map(smaller, program.calls)),
    )  # fmt: skip


def the_mix(divisor: int, count: int) -> list[Program]:
    """Return the first programs that fit, as many of each trace, in a shuffled order."""
    sets = []
    for name in TRACES:
        small = [shrunk(program, divisor) for program in trace.load(name)]
        small = [program for program in small if program.output_tokens <= OUTPUT_MAX]
        sets.append(workload.shuffled(workload.fitting(small, TOKENS_MAX), SEED))
    return [next(sets[place % len(sets)]) for place in range(count)]


class Live:
    """Servers that run all the time; the one that is not asked does nothing."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = {target.name: target for target in targets}
        self.answers: dict[tuple[str, int], dict[tuple[int, int], Answered]] = {}  # (arm, seed)

    def run(
        self, arm: str, arrivals: list[Arrival], seed: int, at_once: int | None = None
    ) -> Sequence[ReplayedProgram]:
        """Replay on one server; a lost call ends the benchmark."""
        said = self.answers[arm, seed] = {}
        replay = Replay(
            self._targets[arm], cost_model.load("this-cpu-smollm2"), Waits(), timeout_s=1800,
            seed=seed, answered=lambda one: said.update({(one.number, one.call): one}),
        )  # fmt: skip
        done = asyncio.run(replay.run(arrivals, concurrency=at_once))
        if lost := [text for program in done for text in program.lost_calls]:
            raise SystemExit(f"{len(lost)} calls were lost, no result: {lost[:3]}")
        return done


class Simulated:
    """The same engine in virtual time; it says no tokens."""

    def __init__(self) -> None:
        self._profile = replace(
            cost_model.load("this-cpu-smollm2"), slots=SLOTS, chunk_tokens=CHUNK_TOKENS,
            block_tokens=BLOCK_TOKENS, kv_tokens=BLOCKS * BLOCK_TOKENS,
            context_tokens_max=TOKENS_MAX + 48,
        )  # fmt: skip

    def run(
        self, arm: str, arrivals: list[Arrival], _seed: int, at_once: int | None = None
    ) -> Sequence[ProgramRun]:
        """Simulate; the seed is in the arrivals already."""
        simulation = Simulation(self._profile, arm, iter(arrivals), Waits(), concurrency=at_once)
        return simulation.run().programs


Side = Live | Simulated
Figures = tuple[float, float]  # mean latency in s per token, tokens per second


def figures(done: Sequence[ReplayedProgram] | Sequence[ProgramRun]) -> Figures:
    """Return the mean over programs of response ÷ generated tokens, and the throughput."""
    ends = [p.ended_s for p in done if p.ended_s is not None]
    if len(ends) < len(done):
        raise SystemExit("a program did not end, no result")
    tokens = [p.program.output_tokens for p in done]
    took = [end - p.arrival_s for end, p in zip(ends, done, strict=True)]
    latency_s = statistics.mean(s / n for s, n in zip(took, tokens, strict=True))
    return latency_s, sum(tokens) / max(ends)


def main() -> None:
    """Measure the capacity, run the rounds, print ratios; exit 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=lambda text: text.split(","), default=["adaptive"],
                        help="with commas between; each is held against stock vLLM")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--shrink", type=int, default=4)
    parser.add_argument("--capacity", type=float, metavar="PROGRAMS_PER_S",
                        help="of stock vLLM, as an earlier run printed it")  # fmt: skip
    parser.add_argument("--simulated", action="store_true", help="in virtual time")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # A first step here may take longer than what else counts as frozen.
    os.environ.setdefault("AUTELLIX_SERVER_POOL_FROZEN_FLOOR_S", "120")
    os.environ.setdefault("AUTELLIX_SERVER_POOL_FROZEN_CAP_S", "240")
    os.environ.setdefault("AUTELLIX_SERVER_POOL_FROZEN_KILL_S", "300")
    mix = the_mix(arguments.shrink, arguments.programs)
    tokens = sum(program.output_tokens for program in mix)
    print(f"{len(mix)} programs, {sum(len(p.calls) for p in mix)} calls, {tokens} generated tokens")
    arms = ["fcfs", *arguments.policy]
    if arguments.simulated:
        held = compared(Simulated(), arms, mix, arguments.rounds, arguments.capacity)
    else:
        with serve_arms.started(arms, "smollm2", VLLM) as targets:
            held = compared(Live(targets), arms, mix, arguments.rounds, arguments.capacity)
    raise SystemExit(0 if held else 1)


def compared(
    side: Side, arms: Sequence[str], mix: Sequence[Program], count: int, capacity: float | None
) -> bool:
    """Measure the capacity, play the rounds, print; return whether all that is asked holds."""
    if capacity is None:
        alone = [Arrival(0.0, number, program) for number, program in enumerate(mix)]
        ends = [p.ended_s or 0.0 for p in side.run("fcfs", alone, 1000, SLOTS)]
        capacity = len(mix) / max(ends)
        print(f"stock, {SLOTS} programs at once: {capacity:.4f} programs/s", flush=True)
    rounds: list[dict[str, Figures]] = []
    for seed in range(count):
        some = list(islice(workload.poisson(mix, LOAD * capacity, math.inf, seed), len(mix)))
        turn = seed % len(arms)
        rounds.append({})
        for arm in [*arms[turn:], *arms[:turn]]:
            latency_s, per_s = rounds[-1][arm] = figures(side.run(arm, some, seed))
            print(f"round {seed} {arm:8} {latency_s * 1e3:.0f} ms/token, {per_s:.1f} tokens/s",
                  flush=True)  # fmt: skip
        if isinstance(side, Live):  # in each round too: a run may be cut short
            for policy in arms[1:]:
                identical(side, policy, [seed])
    held = [verdict(policy, rounds) for policy in arms[1:]]
    if isinstance(side, Live):
        held += [identical(side, policy, range(count)) for policy in arms[1:]]
    return all(held)


def verdict(policy: str, rounds: Sequence[dict[str, Figures]]) -> bool:
    """Print a policy's ratios to stock vLLM, medians of the rounds; return whether both hold."""
    ratios = [
        sorted(arms[policy][figure] / arms["fcfs"][figure] for arms in rounds) for figure in (0, 1)
    ]
    latency, throughput = map(statistics.median, ratios)
    print(
        f"{policy} ÷ stock, median of {len(rounds)}: token latency {latency:.3f} "
        f"(at most {LATENCY_MAX}; {ratios[0][0]:.3f} to {ratios[0][-1]:.3f}), throughput "
        f"{throughput:.3f} (at least {THROUGHPUT_MIN}; {ratios[1][0]:.3f} to {ratios[1][-1]:.3f})"
    )
    return latency <= LATENCY_MAX and throughput >= THROUGHPUT_MIN


def identical(side: Live, policy: str, seeds: Sequence[int]) -> bool:
    """Print how many answers to the same prompts differ; return whether that may be."""
    pairs = [
        (one, side.answers[policy, seed][key])
        for seed in seeds
        for key, one in side.answers["fcfs", seed].items()
    ]
    same = [(a, b) for a, b in pairs if a.prompt == b.prompt]
    gaps = [gap for a, b in same if (gap := gap_of_difference(a, b)) is not None]
    wrong = [gap for gap in gaps if gap >= NEAR_TIE]
    print(f"{policy}: {len(same)} of {len(pairs)} calls have the same prompt as under stock; "
          f"{len(gaps)} of those answers differ, {len(wrong)} where the two best tokens are "
          f"{NEAR_TIE} apart or more (asked: none, and at most {TIES_MAX:.0%} at all)",
          flush=True)  # fmt: skip
    return bool(same) and not wrong and len(gaps) <= TIES_MAX * len(same)


def gap_of_difference(stock: Answered, ours: Answered) -> float | None:
    """Return the gap under stock where two answers first differ; nothing if they do not."""
    both = zip(stock.said, ours.said, stock.gaps, strict=True)
    return next((gap for a, b, gap in both if a != b), None)


if __name__ == "__main__":
    main()

"""Live: a mix of chat, function-calling and tree-search programs on an engine short of KV.

Stock vLLM and policies of ours serve the same 24 programs on this machine, in turn. No program of
the two agent traces has calls as short as 2,000 tokens, so all their token counts are divided by 4
(``--shrink``); a program's shape, its calls, forks and prefixes, stays. Programs that generate more
than 1,000 tokens after that are left out: they would take an hour here. The load is 1.2 times what
stock vLLM sustains, measured first by giving it all programs at once.

    python -m benchmarks.scheduler_mix --rounds 3 --policy plas,adaptive

Asked for: mean program token latency at most 0.6 × stock, throughput at least 0.95 ×. Fidelity of
the ratio depends on the machine being otherwise idle.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
from collections.abc import Sequence
from itertools import islice

from autellix.server.lab import cost_model, serve_arms, trace, workload
from autellix.server.lab.replay import Replay, ReplayedProgram, Target
from autellix.server.lab.trace import Call, Prefix, Program
from autellix.server.lab.workload import Arrival, Waits

TRACES = ("chat-sharegpt", "bfcl-gt", "lats")
PROGRAMS, TOKENS_MAX, OUTPUT_MAX, SEED = 24, 2000, 1000, 1
LOAD = 1.2
LATENCY_MAX, THROUGHPUT_MIN = 0.6, 0.95
VLLM = (
    "--dtype float32 --enforce-eager --gpu-memory-utilization 0.3 --block-size 128 "
    "--max-num-seqs 4 --num-gpu-blocks-override 47 --max-num-batched-tokens 512 "
    "--max-model-len 2048"
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


def latency_s(done: Sequence[ReplayedProgram]) -> float:
    """Return the mean of response ÷ generated tokens over the programs."""
    lost = [text for program in done for text in program.lost_calls]
    if lost:
        raise SystemExit(f"{len(lost)} calls were lost, no result: {lost[:3]}")
    return statistics.mean((p.ended_s - p.arrival_s) / p.program.output_tokens for p in done)


def replayed(target: Target, arrivals: list[Arrival], seed: int) -> list[ReplayedProgram]:
    """Replay on one server."""
    profile = cost_model.load("this-cpu-smollm2")
    replay = Replay(target, profile, Waits(), timeout_s=1800, seed=seed)
    return asyncio.run(replay.run(arrivals))


def main() -> None:
    """Measure the capacity, run the rounds, print ratios; exit 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=lambda text: text.split(","), default=["plas"],
                        help="with commas between; each is held against stock vLLM")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--shrink", type=int, default=4)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    mix = the_mix(arguments.shrink, arguments.programs)
    tokens = sum(program.output_tokens for program in mix)
    print(f"{len(mix)} programs, {sum(len(p.calls) for p in mix)} calls, {tokens} generated tokens")
    with serve_arms.started(["fcfs", *arguments.policy], "smollm2", VLLM) as targets:
        done = replayed(targets[0], [Arrival(0.0, n, p) for n, p in enumerate(mix)], seed=1000)
        latency_s(done)
        capacity = len(mix) / max(p.ended_s for p in done)
        print(f"stock alone, all at once: {capacity:.4f} programs/s", flush=True)
        rounds = []
        for seed in range(arguments.rounds):
            endless = workload.poisson(mix, LOAD * capacity, math.inf, seed)
            some = list(islice(endless, len(mix)))
            turn = seed % len(targets)
            rounds.append(
                {t.name: one(t, some, seed, tokens) for t in targets[turn:] + targets[:turn]}
            )
    held = [verdict(policy, rounds) for policy in arguments.policy]
    raise SystemExit(0 if all(held) else 1)


def one(target: Target, some: list[Arrival], seed: int, tokens: int) -> tuple[float, float]:
    """Replay once; return the mean latency in s per token, and the tokens per second."""
    done = replayed(target, some, seed)
    latency, rate = latency_s(done), tokens / max(p.ended_s for p in done)
    print(f"round {seed} {target.name:8} {latency * 1e3:.0f} ms/token, {rate:.1f} tokens/s",
          flush=True)  # fmt: skip
    return latency, rate


def verdict(policy: str, rounds: Sequence[dict[str, tuple[float, float]]]) -> bool:
    """Print a policy's ratios to stock vLLM, medians of the rounds; return whether both hold."""
    latency, throughput = (
        statistics.median(arms[policy][figure] / arms["fcfs"][figure] for arms in rounds)
        for figure in (0, 1)
    )
    print(
        f"{policy} ÷ stock, median of {len(rounds)}: token latency {latency:.3f} "
        f"(at most {LATENCY_MAX}), throughput {throughput:.3f} (at least {THROUGHPUT_MIN})"
    )
    return latency <= LATENCY_MAX and throughput >= THROUGHPUT_MIN


if __name__ == "__main__":
    main()

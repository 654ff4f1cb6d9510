"""Simulator against this machine: the same programs, live and in virtual time, as one table.

Per trace and policy, interleaved rounds: a live replay on one engine (``autellix serve``), then the
median over rounds of live ÷ simulated mean and p95 token latency, and the order of the policies in
both. Asked for: within 15 %, the same order. Fit the profile first (``fit_cpu``), and run this on a
machine that does nothing else:

    python -m benchmarks.paper.fit_cpu > out/mine.toml
    python -m benchmarks.paper.fidelity --profile out/mine.toml

The model runs on ``--core``; this process, the gateway and vLLM's front end on another one. Slots
and blocks are few, so that programs queue and evict each other within minutes, and both sides have
the same. A server a policy runs all the time; the one that is not asked does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autellix.server.lab import cost_model, metrics, serve_arms, trace, workload
from autellix.server.lab.measure import Cell, run_cell
from autellix.server.lab.replay import Replay, Target
from autellix.server.lab.trace import Program
from autellix.server.lab.workload import Waits

WITHIN = 0.15


@dataclass(frozen=True)
class Load:
    """What of a trace is replayed: small programs, so that a replay lasts minutes."""

    rate_per_s: float
    programs: int
    tokens_max: int  # of the largest call
    output_tokens_max: int  # of the program

    def of(self, name: str) -> tuple[Program, ...]:
        """Return the programs of a trace that are small enough."""
        return tuple(
            p for p in trace.load(name)
            if p.largest_tokens <= self.tokens_max and p.output_tokens <= self.output_tokens_max
        )  # fmt: skip


LOADS = {
    "chat-sharegpt": Load(0.5, 8, 1500, 300),
    "bfcl-gt": Load(0.1, 2, 4500, 180),
}


@dataclass
class Round:
    """One replay, or one simulation: token latency in s, and the prefix hits."""

    mean_s: float
    p95_s: float
    hit_share: float


Rounds = dict[str, list[Round]]  # by policy


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--profile", default="this-cpu-smollm2", help="or what fit_cpu printed")
    parser.add_argument("--policies", default="fcfs,plas")
    parser.add_argument("--traces", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=0, help="the model's")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--chunk", type=int, default=512, help="tokens a step computes at most")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    profile = cost_model.load(arguments.profile)
    kv_tokens = arguments.blocks * profile.block_tokens
    profile = replace(
        profile,
        slots=arguments.slots,
        chunk_tokens=arguments.chunk,
        kv_tokens=kv_tokens,
        context_tokens_max=kv_tokens - profile.block_tokens,
    )
    policies = arguments.policies.split(",")
    pin(arguments.core)
    with serve_arms.started(policies, arguments.model, vllm_arguments(profile)) as targets:
        for name in arguments.traces.split(","):
            live, simulated = rounds_of(name, profile, targets, arguments.rounds)
            show(name, policies, live, simulated)


def pin(core: int) -> None:
    """Keep this process and its children off the model's core, and tell vLLM which that is."""
    others = os.sched_getaffinity(0) - {core}
    if not others:
        raise SystemExit(f"no core but {core} is left for the client")
    os.sched_setaffinity(0, others)
    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND=str(core),
        # A chunk behind 4,000 tokens takes one core longer than what else counts as frozen.
        AUTELLIX_SERVER_POOL_FROZEN_FLOOR_S="120", AUTELLIX_SERVER_POOL_FROZEN_CAP_S="240",
        AUTELLIX_SERVER_POOL_FROZEN_KILL_S="300",
    )  # fmt: skip


def vllm_arguments(profile: cost_model.Profile) -> str:
    """Return what makes a live engine have the profile's limits."""
    return (
        "--dtype float32 --enforce-eager --enable-prompt-tokens-details "
        "--gpu-memory-utilization 0.3 "
        f"--block-size {profile.block_tokens} --num-gpu-blocks-override {profile.blocks} "
        f"--max-num-seqs {profile.slots} --max-num-batched-tokens {profile.chunk_tokens} "
        f"--max-model-len {profile.context_tokens_max}"
    )


def rounds_of(
    name: str, profile: cost_model.Profile, targets: Sequence[Target], rounds: int
) -> tuple[Rounds, Rounds]:
    """Return the live rounds of a trace and the simulated ones; the seed is the round's number."""
    load = LOADS[name]
    programs = load.of(name)
    live: Rounds = {}
    simulated: Rounds = {}
    for seed in range(rounds):
        for target in targets if seed % 2 == 0 else list(reversed(targets)):
            live.setdefault(target.name, []).append(replayed(load, programs, target, profile, seed))
            cell = Cell(trace=name, arm=target.name, profile=profile, rate_per_s=load.rate_per_s,
                        seed=seed, programs=load.programs)  # fmt: skip
            result = run_cell(cell, programs)
            latency = result["token_latency_s"]
            hits = result["engine"]["prefix_hit_share"]
            simulated.setdefault(target.name, []).append(
                Round(latency["mean"], latency["p95"], hits)
            )
            print(f"{name} round {seed} {target.name}: live {live[target.name][-1]}, "
                  f"simulated {simulated[target.name][-1]}", flush=True)  # fmt: skip
    return live, simulated


def replayed(
    load: Load,
    programs: Sequence[Program],
    target: Target,
    profile: cost_model.Profile,
    seed: int,
) -> Round:
    """Replay one round live; a lost call ends the run."""
    arrivals = workload.poisson(programs, load.rate_per_s, float("inf"), seed)
    some = list(islice(arrivals, load.programs))
    done = asyncio.run(Replay(target, profile, Waits(), seed=seed).run(some))
    if lost := [text for p in done for text in p.lost_calls]:
        raise SystemExit(f"calls were lost: {lost}")
    ended = [(p.ended_s or 0.0) - p.arrival_s for p in done]
    figures = metrics.spread(
        [s / p.program.output_tokens for s, p in zip(ended, done, strict=True)]
    )
    hits = sum(p.hit_tokens for p in done) / max(1, sum(p.prompt_tokens for p in done))
    return Round(figures["mean"], figures["p95"], hits)


def show(name: str, policies: Sequence[str], live: Rounds, simulated: Rounds) -> None:
    """Print the table of one trace."""
    for policy in policies:
        pairs = list(zip(live[policy], simulated[policy], strict=True))
        mean = statistics.median(a.mean_s / b.mean_s for a, b in pairs)
        p95 = statistics.median(a.p95_s / b.p95_s for a, b in pairs)
        hits = [statistics.median(r.hit_share for r in side[policy]) for side in (live, simulated)]
        held = "within" if max(abs(mean - 1), abs(p95 - 1)) <= WITHIN else "NOT within"
        print(f"{name:14} {policy:8} live ÷ simulated: mean {mean:.3f} p95 {p95:.3f}, {held} "
              f"{WITHIN:.0%}; hits {hits[0]:.3f} and {hits[1]:.3f}")  # fmt: skip
    orders = [
        sorted(policies, key=lambda policy: statistics.median(r.mean_s for r in side[policy]))
        for side in (live, simulated)
    ]
    same = "the same" if orders[0] == orders[1] else "NOT the same"
    print(f"{name:14} order live {' < '.join(orders[0])}, simulated {' < '.join(orders[1])}: "
          f"{same}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

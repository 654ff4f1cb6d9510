"""Simulator against this machine: the same programs, live and in virtual time, as one table.

Per trace and policy, interleaved rounds: a live replay on one engine (``autellix serve``), then the
median over rounds of live ÷ simulated mean and p95 token latency, and the order of the policies in
both. Asked for: within 15 %, the same order. Fit the profile first (``fit_cpu``), and run this on a
machine that does nothing else:

    python -m benchmarks.paper.fit_cpu > out/mine.toml
    python -m benchmarks.paper.fidelity --profile out/mine.toml

With ``--live FILE`` the live rounds are kept there, and found there the next time: then nothing is
replayed, and they are set beside what the simulator says now.

The model runs on ``--core``; this process, the gateway and vLLM's front end on another one. Slots
and blocks are few, so that programs queue and evict each other within minutes, and both sides have
the same. A server a policy runs all the time; the one that is not asked does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from autellix.server.lab import cost_model, metrics, serve_arms, trace, workload
from autellix.server.lab.measure import Cell, run_cell
from autellix.server.lab.replay import Replay, Target
from autellix.server.lab.trace import Program
from autellix.server.lab.workload import Waits

WITHIN = 0.15
ALIKE = 1.01  # medians this near have no order that a live run could show


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
    parser.add_argument("--live", type=Path, help="keep the live rounds here, or take them from it")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    profile = limited(cost_model.load(arguments.profile), arguments.slots, arguments.blocks,
                      arguments.chunk)  # fmt: skip
    policies = arguments.policies.split(",")
    kept = Kept(arguments.live)
    traces = arguments.traces.split(",")
    pin(arguments.core)
    with ExitStack() as stack:
        targets: dict[str, Target] = {}
        if not all(kept.has(name, policies, arguments.rounds) for name in traces):
            started = serve_arms.started(policies, arguments.model, vllm_arguments(profile))
            targets = {target.name: target for target in stack.enter_context(started)}
        for name in traces:
            simulated = rounds_of(name, policies, profile, targets, arguments.rounds, kept)
            live = {policy: kept.rounds[name][policy][: arguments.rounds] for policy in policies}
            show(name, policies, live, simulated)


def limited(
    profile: cost_model.Profile, slots: int, blocks: int, chunk_tokens: int
) -> cost_model.Profile:
    """Return the profile of an engine with little room, live and in virtual time."""
    kv_tokens = blocks * profile.block_tokens
    return replace(profile, slots=slots, chunk_tokens=chunk_tokens, kv_tokens=kv_tokens,
                   context_tokens_max=kv_tokens - profile.block_tokens)  # fmt: skip


class Kept:
    """The live rounds, by trace and policy, and the file that holds them."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rounds: dict[str, Rounds] = {}
        if path is not None and path.is_file():
            for name, by_policy in json.loads(path.read_text(encoding="utf-8")).items():
                self.rounds[name] = {k: [Round(**r) for r in v] for k, v in by_policy.items()}

    def has(self, name: str, policies: Sequence[str], rounds: int) -> bool:
        """Return whether so many rounds of a trace are there."""
        there = self.rounds.get(name, {})
        return all(len(there.get(policy, ())) >= rounds for policy in policies)

    def add(self, name: str, policy: str, live: Round) -> None:
        """Keep one more."""
        self.rounds.setdefault(name, {}).setdefault(policy, []).append(live)
        if self.path is not None:
            text = json.dumps(self.rounds, default=asdict, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")


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
    name: str, policies: Sequence[str], profile: cost_model.Profile,
    targets: Mapping[str, Target], rounds: int, kept: Kept,
) -> Rounds:  # fmt: skip
    """Replay the live rounds that are not kept yet, and return the simulated ones.

    The seed is the round's number; every other round goes through the policies backwards.
    """
    simulated: Rounds = {policy: [] for policy in policies}
    for seed in range(rounds):
        for policy in policies if seed % 2 == 0 else list(reversed(policies)):
            if not kept.has(name, [policy], seed + 1):
                kept.add(name, policy, replayed(name, targets[policy], profile, seed))
            simulated[policy].append(simulated_round(name, policy, profile, seed))
            print(f"{name} round {seed} {policy}: live {kept.rounds[name][policy][seed]}, "
                  f"simulated {simulated[policy][-1]}", flush=True)  # fmt: skip
    return simulated


def replayed(name: str, target: Target, profile: cost_model.Profile, seed: int) -> Round:
    """Replay one round live; a lost call ends the run."""
    load = LOADS[name]
    arrivals = workload.poisson(load.of(name), load.rate_per_s, float("inf"), seed)
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


def simulated_round(name: str, policy: str, profile: cost_model.Profile, seed: int) -> Round:
    """Run the same round in virtual time."""
    load = LOADS[name]
    cell = Cell(trace=name, arm=policy, profile=profile, rate_per_s=load.rate_per_s, seed=seed,
                programs=load.programs)  # fmt: skip
    result = run_cell(cell, load.of(name))
    latency = result["token_latency_s"]
    return Round(latency["mean"], latency["p95"], result["engine"]["prefix_hit_share"])


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
    medians = [
        {policy: statistics.median(r.mean_s for r in side[policy]) for policy in policies}
        for side in (live, simulated)
    ]
    orders = [sorted(policies, key=side.__getitem__) for side in medians]
    same = "the same" if orders[0] == orders[1] else "NOT the same"
    if max(medians[1].values()) <= ALIKE * min(medians[1].values()):
        apart = max(medians[0].values()) / min(medians[0].values())
        same = f"alike in the simulator, {apart:.3f} x apart live"
    print(f"{name:14} order live {' < '.join(orders[0])}, simulated {' < '.join(orders[1])}: "
          f"{same}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

"""Simulator against this machine: the same programs, live and in virtual time, as one table.

Per trace and policy, interleaved rounds: a live replay on one engine (``autellix serve``), then the
median over rounds of live ÷ simulated mean and p95 token latency, and the order of the policies in
both. Asked for: within 15 %, the same order. Fit the profile first (``fit_cpu``), and run this on a
machine that does nothing else, engine and client on cores of their own:

    taskset -c 1 python -m benchmarks.paper.fidelity --vllm "--max-num-seqs 8 ..."
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from itertools import islice

from autellix.server.lab import cost_model, metrics, serve_arms, trace, workload
from autellix.server.lab.measure import Cell, run_cell
from autellix.server.lab.replay import Replay
from autellix.server.lab.workload import Waits

TRACES = ("chat-sharegpt", "bfcl-gt")
VLLM = (
    "--dtype float32 --enforce-eager --gpu-memory-utilization 0.3 --block-size 128 "
    "--max-num-seqs 8 --max-num-batched-tokens 512 --max-model-len 8192"
)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--profile", default="this-cpu-smollm2", help="or what fit_cpu printed")
    parser.add_argument("--policies", default="fcfs,plas")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", type=int, default=8)
    parser.add_argument("--tokens-max", type=int, default=7600)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--vllm", default=VLLM)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    profile = cost_model.load(arguments.profile)
    policies = arguments.policies.split(",")
    with serve_arms.started(policies, arguments.model, arguments.vllm) as targets:
        for name in arguments.traces.split(","):
            live, simulated = _rounds(arguments, name, profile, targets)
            _print(name, policies, live, simulated)


def _rounds(arguments, name, profile, targets):
    """Return {policy: [(mean, p95)]} of the live rounds and of the simulated ones."""
    programs = [p for p in trace.load(name) if p.largest_tokens <= arguments.tokens_max]
    live: dict[str, list[tuple[float, float]]] = {}
    simulated: dict[str, list[tuple[float, float]]] = {}
    for seed in range(arguments.rounds):
        arrivals = list(
            islice(
                workload.poisson(programs, arguments.rate, float("inf"), seed), arguments.programs
            )
        )
        for target in targets if seed % 2 == 0 else reversed(targets):
            done = asyncio.run(Replay(target, profile, Waits(), seed=seed).run(arrivals))
            if any(p.lost_calls for p in done):
                raise SystemExit(f"calls were lost: {[p.lost_calls for p in done if p.lost_calls]}")
            latencies = [(p.ended_s - p.arrival_s) / p.program.output_tokens for p in done]
            figures = metrics.spread(latencies)
            live.setdefault(target.name, []).append((figures["mean"], figures["p95"]))
            cell = Cell(trace=name, arm=target.name, profile=profile, rate_per_s=arguments.rate,
                        seed=seed, programs=arguments.programs)  # fmt: skip
            figures = run_cell(cell, programs)["token_latency_s"]
            simulated.setdefault(target.name, []).append((figures["mean"], figures["p95"]))
    return live, simulated


def _print(name, policies, live, simulated) -> None:
    for policy in policies:
        pairs = list(zip(live[policy], simulated[policy], strict=True))
        mean = statistics.median(a[0] / b[0] for a, b in pairs)
        p95 = statistics.median(a[1] / b[1] for a, b in pairs)
        held = "within" if max(abs(mean - 1), abs(p95 - 1)) <= 0.15 else "NOT within"
        print(f"{name:14} {policy:8} live ÷ simulated: mean {mean:.3f} p95 {p95:.3f} {held} 15 %")
    orders = [
        sorted(policies, key=lambda policy: statistics.median(v[0] for v in results[policy]))
        for results in (live, simulated)
    ]
    same = "the same" if orders[0] == orders[1] else "NOT the same"
    print(
        f"{name:14} order live {' < '.join(orders[0])}, simulated {' < '.join(orders[1])}: {same}"
    )


if __name__ == "__main__":
    main()

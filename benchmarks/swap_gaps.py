"""In the simulator: agents with tools on an engine short of KV; what saving KV in gaps brings.

    python -m benchmarks.swap_gaps [--trace mini-swe …] [--programs 16] [--rate 0.1]

Stock vLLM, the adaptive policy that drops the KV of programs that lose their place, and the one
that saves it to host memory. vLLM's own scheduler and KV manager, the product's connector, the
profile's link; no byte moves. Everything is deterministic. So many programs come at the rate and
run to their end: a look at one engine, not the measuring rule.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace

from autellix.server.lab import cost_model, trace, workload
from autellix.server.lab.cost_model import Profile
from autellix.server.lab.simulate import Simulation
from autellix.server.lab.trace import Program
from autellix.server.lab.virtual_engine import EngineTotals

WAIT_CAP_S = 60.0


def run(
    profile: Profile, programs: Sequence[Program], arm: str, count: int, rate: float
) -> tuple[float, float, EngineTotals]:
    """Run one arm until all programs are over; return mean response, makespan and totals."""
    arrivals = itertools.islice(workload.poisson(programs, rate, float("inf"), 0), count)
    simulation = Simulation(profile, arm, arrivals, workload.Waits(cap_s=WAIT_CAP_S))
    outcome = simulation.run()
    ends = [(p.ended_s or outcome.ended_s) - p.arrival_s for p in outcome.programs]
    (totals,) = outcome.totals
    return statistics.mean(ends), outcome.ended_s, totals


def main() -> None:
    """Run the arms on each trace and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", nargs="*", default=["mini-swe"])
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.1, help="programs per second")
    parser.add_argument("--kv-tokens", type=int, default=100_000)
    parser.add_argument("--host-gib", type=float, default=32.0)
    parser.add_argument("--profile", default="a100-80g-llama-3.1-8b")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    profile = replace(cost_model.load(args.profile), kv_tokens=args.kv_tokens)
    arms = ("fcfs", "adaptive", f"adaptive:swap_gib={args.host_gib:g}")
    print(
        f"{args.profile}, {args.kv_tokens} KV tokens, {args.programs} programs at {args.rate:g}/s"
    )
    for name in args.trace:
        programs = workload.fitting(trace.load(name), min(profile.context_tokens_max,
                                                          args.kv_tokens // 2))  # fmt: skip
        print(f"{name}: mean response s, makespan s, hits, tokens computed, GB moved")
        for arm in arms:
            response_s, makespan_s, totals = run(profile, programs, arm, args.programs, args.rate)
            print(f"  {arm:22} {response_s:7.1f} {makespan_s:7.1f}  "
                  f"{totals.hit_tokens / totals.prompt_tokens:.3f}  "
                  f"{totals.computed_tokens / 1e3:,.0f}k  {totals.swap_bytes / 1e9:,.0f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

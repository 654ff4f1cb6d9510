"""In the simulator: swap against recompute on the traces at saturation, and what windows save.

    python -m benchmarks.swap_simulated [--trace NAME …] [--programs 120]

All programs arrive at once on one engine that is short of slots and KV, under PLAS. Both arms run
the real scheduler and the real connector; a swap costs the profile's host link, and no byte moves.
Everything is deterministic.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from autellix.server.lab import cost_model, trace, workload
from autellix.server.lab.cost_model import Profile
from autellix.server.lab.simulate import Simulation
from autellix.server.lab.trace import Program


def run(
    profile: Profile, programs: Sequence[Program], count: int, *, window_steps: int, swaps: bool
) -> dict[str, float]:
    """Run one arm to its end and return its figures."""
    arrivals = workload.at_once(programs, count, seed=1)
    arm = f"plas:window_steps={window_steps}"
    if swaps:
        gib = 2 * profile.kv_tokens * profile.kv_bytes_per_token / 2**30
        arm += f";swap_gib={gib};swap_always=true"
    simulation = Simulation(profile, arm, arrivals, workload.Waits(cap_s=60.0))
    outcome = simulation.run()
    (engine,) = simulation.engines
    totals, scheduler = engine.totals, engine.seat.scheduler
    responses = [(p.ended_s or outcome.ended_s) - p.arrival_s for p in outcome.programs]
    return {
        "response_s": statistics.mean(responses),
        "makespan_s": outcome.ended_s,
        "recomputed": totals.recomputed_tokens,
        "swap_outs": scheduler.swap.counts.swap_outs if swaps else 0,
    }


def main() -> None:
    """Run the arms on each trace and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", nargs="*", default=list(trace.names()))
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument("--kv-tokens", type=int, default=60_000)
    parser.add_argument("--profile", default="a100-80g-llama-3.1-8b")
    args = parser.parse_args()
    profile = replace(cost_model.load(args.profile), slots=args.slots, kv_tokens=args.kv_tokens)
    print(f"{args.profile}, {args.slots} slots, {args.kv_tokens} KV tokens, "
          f"{args.programs} programs at once, PLAS")  # fmt: skip
    print("swap ÷ recompute at windows of 1, 4 and 16 steps; swap-outs at each")
    for name in args.trace:
        programs = workload.fitting(
            trace.load(name), min(profile.context_tokens_max, args.kv_tokens // 2)
        )
        if not programs:
            print(f"{name:>24}: no program fits")
            continue
        line = f"{name:>24}:"
        outs = []
        for window in (1, 4, 16):
            base = run(profile, programs, args.programs, window_steps=window, swaps=False)
            ours = run(profile, programs, args.programs, window_steps=window, swaps=True)
            outs.append(int(ours["swap_outs"]))
            ratios = [
                ours[key] / base[key] if base[key] else float("nan")
                for key in ("response_s", "makespan_s", "recomputed")
            ]
            line += "  response {:.3f}, makespan {:.3f}, recomputed {:.3f};".format(*ratios)
        print(f"{line}  swap-outs {outs}", flush=True)


if __name__ == "__main__":
    main()

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
from typing import Any

from autellix.server.clock import ManualClock
from autellix.server.engine.build import build_config, build_scheduler
from autellix.server.engine.connector_config import swap_transfer_config
from autellix.server.engine.connector_messages import SwapMetadata, SwapWorkerMetadata
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.lab import cost_model, trace, workload
from autellix.server.lab.arms import AutellixSeat, RequestMaker
from autellix.server.lab.cost_model import Profile
from autellix.server.lab.simulate import Simulation
from autellix.server.lab.trace import Program
from autellix.server.lab.virtual_engine import Batch, VirtualEngine

STAND_IN_BYTES = 8  # of a token's KV in the stand-in model of engine/build.py


class SwapSeat(AutellixSeat):
    """AutellixScheduler with the connector and a host pool of twice the device's KV."""

    def __init__(self, profile: Profile, *, window_steps: int, swaps: bool) -> None:
        self._clock = ManualClock()
        pool_bytes = 2 * profile.blocks * profile.block_tokens * STAND_IN_BYTES
        config = build_config(
            kv_blocks=profile.blocks,
            block_tokens=profile.block_tokens,
            slots=profile.slots,
            step_tokens=profile.chunk_tokens,
            max_model_tokens=profile.context_tokens_max,
            async_scheduling=profile.batches_in_flight > 1,
            policy_config={"policy": "plas", "window_steps": window_steps},
            kv_transfer_config=swap_transfer_config(pool_bytes, always=True) if swaps else None,
        )
        self.scheduler = build_scheduler(AutellixScheduler, config=config)
        self.scheduler.clock = self._clock
        self.promotions = 0
        self._make = RequestMaker(profile.block_tokens)


class SwapEngine(VirtualEngine):
    """A virtual engine whose host link takes time, and whose worker answers each message."""

    def _batch(self, output: Any, now_s: float) -> Batch:
        batch = super()._batch(output, now_s)
        meta = output.kv_connector_metadata
        if not isinstance(meta, SwapMetadata):
            return batch
        blocks = len(meta.out_blocks) + len(meta.in_blocks)
        block_bytes = self._profile.block_tokens * self._profile.kv_bytes_per_token
        self.totals.swap_bytes += blocks * block_bytes
        link_s = blocks * block_bytes * self._profile.swap_s_per_byte
        self.totals.busy_s += link_s
        return batch._replace(end_s=batch.end_s + link_s)

    def _update(self, output: Any, request_ids: list[str], sampled: list[list[int]]) -> None:
        meta = output.kv_connector_metadata
        if isinstance(meta, SwapMetadata):
            from vllm.v1.outputs import KVConnectorOutput

            answer = KVConnectorOutput(kv_connector_worker_meta=SwapWorkerMetadata(meta.step))
            self._scheduler.connector.update_connector_output(answer)
        super()._update(output, request_ids, sampled)


def run(
    profile: Profile, programs: Sequence[Program], count: int, *, window_steps: int, swaps: bool
) -> dict[str, float]:
    """Run one arm to its end and return its figures."""
    arrivals = workload.at_once(programs, count, seed=1)
    simulation = Simulation(profile, "fcfs", arrivals, workload.Waits(cap_s=60.0))
    seat = SwapSeat(profile, window_steps=window_steps, swaps=swaps)
    simulation.engines[0] = engine = SwapEngine(seat, profile)
    outcome = simulation.run()
    totals = engine.totals
    responses = [(p.ended_s or outcome.ended_s) - p.arrival_s for p in outcome.programs]
    return {
        "response_s": statistics.mean(responses),
        "makespan_s": outcome.ended_s,
        "recomputed": totals.recomputed_tokens,
        "swap_outs": seat.scheduler.swap.counts.swap_outs if swaps else 0,
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

"""What the adaptive policy is held to: one table a load, and whether each limit is met.

    python -m benchmarks.policy_gate --load bfcl-gt=1.7 --load chat-sharegpt=1.2 --seeds 5 --jobs 2

Every arm runs the same programs at the same times, seed by seed. Printed are means over the seeds,
and of the ratios the mean of the paired ones with their 95 % bootstrap interval; a limit is met if
the interval's bad end meets it. The limits are the gate set's (``gate.toml``), all of them at each
load. ``--horizon`` scales the measuring rule (docs/lab.md); 3,600 s is the
rule itself. The clairvoyant reference of a load is the best of the arms that know the future and
were asked for, by seed. The exit status says whether all limits are met.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from autellix.server.lab import cost_model, gate
from autellix.server.lab.arms import CLAIRVOYANT
from autellix.server.lab.cells import run_cells
from autellix.server.lab.gate import quartiles, slowdown_p99, token_s
from autellix.server.lab.measure import Cell, Rule
from autellix.server.lab.result_cache import ResultCache
from autellix.server.lab.workload import Waits

OURS, STOCK = "adaptive", "fcfs"
LEVELS = "plas:level_bounds_s=[5,20,80]"  # as `autellix serve` starts engines on GPUs
ARMS = (OURS, STOCK, "mlfq", LEVELS, "pfcfs", "admit", "continuum", "thunder", *CLAIRVOYANT)

Result = dict[str, Any]
Seed = dict[str, Result]  # by arm


def main() -> int:
    """Run the loads and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", action="append", required=True, metavar="TRACE=RATE")
    parser.add_argument("--arms", type=lambda text: text.split(";"), default=list(ARMS),
                        help="with semicolons between")  # fmt: skip
    parser.add_argument("--profile", default="a100-80g-llama-3.1-8b")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--horizon", type=float, default=3600.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="keep results by code, trace and profile")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    held = [load(text, arguments) for text in arguments.load]
    return 0 if all(held) else 1


def load(text: str, arguments: argparse.Namespace) -> bool:
    """Run one load; return whether all limits are met."""
    name, _, rate = text.partition("=")
    rule = Rule().shortened(arguments.horizon)
    cells = [
        Cell(trace=name, arm=arm, profile=cost_model.load(arguments.profile),
             rate_per_s=float(rate), seed=seed, rule=rule, waits=Waits(seed=seed))
        for seed in range(arguments.seeds)
        for arm in arguments.arms
    ]  # fmt: skip
    results = [r.result for r in run_cells(cells, ResultCache(arguments.cache), arguments.jobs)]
    size = len(arguments.arms)
    seeds = [
        dict(zip(arguments.arms, results[place : place + size], strict=True))
        for place in range(0, len(results), size)
    ]
    programs = fmean(result["programs"] for result in results)
    print(f"\n{name} at {rate} programs/s on {arguments.profile}, horizon {arguments.horizon:g} s, "
          f"{arguments.seeds} seeds, {programs:.0f} programs measured, "
          f"{results[0]['fits_share']:.0%} of the trace fits")  # fmt: skip
    table(seeds)
    verdicts = gate.verdict(results, gate.limits())
    for judged in verdicts:
        print(judged.line, flush=True)
    return all(judged.met for judged in verdicts)


def table(seeds: Sequence[Seed]) -> None:
    """Print a line an arm: means over the seeds."""
    print("| arm | token latency, ms: mean | P99 | response, s | slowdown | P99 | by size quartile "
          "| unfinished | programs/s | hits |\n" + "|---" * 10 + "|")  # fmt: skip
    for arm in seeds[0]:
        rows = [seed[arm] for seed in seeds]

        def mean(figure: Callable[[Result], float], rows: Sequence[Result] = rows) -> float:
            return fmean(map(figure, rows))

        by_size = " ".join(f"{mean(lambda r, n=n: quartiles(r)[n]):.1f}" for n in range(4))
        print(
            f"| `{arm}` | {mean(token_s) * 1e3:.0f} "
            f"| {mean(lambda r: r['token_latency_s']['p99']) * 1e3:.0f} "
            f"| {mean(lambda r: r['response_s']['mean']):.0f} "
            f"| {mean(lambda r: r['slowdown']['mean']):.1f} | {mean(slowdown_p99):.1f} | {by_size} "
            f"| {mean(lambda r: r['unfinished']):.0f} | {mean(lambda r: r['programs_per_s']):.2f} "
            f"| {mean(lambda r: r['engine']['prefix_hit_share']):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())

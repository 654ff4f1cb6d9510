"""The paper's figures from the simulator: single engine, tail, offline, burst, gap to SRPT.

Results go to ``--out`` as JSON (kept by code, trace and profile in ``--out``/cache, so a second run
is quick), figures and one page beside them, and a table that sets our ratios beside the paper's is
printed. The paper's ratios are read off its figures (about 1 % of error); its engine is vLLM 0.6.1.

    python -m benchmarks.paper.figures --out out/paper --horizon 3600 --seeds 5      # hours
    python -m benchmarks.paper.figures --out out/paper --horizon 300 --only bfcl-gt  # a look
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from autellix.server.lab import cost_model, gate, report
from autellix.server.lab.cells import run_cells
from autellix.server.lab.measure import Cell, Rule
from autellix.server.lab.result_cache import ResultCache
from autellix.server.lab.simulate_command import document
from benchmarks.policy_gate import LEVELS

PROFILE = "a100-80g-llama-3.1-8b"
ARMS = ("fcfs", "fcfs-nocache", "mlfq", LEVELS, "adaptive", "srpt-smith")
#: Loads as shares of what the clairvoyant reference sustains (gate.toml): the gate's own and above.
RHO = (0.3, 0.7, 0.9, 1.0, 1.2, 1.4)
# Autellix ÷ vLLM, ÷ vLLM-opt, ÷ MLFQ: programs per second at 0.5 s a token, 8B on one A100.
PAPER = {
    "chat-sharegpt": (3.8, 1.91, 1.44),
    "bfcl-gt": (7.0, 1.64, 1.35),
    "lats": (3.2, 1.82, 2.10),
    "mixed": (10.4, 2.58, 2.67),
}
OFFLINE_PAPER = {1000: (1874 / 1473, 1640 / 1473)}  # vLLM-opt ÷ Autellix, MLFQ ÷ Autellix


def main() -> None:
    """Run what was asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--horizon", type=float, default=3600.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(PAPER), action="append")
    parser.add_argument("--rho", default=",".join(map(str, RHO)))
    parser.add_argument("--parts", default="single,offline,burst,sensitivity")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--offline-programs", type=int, default=1000)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = {"single": single, "offline": offline, "burst": burst, "sensitivity": sensitivity}
    for name in arguments.parts.split(","):
        cells = list(parts[name](arguments))
        results = list(_run(cells, arguments.out / "cache", arguments.jobs))
        (arguments.out / f"{name}.json").write_text(document(results))
        PRINT[name](results, arguments)
        if name in ("single", "burst"):
            report.draw(results, arguments.out / name)


def single(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the paper's Figures 12 and 13, and of its gap to SRPT."""
    rule = Rule().shortened(arguments.horizon)
    capacity = gate.table()["capacity"][PROFILE]
    for name in arguments.only or PAPER:
        for rho in map(float, arguments.rho.split(",")):
            for seed in range(arguments.seeds):
                for arm in arguments.arms:
                    yield Cell(trace=name, arm=arm, profile=cost_model.load(PROFILE),
                               rate_per_s=round(rho * capacity[name], 6), seed=seed,
                               rule=rule)  # fmt: skip


def offline(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the paper's Figure 16: all programs at once."""
    for arm in ("fcfs", "mlfq", LEVELS, "adaptive", "pfcfs"):
        yield Cell(trace="chat-sharegpt", arm=arm, profile=cost_model.load(PROFILE), rate_per_s=1.0,
                   mode="offline", programs=arguments.offline_programs)  # fmt: skip


def burst(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the metastable collapse: calm, a burst, calm again."""
    rule = Rule().shortened(arguments.horizon)
    for arm in ("fcfs", LEVELS, "adaptive"):
        yield Cell(trace="bfcl-gt", arm=arm, profile=cost_model.load(PROFILE), rate_per_s=1.6,
                   mode="burst", rule=rule)  # fmt: skip


def sensitivity(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield one load with each constant of the cost model moved by 30 % either way.

    BFCL at what the reference sustains: where the order of the arms matters most.
    """
    profile = cost_model.load(PROFILE)
    profiles = [profile]
    for constant in cost_model.CONSTANTS:
        for factor in (0.7, 1.3):
            moved = profile.scaled(constant, factor)
            profiles.append(replace(moved, name=f"{constant} x {factor}"))
    rate_per_s = gate.table()["capacity"][PROFILE]["bfcl-gt"]
    for moved in profiles:
        for arm in ("fcfs", LEVELS, "adaptive"):
            yield Cell(trace="bfcl-gt", arm=arm, profile=moved, rate_per_s=rate_per_s,
                       rule=Rule().shortened(arguments.horizon))  # fmt: skip


def _run(cells: list[Cell], folder: Path, jobs: int) -> Iterator[dict[str, Any]]:
    ran = run_cells(cells, ResultCache(folder), jobs)
    for cell, (result, _) in zip(cells, ran, strict=True):
        token = result["token_latency_s"]
        print(f"{cell.trace:14} {cell.arm:13} {cell.profile.name:28} rate {cell.rate_per_s:<5g} "
              f"seed {cell.seed} mean {token['mean']:.4f} p95 {token['p95']:.4f} "
              f"p99 {token['p99']:.4f} s/token, response {result['response_s']['mean']:.1f} s, "
              f"hits {result['engine']['prefix_hit_share']:.2f}, "
              f"unfinished {result['unfinished']}/{result['programs']}", flush=True)  # fmt: skip
        yield result


def print_single(results: list[dict[str, Any]], _: argparse.Namespace) -> None:
    """Print the rates at 0.5 s a token, ours beside the paper's ratios."""
    print("\nprograms/s at a mean of 0.5 s/token; ratios of plas, and the paper's")
    for name in dict.fromkeys(r["trace"] for r in results):
        rates = report.gain_at(results, name, 0.5)
        ours = rates.get(LEVELS)
        print(f"{name}: " + ", ".join(
            f"{arm} {'not crossed' if rate is None else f'{rate:.2f}'}"
            for arm, rate in rates.items()))  # fmt: skip
        for arm, theirs in zip(("fcfs-nocache", "fcfs", "mlfq"), PAPER[name], strict=True):
            base = rates.get(arm)
            text = f"{ours / base:.2f}" if ours and base else "no figure: a limit is not crossed"
            print(f"  plas ÷ {arm}: {text} (paper {theirs})")


def print_offline(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print makespans."""
    ours = next(r for r in results if r["arm"] == LEVELS)["makespan_s"]
    count, (stock, mlfq) = arguments.offline_programs, OFFLINE_PAPER[1000]
    print(f"\noffline makespan of {count} chat programs")
    print(f"  paper at 1000: vLLM-opt {stock:.2f}, MLFQ {mlfq:.2f} x Autellix")
    for r in results:
        print(f"  {r['arm']:8} {r['makespan_s']:.0f} s, {r['makespan_s'] / ours:.3f} x plas")


def print_burst(results: list[dict[str, Any]], _: argparse.Namespace) -> None:
    """Print the mean response by arrival."""
    print("\nburst: mean response in s by window of arrival")
    for r in results:
        print(f"  {r['arm']:11} " + " ".join(f"{w[2]:.0f}" for w in r["response_by_arrival_s"]))


def print_sensitivity(results: list[dict[str, Any]], _: argparse.Namespace) -> None:
    """Print the order of the arms under each change."""
    print("\norder of the arms by mean token latency")
    for name in dict.fromkeys(r["profile"] for r in results):
        some = sorted((r["token_latency_s"]["mean"], r["arm"])
                      for r in results if r["profile"] == name)  # fmt: skip
        print(f"  {name:30} " + " < ".join(f"{arm} {value:.3f}" for value, arm in some))


PRINT = {
    "single": print_single,
    "offline": print_offline,
    "burst": print_burst,
    "sensitivity": print_sensitivity,
}

if __name__ == "__main__":
    main()

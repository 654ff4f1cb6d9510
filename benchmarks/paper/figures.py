"""The paper's figures from the simulator: single engine, tails, offline, burst, SRPT; what if.

Results go to ``--out`` as JSON (kept by code, trace and profile in ``--out``/cache, so a second run
is quick), figures and one page beside them, and tables that set our ratios beside the paper's are
printed. The paper's ratios are read off its figures (about 1 % of error); its engine is vLLM 0.6.1.

    python -m benchmarks.paper.figures --horizon 3600 --seeds 5 --jobs 2      # the rule
    python -m benchmarks.paper.figures --horizon 300 --seeds 1 --jobs 2       # a look
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from autellix.server.lab import cost_model, gate, report
from autellix.server.lab.cells import Ran, cell_runner, run_cells
from autellix.server.lab.measure import Cell, Rule
from autellix.server.lab.result_cache import ResultCache
from autellix.server.lab.simulate_command import document
from benchmarks.paper import single_engine, steady
from benchmarks.paper.single_engine import PROFILE, Result
from benchmarks.policy_gate import LEVELS

OFFLINE_PAPER = {1000: (1874 / 1473, 1640 / 1473)}  # vLLM-opt ÷ Autellix, MLFQ ÷ Autellix
#: Programs per second here, where a queue has formed, and the paper's Autellix ÷ SRPT.
SRPT_PAPER = {"chat-sharegpt": (1.9, 0.341 / 0.069), "lats": (0.65, 0.554 / 0.115)}
CROWD_PER_S = 1.05  # BFCL; what the engine bears is 1.6


def main() -> None:
    """Run what was asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/paper"))
    parser.add_argument("--horizon", type=float, default=3600.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(single_engine.PAPER), action="append")
    parser.add_argument("--arm", action="append", help="only stock and this (single)")
    parser.add_argument("--parts", default="single,steady,offline,burst,sensitivity,srpt")
    parser.add_argument("--drain", type=float, help="seconds, where not scaled (steady)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of a rate (steady)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once")
    parser.add_argument("--offline-programs", type=int, default=1000)
    parser.add_argument("--rho", type=float, default=1.3, help="load of the sensitivity")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = partial(_run, folder=arguments.out / "cache", jobs=arguments.jobs)
    for name in arguments.parts.split(","):
        if name == "single":
            rule = Rule().shortened(arguments.horizon)
            results = [
                result for trace in arguments.only or single_engine.PAPER
                for result in single_engine.climb(trace, _arms(trace, arguments.arm), rule,
                                                  arguments.seeds, run)
            ]  # fmt: skip
            single_engine.show(results)
        elif name == "steady":
            results = _steady(arguments)
        else:
            cells, show = FIXED[name]
            results = run(list(cells(arguments)))
            show(results, arguments)
        (arguments.out / f"{name}.json").write_text(document(results))
        if name in ("single", "burst"):
            report.draw(results, arguments.out / name)


def _steady(arguments: argparse.Namespace) -> list[Result]:
    rule = Rule().shortened(arguments.horizon)
    if arguments.drain:
        rule = replace(rule, drain_s=arguments.drain)
    with cell_runner(ResultCache(arguments.out / "cache"), arguments.jobs) as run_cell:

        def run(cell: Cell) -> Result:
            ran = run_cell(cell)
            _say(cell, ran)
            return ran.result

        return steady.steady(arguments.only or list(single_engine.PAPER), rule, arguments.seeds,
                             run, arguments.jobs, arguments.tolerance)  # fmt: skip


def _arms(trace: str, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """Return the arms of a trace that were chosen, and stock vLLM, which all are set against."""
    wanted = None if chosen is None else {single_engine.STOCK, *chosen}
    arms = single_engine.arms_of(trace)
    return tuple(a for a in arms if wanted is None or a.partition(":")[0] in wanted)


def offline(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the paper's Figure 16: all programs at once."""
    for arm in ("fcfs", "mlfq", LEVELS, "adaptive"):
        yield Cell(trace="chat-sharegpt", arm=arm, profile=cost_model.load(PROFILE), rate_per_s=1.0,
                   mode="offline", programs=arguments.offline_programs)  # fmt: skip


def burst(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the metastable collapse: a bearable rate, and 200 programs more at once."""
    rule = Rule().shortened(arguments.horizon)
    for arm in ("fcfs", LEVELS, "adaptive"):
        yield Cell(trace="bfcl-gt", arm=arm, profile=cost_model.load(PROFILE),
                   rate_per_s=CROWD_PER_S, mode="crowd", rule=rule)  # fmt: skip


def sensitivity(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield one load with each constant of the cost model moved by 30 % either way.

    BFCL above what the reference sustains: where the order of the arms matters most.
    """
    profile = cost_model.load(PROFILE)
    profiles = [profile]
    for constant in cost_model.CONSTANTS:
        for factor in (0.7, 1.3):
            moved = profile.scaled(constant, factor)
            profiles.append(replace(moved, name=f"{constant} x {factor}"))
    rate_per_s = round(arguments.rho * gate.table()["capacity"][PROFILE]["bfcl-gt"], 6)
    for moved in profiles:
        for arm in ("fcfs", LEVELS, "adaptive"):
            yield Cell(trace="bfcl-gt", arm=arm, profile=moved, rate_per_s=rate_per_s,
                       rule=Rule().shortened(arguments.horizon))  # fmt: skip


def srpt(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells of the paper's gap to SRPT, which knows what every program has left."""
    rule = Rule().shortened(arguments.horizon)
    for trace, (rate_per_s, _) in SRPT_PAPER.items():
        for arm in (single_engine.paper_arm(trace), "adaptive", "srpt", "srpt-smith"):
            for seed in range(arguments.seeds):
                yield Cell(trace=trace, arm=arm, profile=cost_model.load(PROFILE),
                           rate_per_s=rate_per_s, seed=seed, rule=rule)  # fmt: skip


def _run(cells: Sequence[Cell], folder: Path, jobs: int) -> list[Result]:
    found = []
    for cell, ran in zip(cells, run_cells(cells, ResultCache(folder), jobs), strict=True):
        _say(cell, ran)
        found.append(ran.result)
    return found


def _say(cell: Cell, ran: Ran) -> None:
    result, token = ran.result, ran.result["token_latency_s"]
    print(f"{cell.trace:14} {cell.arm:13} {cell.profile.name:28} rate {cell.rate_per_s:<5.4g} "
          f"seed {cell.seed} mean {token['mean']:.4f} p95 {token['p95']:.4f} "
          f"p99 {token['p99']:.4f} s/token, response {result['response_s']['mean']:.1f} s, "
          f"hits {result['engine']['prefix_hit_share']:.2f}, backlog "
          f"{result['backlog_slope_per_s']:+.4f}/s, "
          f"unfinished {result['unfinished']}/{result['programs']}, took {ran.took_s:.0f} s",
          flush=True)  # fmt: skip


def print_offline(results: Sequence[Result], arguments: argparse.Namespace) -> None:
    """Print makespans."""
    ours = next(r for r in results if r["arm"] == LEVELS)["makespan_s"]
    count, (stock, mlfq) = arguments.offline_programs, OFFLINE_PAPER[1000]
    print(f"\noffline makespan of {count} chat programs")
    print(f"  paper at 1000: vLLM-opt {stock:.2f}, MLFQ {mlfq:.2f} x Autellix")
    for r in results:
        print(f"  {r['arm']:8} {r['makespan_s']:.0f} s, {r['makespan_s'] / ours:.3f} x plas")


def print_burst(results: Sequence[Result], _: argparse.Namespace) -> None:
    """Print the mean response by arrival, and when it is back."""
    print("\n200 programs at once: mean response in s by window of arrival")
    for r in results:
        back = "never" if r["recovery_s"] is None else f"after {r['recovery_s']:.0f} s"
        windows = " ".join(f"{w[2]:.0f}" for w in r["response_by_arrival_s"])
        print(f"  {r['arm']:28} back {back}: {windows}")


def print_sensitivity(results: Sequence[Result], _: argparse.Namespace) -> None:
    """Print the order of the arms under each change, and in how many it stays."""
    print("\norder of the arms by mean token latency")
    orders = []
    for name in dict.fromkeys(r["profile"] for r in results):
        some = sorted((r["token_latency_s"]["mean"], r["arm"])
                      for r in results if r["profile"] == name)  # fmt: skip
        orders.append([arm for _, arm in some])
        print(f"  {name:30} " + " < ".join(f"{arm} {value:.3f}" for value, arm in some))
    as_it_is, *moved = orders
    print(f"the order stays in {sum(order == as_it_is for order in moved)} of {len(moved)} changes")


def print_srpt(results: Sequence[Result], _: argparse.Namespace) -> None:
    """Print every arm's mean token latency ÷ SRPT's, beside the paper's."""
    print("\nmean token latency ÷ SRPT's")
    for trace, (rate_per_s, theirs) in SRPT_PAPER.items():
        means = {
            arm: fmean(r["token_latency_s"]["mean"]
                       for r in results if (r["trace"], r["arm"]) == (trace, arm))
            for arm in dict.fromkeys(r["arm"] for r in results if r["trace"] == trace)
        }  # fmt: skip
        print(f"  {trace} at {rate_per_s:g}/s, SRPT {means['srpt'] * 1e3:.1f} ms: "
              + ", ".join(f"{arm} {mean / means['srpt']:.2f}" for arm, mean in means.items())
              + f"; the paper's policy {theirs:.1f}")  # fmt: skip


FIXED = {
    "offline": (offline, print_offline),
    "burst": (burst, print_burst),
    "sensitivity": (sensitivity, print_sensitivity),
    "srpt": (srpt, print_srpt),
}

if __name__ == "__main__":
    main()

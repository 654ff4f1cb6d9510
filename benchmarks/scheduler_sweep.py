"""How flat or steep each setting of the scheduler is: one is changed at a time, the rest stays.

    python -m benchmarks.scheduler_sweep --horizon 300 --jobs 2

Runs in the simulator at the gate's load (``--rho`` of what the clairvoyant reference sustains). Per
setting and value it prints mean and P99 token latency, and both as shares of those with the default
on the same seeds. ``--horizon`` scales the measuring rule (docs/lab.md).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from autellix.server.lab import cost_model, gate
from autellix.server.lab.cells import run_cells
from autellix.server.lab.measure import Cell, Rule
from autellix.server.lab.result_cache import ResultCache
from benchmarks.policy_gate import LEVELS

PROFILE = "a100-80g-llama-3.1-8b"
SWEEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "plas": {
        "levels": ("[20]", "[5,20]", "[2.5,5,10,20,40,80,160]", "[0.5,1,2,4,8,16,32]"),
        "bounds": ("[1.25,5,20]", "[2.5,10,40]", "[10,40,160]", "[20,80,320]"),
        "quanta_s": ("[1,4,16]", "[2.5,7.5,30]", "[10,30,120]"),
        "beta": ("1", "2", "4", "16", "64", "null"),
        "window_steps": ("1", "16", "64"),
        "order": ('"call"',),
        "charge": ('"share"',),
    },
    "adaptive": {
        "ageing": ("0", "1", "4", "16", "64"),
        "displace": ("0.25", "0.5", "1", "1000"),
        "kv_fill": ("0.7", "0.8", "0.95"),
        "elders": ("0", "0.1", "0.5"),
        "keep_gaps": ("false",),
    },
}


class Row(NamedTuple):
    """One value of one setting, as an arm of the lab."""

    policy: str
    setting: str
    value: str
    arm: str


def main() -> None:
    """Run what was asked for and print a table per trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="append")
    parser.add_argument("--policy", choices=sorted(SWEEPS), action="append")
    parser.add_argument("--setting", action="append", help="only these, and the default")
    parser.add_argument("--rho", type=float, default=1.0)
    parser.add_argument("--horizon", type=float, default=3600.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=Path("out/sweep"))
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for trace in arguments.trace or ("bfcl-gt", "chat-sharegpt"):
        for policy in arguments.policy or SWEEPS:
            rows = [
                row for row in rows_of(policy)
                if row.setting in (arguments.setting or (row.setting,)) or not row.value
            ]  # fmt: skip
            show(trace, rows, arguments)


def rows_of(policy: str) -> Iterator[Row]:
    """Yield the default first, then each value of each setting."""
    base = LEVELS if policy == "plas" else policy
    yield Row(policy, "default", "", base)
    for setting, values in SWEEPS[policy].items():
        for value in values:
            if setting in ("levels", "bounds"):
                arm = f"plas:level_bounds_s={value}"
            else:
                arm = f"{base}{';' if ':' in base else ':'}{setting}={value}"
            yield Row(policy, setting, value, arm)


def show(trace: str, rows: list[Row], arguments: argparse.Namespace) -> None:
    """Run the rows on one trace and print them as they come."""
    rate_per_s = round(gate.table()["capacity"][PROFILE][trace] * arguments.rho, 6)
    cells = [
        Cell(trace=trace, arm=row.arm, profile=cost_model.load(PROFILE), rate_per_s=rate_per_s,
             seed=seed, rule=Rule().shortened(arguments.horizon))
        for row in rows for seed in range(arguments.seeds)
    ]  # fmt: skip
    results = (ran.result for ran in run_cells(cells, ResultCache(arguments.cache), arguments.jobs))
    print(f"\n{trace}, {rate_per_s:g} programs/s, {arguments.seeds} seeds, horizon "
          f"{arguments.horizon:g} s")  # fmt: skip
    print("| policy | setting | value | mean ms | P99 ms | mean ÷ default | P99 ÷ default |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    base: list[dict[str, Any]] = []
    for row in rows:
        some = [next(results)["token_latency_s"] for _ in range(arguments.seeds)]
        base = base or some
        figures = [fmean(each[name] for each in some) * 1e3 for name in ("mean", "p99")]
        ratios = [
            fmean(a[name] / b[name] for a, b in zip(some, base, strict=True))
            for name in ("mean", "p99")
        ]
        print(f"| {row.policy} | {row.setting} | {row.value} | {figures[0]:.1f} | {figures[1]:.1f} "
              f"| {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

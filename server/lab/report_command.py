"""``autellix report``: figures and one HTML page from the JSON of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from . import metrics, report


def main(argv: Sequence[str]) -> int:
    """Run ``autellix report``.

    Raises:
        ReportError: there is nothing to draw, or nothing to draw it with.
    """
    parser = argparse.ArgumentParser(prog="autellix report", description=__doc__)
    parser.add_argument("results", type=Path, help="a folder of JSON files, or one file")
    parser.add_argument("--out", type=Path, help="where to write; the results' folder if not given")
    parser.add_argument(
        "--limit", type=float, default=0.5, help="token latency in s at which rates are compared"
    )
    parser.add_argument("--base", default="fcfs", help="the arm that ratios are taken to")
    arguments = parser.parse_args(argv)
    results = report.load(arguments.results)
    beside = arguments.results if arguments.results.is_dir() else arguments.results.parent
    for path in report.draw(results, arguments.out or beside):
        sys.stdout.write(f"{path}\n")
    for trace in dict.fromkeys(r["trace"] for r in results):
        _print_ratios(results, trace, arguments.base)
        for arm, rate in report.gain_at(results, trace, arguments.limit).items():
            text = "not crossed in this sweep" if rate is None else f"{rate:.3g} programs/s"
            sys.stdout.write(f"{trace} {arm}: {arguments.limit:g} s/token at {text}\n")
    return 0


def _print_ratios(results: Sequence[report.Result], trace: str, base: str) -> None:
    """Print each arm's paired ratio to the base, with its 95 % interval where seeds allow one."""
    some = [r for r in results if r["trace"] == trace]
    for rate in sorted({r["rate_per_s"] for r in some}):
        for arm in dict.fromkeys(r["arm"] for r in some if r["arm"] != base):
            for figure in ("token_latency_s", "response_s", "slowdown"):
                ratios = report.paired_ratios(results, trace, rate, arm, base, figure)
                if not ratios:
                    continue
                text = f"{trace} {rate:g}/s {arm} ÷ {base} {figure}: {fmean(ratios):.3f}"
                if len(ratios) > 1:
                    low, high = metrics.bootstrap(ratios)
                    text += f" ({low:.3f} to {high:.3f}, {len(ratios)} seeds)"
                else:
                    text += " (one seed: no interval)"
                sys.stdout.write(text + "\n")

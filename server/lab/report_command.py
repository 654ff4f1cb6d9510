"""``autellix report``: figures and one HTML page from the JSON of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from . import metrics, report
from .setting import Group, groups, mode_of


def main(argv: Sequence[str]) -> int:
    """Run ``autellix report``.

    Raises:
        ReportError: there is nothing to draw, or nothing to draw it with.
    """
    parser = argparse.ArgumentParser(prog="autellix report", description=__doc__)
    parser.add_argument("results", type=Path, help="a folder of JSON files, or one file")
    parser.add_argument("--out", type=Path, help="where to write; the results' folder if not given")
    parser.add_argument(
        "--limit",
        type=float,
        default=report.LIMIT_S,
        help="token latency in s at which rates are compared",
    )
    parser.add_argument("--base", default=report.BASE, help="the arm that ratios are taken to")
    arguments = parser.parse_args(argv)
    results = report.load(arguments.results)
    beside = arguments.results if arguments.results.is_dir() else arguments.results.parent
    paths = report.draw(
        results, arguments.out or beside, limit_s=arguments.limit, base=arguments.base
    )
    for path in paths:
        sys.stdout.write(f"{path}\n")
    for group in groups(results):
        for mode in dict.fromkeys(map(mode_of, group.results)):
            _print_ratios(group, mode, arguments.base)
        _print_gains(group, arguments.limit, arguments.base)
    return 0


def _print_gains(group: Group, limit_s: float, base: str) -> None:
    """Print each arm's rate at the limit, and its ratio to the base's."""
    for gain in report.gains(group.results, group.results[0]["trace"], limit_s, base):
        text = f"{limit_s:g} s/token is not crossed in this sweep"
        if gain.rate_per_s is not None:
            text = f"{limit_s:g} s/token at {gain.rate_per_s:.3g} programs/s"
        if gain.ratio is not None and gain.arm != base:
            text += f", {gain.ratio:.3g} x {base}"
        sys.stdout.write(f"{group.heading} {gain.arm}: {text}\n")


def _print_ratios(group: Group, mode: str, base: str) -> None:
    """Print each arm's paired ratio to the base, with its 95 % interval where seeds allow one."""
    some = [r for r in group.results if mode_of(r) == mode]
    trace = some[0]["trace"]
    for rate in sorted({r["rate_per_s"] for r in some}):
        where = f"{group.heading} " + ("" if mode == "open" else f"{mode} ") + f"{rate:g}/s"
        for arm in dict.fromkeys(r["arm"] for r in some if r["arm"] != base):
            for figure in ("token_latency_s", "response_s", "slowdown"):
                ratios = report.paired_ratios(some, trace, rate, arm, base, figure, mode=mode)
                if not ratios:
                    continue
                text = f"{where} {arm} ÷ {base} {figure}: {fmean(ratios):.3f}"
                if len(ratios) > 1:
                    low, high = metrics.bootstrap(ratios)
                    text += f" ({low:.3f} to {high:.3f}, {len(ratios)} seeds)"
                else:
                    text += " (one seed: no interval)"
                sys.stdout.write(text + "\n")

"""``autellix simulate``: policies on vLLM's own scheduler in virtual time, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

from . import capacity, cost_model, gate
from .arms import CLAIRVOYANT
from .cells import run_cells
from .measure import MEASURED, Cell, Mode, Rule
from .result_cache import ResultCache
from .virtual_fleet import Faults
from .workload import WAIT_CAP_S, Waits


def main(argv: Sequence[str]) -> int:
    """Run ``autellix simulate``.

    Raises:
        TraceError, ProfileError, UnknownArmError: an argument names nothing.
    """
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results = ResultCache(arguments.cache)
    if arguments.capacity:
        return _capacity(arguments, results)
    if arguments.slo is not None:
        return _slo(arguments, results)
    if arguments.gate:
        cells = [cell for _, cell in gate.cells(arguments.seed, arguments.horizon)]
    else:
        cells = list(_cells(arguments))
    kept = []
    sys.stdout.write(_HEAD)
    sys.stdout.flush()
    for result, took_s in run_cells(cells, results, arguments.jobs):
        kept.append(result)
        sys.stdout.write(_line(result, took_s))
        sys.stdout.flush()
    if arguments.json:
        _write(kept, arguments.json)
    if arguments.plot:
        from . import report

        report.draw(kept, arguments.plot)
    return 0


def document(results: Sequence[dict[str, Any]]) -> str:
    """Return results as the JSON that ``autellix report`` reads; the same input, the same bytes."""
    kept = [{k: v for k, v in r.items() if k != MEASURED} for r in results]
    return json.dumps({"form": 1, "results": kept}, indent=1, sort_keys=True) + "\n"


def _write(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the document, and what a clock measured beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(results), encoding="utf-8")
    names = ("trace", "arm", "rate_per_s", "seed", MEASURED)
    times = [{name: r.get(name) for name in names} for r in results]
    path.with_suffix(".timing").write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")


def _capacity(arguments: argparse.Namespace, results: ResultCache) -> int:
    """Print the highest rate that the clairvoyant reference sustains."""
    low, high = arguments.capacity[0], arguments.capacity[-1]
    cell = next(_cells(arguments))
    members = arguments.policy or CLAIRVOYANT
    sys.stdout.write(_HEAD)
    try:
        rate = capacity.reference_capacity(cell, _Runner(results), low, high, members=members)
    except capacity.NotCrossedError as error:
        sys.stderr.write(f"autellix simulate: {error}\n")
        return 1
    sys.stdout.write(f"{cell.trace} on {cell.profile.name}: {rate:.3f} programs/s\n")
    return 0


def _slo(arguments: argparse.Namespace, results: ResultCache) -> int:
    """Print each policy's highest rate within a limit of mean token latency."""
    low, high = arguments.rate[0], arguments.rate[-1]
    cells = {cell.arm: cell for cell in _cells(arguments)}
    run = _Runner(results)
    found: dict[str, str] = {}
    sys.stdout.write(_HEAD)
    for arm, cell in cells.items():
        try:
            rate = capacity.rate_at_limit(cell, run, arguments.slo, low, high)
            found[arm] = f"{rate:.3f} programs/s"
        except capacity.NotCrossedError as error:
            found[arm] = f"no figure: {error}"
    for arm, text in found.items():
        sys.stdout.write(
            f"{arguments.trace}, mean token latency <= {arguments.slo:g} s, {arm}: {text}\n"
        )
    if arguments.json:
        _write(run.results, arguments.json)
    return 1 if any(text.startswith("no figure") for text in found.values()) else 0


class _Runner:
    """Runs one cell after the other, prints each, and keeps what they gave."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        self.results: list[dict[str, Any]] = []

    def __call__(self, cell: Cell) -> dict[str, Any]:
        ((result, took_s),) = run_cells([cell], self._cache)
        self.results.append(result)
        sys.stdout.write(_line(result, took_s))
        sys.stdout.flush()
        return result


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    profile = cost_model.load(arguments.profile)
    rule = Rule()
    if arguments.horizon is not None:
        rule = rule.shortened(arguments.horizon)
    for rate in arguments.rate:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            for arm, balancer in product(arguments.policy or ["fcfs"], arguments.balancer):
                yield Cell(
                    trace=arguments.trace,
                    arm=arm,
                    profile=profile,
                    rate_per_s=rate,
                    seed=seed,
                    mode=arguments.mode,
                    engines=arguments.engines,
                    balancer=balancer,
                    faults=Faults(slow=arguments.slow, dead_s=arguments.dead),
                    programs=arguments.programs,
                    concurrency=arguments.concurrency if arguments.mode == "closed" else None,
                    rule=rule,
                    waits=Waits(
                        null=arguments.null_waits,
                        scale=arguments.wait_scale,
                        cap_s=arguments.wait_cap,
                        seed=seed,
                    ),
                )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autellix simulate", description=__doc__)
    add = parser.add_argument
    add("--trace", default="bfcl-gt", help="a set's name (autellix trace list) or a file")
    add("--policy", type=_words, help="policies, with commas between; fcfs if none is named")
    add("--rate", type=_numbers, default=[1.0], help="programs per second, with commas between")
    add("--profile", default="a100-80g-llama-3.1-8b", help="an engine, or a TOML file")
    add("--engines", type=int, default=1, help="how many")
    add("--balancer", type=_words, default=["locality"], help="which engine gets a call, with "
        "commas between; see docs/balancer.md")  # fmt: skip
    add("--slow", type=_numbered, default=(), metavar="ENGINE=TIMES", help="an engine that takes "
        "so many times as long, with commas between")  # fmt: skip
    add("--dead", type=_numbered, default=(), metavar="ENGINE=SECOND", help="an engine that dies "
        "then, with commas between")  # fmt: skip
    add("--mode", choices=get_args(Mode), default="open")
    add("--programs", type=int, help="smoke run: so many programs, all measured; no ratio of "
        "such runs means anything")  # fmt: skip
    add("--concurrency", type=int, default=16, help="programs at once in closed mode")
    add("--horizon", type=float, help="seconds of arrivals, 3600 by the measuring rule, the rest "
        "of which is scaled with it; of --gate 900")  # fmt: skip
    add("--seed", type=int, default=0, help="the first seed")
    add("--seeds", type=int, default=1, help="how many seeds, each the same for all policies")
    add("--null-waits", choices=("zero", "drawn"), default="zero",
        help="waits that the trace did not record")  # fmt: skip
    add("--wait-scale", type=float, default=1.0)
    add("--wait-cap", type=float, default=WAIT_CAP_S, help="seconds")
    add("--json", type=Path, metavar="OUT", help="write the figures")
    add("--gate", action="store_true", help="run the gate set (gate.toml) instead")
    add("--capacity", type=_numbers, metavar="LOW,HIGH", help="find the highest rate between "
        "these that the clairvoyant reference sustains, or that one of --policy does")  # fmt: skip
    add("--slo", type=float, metavar="SECONDS", help="find, for each policy, the highest rate "
        "between the two of --rate at which the mean token latency is within this")  # fmt: skip
    add("--jobs", type=_count, default=1, metavar="N", help="run so many cells at once, each in a "
        "process of its own")  # fmt: skip
    add("--plot", type=Path, metavar="DIR", help="draw them")
    add("--cache", type=Path, metavar="DIR", help="keep results by code, trace and profile")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in re.split(r",(?![^[]*\])", text) if word]  # none inside brackets


def _numbers(text: str) -> list[float]:
    numbers = [float(word) for word in _words(text)]
    if not numbers or min(numbers) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates above 0")
    return numbers


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _numbered(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [word.split("=") for word in _words(text)]
        return tuple((int(engine), float(value)) for engine, value in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ENGINE=NUMBER") from None


_HEAD = (
    f"{'policy':14}{'balancer':14}{'rate':>7}{'seed':>5}{'n':>6}{'left':>5}  "
    f"{'token latency ms: mean':>23}{'p95':>8}{'p99':>8}  {'response s':>10}"
    f"{'slowdown':>9}{'hits':>6}{'recomp':>7}{'batch':>7}{'backlog/s':>10}"
    f"{'ms/step':>8}{'took s':>8}\n"
)


def _balancer(result: dict[str, Any]) -> str:
    return str(result["balancer"]) if result["engines"] > 1 else "-"


def _line(result: dict[str, Any], took_s: float) -> str:
    token, engine = result["token_latency_s"], result["engine"]
    if not token:
        return f"{result['arm']:28}{result['rate_per_s']:7.3g}  no program is measured\n"
    return (
        f"{result['arm']:13} {_balancer(result):14}{result['rate_per_s']:7.3g}{result['seed']:5d}"
        f"{result['programs']:6d}{result['unfinished']:5d}  "
        f"{token['mean'] * 1e3:23.1f}{token['p95'] * 1e3:8.1f}{token['p99'] * 1e3:8.1f}  "
        f"{result['response_s']['mean']:10.2f}{result['slowdown']['mean']:9.2f}"
        f"{engine['prefix_hit_share']:6.2f}{engine['recomputed_share']:7.3f}"
        f"{engine['mean_batch']:7.1f}{result['backlog_slope_per_s']:10.4f}"
        f"{result[MEASURED]['decision_ms_per_step']:8.2f}{took_s:8.1f}{_recovery(result)}\n"
    )


def _recovery(result: dict[str, Any]) -> str:
    if result["mode"] != "crowd":
        return ""
    seconds = result["recovery_s"]
    return "  never back" if seconds is None else f"  back in {seconds:.0f} s"

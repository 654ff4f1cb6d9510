"""``autellix simulate``: policies on vLLM's own scheduler in virtual time, without a GPU."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

from . import capacity, cost_model, gate
from .arms import CLAIRVOYANT
from .capacity import REFERENCE
from .cells import Ran, cell_runner, run_cells
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
    wanted = list(_wanted(arguments))
    kept = []
    sys.stdout.write(_HEAD)
    sys.stdout.flush()
    ran = run_cells([cell for _, cell in wanted], results, arguments.jobs)
    for (note, _), (result, took_s) in zip(wanted, ran, strict=True):
        kept.append({**result, **note})
        _show(kept[-1], took_s)
    if not arguments.gate and REFERENCE in (arguments.policy or ()):
        for row in capacity.references(kept):
            kept.append(row)
            _show(row)
    if arguments.json:
        _write(kept, arguments.json)
    if arguments.plot:
        from . import report

        report.draw(kept, arguments.plot)
    return _judge(kept) if arguments.gate else 0


def _judge(results: Sequence[dict[str, Any]]) -> int:
    """Print whether the gate's limits are met; return the status."""
    verdicts = gate.verdict(results, gate.limits())
    for judged in verdicts:
        sys.stdout.write(f"{judged.line}\n")
    met = sum(judged.met is True for judged in verdicts)
    sys.stdout.write(f"{met} of {len(verdicts)} limits are met\n")
    return 0 if met == len(verdicts) else 1


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
    members = capacity.with_members(arguments.policy or [REFERENCE])

    def find(cell: Cell, run: capacity.Run) -> float:
        return capacity.reference_capacity(cell, run, low, high, members=members)

    cells = list(_cells(arguments, members[:1], [low]))
    found, kept = _search(cells, find, results, arguments.jobs)
    profile = cost_model.load(arguments.profile).name
    status = 0
    for (_, balancer), rates in found.items():
        name = f"{arguments.trace} on {profile}{_behind(arguments, balancer)}"
        text = capacity.told(rates, arguments.seed)
        if text.startswith(capacity.NO_FIGURE):
            status = 1
            sys.stderr.write(f"autellix simulate: {name}: {text}\n")
        else:
            sys.stdout.write(f"{name}: {text}\n")
    if arguments.json:
        _write(kept, arguments.json)
    return status


def _slo(arguments: argparse.Namespace, results: ResultCache) -> int:
    """Print each policy's highest rate within a limit of mean token latency."""
    low, high = arguments.rate[0], arguments.rate[-1]

    def find(cell: Cell, run: capacity.Run) -> float:
        return capacity.rate_at_limit(cell, run, arguments.slo, low, high)

    cells = list(_cells(arguments, arguments.policy or ["fcfs"], [low]))
    found, kept = _search(cells, find, results, arguments.jobs)
    status = 0
    base = None
    for (arm, balancer), rates in found.items():
        name = f"{arm}{_behind(arguments, balancer)}"
        text = capacity.told(rates, arguments.seed, base)
        base = base or (name, rates)
        status = max(status, int(text.startswith(capacity.NO_FIGURE)))
        sys.stdout.write(
            f"{arguments.trace}, mean token latency <= {arguments.slo:g} s, {name}: {text}\n"
        )
    if arguments.json:
        _write(kept, arguments.json)
    return status


def _search(
    cells: Sequence[Cell],
    find: Callable[[Cell, capacity.Run], float],
    cache: ResultCache,
    jobs: int,
) -> tuple[dict[tuple[str, str], list[float | capacity.NotCrossedError]], list[dict[str, Any]]]:
    """Search from each of these cells, several at once, and print the cells that were run.

    Returns:
        What is found of each (arm, balancer), by seed a rate, or why there is none; and the
        figures of all cells that were run, search by search.
    """
    sys.stdout.write(_HEAD)
    with cell_runner(cache, jobs) as run_cell, ThreadPoolExecutor(jobs) as threads:
        runners = [_Runner(run_cell) for _ in cells]
        rates = list(threads.map(partial(_found, find), cells, runners))
    found: dict[tuple[str, str], list[float | capacity.NotCrossedError]] = {}
    for cell, rate in zip(cells, rates, strict=True):
        found.setdefault((cell.arm, cell.balancer), []).append(rate)
    return found, [result for runner in runners for result in runner.results]


def _found(
    find: Callable[[Cell, capacity.Run], float], cell: Cell, run: capacity.Run
) -> float | capacity.NotCrossedError:
    try:
        return find(cell, run)
    except capacity.NotCrossedError as error:
        return error


def _behind(arguments: argparse.Namespace, balancer: str) -> str:
    return f" behind {balancer}" if arguments.engines > 1 else ""


class _Runner:
    """Runs one cell after the other, prints each, and keeps what they gave."""

    def __init__(self, run_cell: Callable[[Cell], Ran]) -> None:
        self._run_cell = run_cell
        self.results: list[dict[str, Any]] = []

    def __call__(self, cell: Cell) -> dict[str, Any]:
        if cell.arm != REFERENCE:
            return self._run(cell)
        members = [self._run(replace(cell, arm=member)) for member in CLAIRVOYANT]
        (result,) = capacity.references(members)
        self._keep(result)
        return result

    def _run(self, cell: Cell) -> dict[str, Any]:
        result, took_s = self._run_cell(cell)
        self._keep(result, took_s)
        return result

    def _keep(self, result: dict[str, Any], took_s: float = 0.0) -> None:
        self.results.append(result)
        _show(result, took_s)


def _wanted(arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Cell]]:
    """Yield the cells to run, each with what its result says besides its own."""
    if not arguments.gate:
        arms = capacity.with_members(arguments.policy or ["fcfs"])
        yield from (({}, cell) for cell in _cells(arguments, arms, arguments.rate))
        return
    for seed in _seeds(arguments):
        for rho, cell in gate.cells(seed, arguments.horizon):
            yield {"rho": rho}, cell


def _seeds(arguments: argparse.Namespace) -> range:
    return range(arguments.seed, arguments.seed + arguments.seeds)


def _cells(
    arguments: argparse.Namespace, arms: Sequence[str], rates: Sequence[float]
) -> Iterator[Cell]:
    profile = cost_model.load(arguments.profile)
    rule = Rule()
    if arguments.horizon is not None:
        rule = rule.shortened(arguments.horizon)
    if arguments.drain is not None:
        rule = replace(rule, drain_s=arguments.drain)
    for rate, seed in product(rates, _seeds(arguments)):
        for arm, balancer in product(arms, arguments.balancer):
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
    add("--policy", type=_words, help="policies, with commas between; fcfs if none is named; "
        "clairvoyant: those that know the future, and the best of them")  # fmt: skip
    add("--rate", type=_numbers, default=[1.0], help="programs per second, with commas between")
    add("--profile", default="a100-80g-llama-3.1-8b", help="an engine, or a TOML file")
    add("--engines", type=_count, default=1, help="how many")
    add("--balancer", type=_words, default=["locality"], help="which engine gets a call, with "
        "commas between; see docs/balancer.md")  # fmt: skip
    add("--slow", type=_numbered, default=(), metavar="ENGINE=TIMES", help="an engine that takes "
        "so many times as long, with commas between")  # fmt: skip
    add("--dead", type=_numbered, default=(), metavar="ENGINE=SECOND", help="an engine that dies "
        "then, with commas between")  # fmt: skip
    add("--mode", choices=get_args(Mode), default="open")
    add("--programs", type=_count, help="smoke run: so many programs, all measured; no ratio of "
        "such runs means anything")  # fmt: skip
    add("--concurrency", type=_count, default=16, help="programs at once in closed mode")
    add("--horizon", type=_seconds, help="seconds of arrivals, 3600 by the measuring rule, the "
        "rest of which is scaled with it; of --gate 900")  # fmt: skip
    add("--drain", type=_seconds, help="seconds that measured programs get to end after "
        "the window, 7200 by the rule; a short --horizon leaves long programs too few")  # fmt: skip
    add("--seed", type=int, default=0, help="the first seed")
    add("--seeds", type=_count, default=1, help="how many seeds, each the same for all policies")
    add("--null-waits", choices=("zero", "drawn"), default="zero",
        help="waits that the trace did not record")  # fmt: skip
    add("--wait-scale", type=_amount, default=1.0, help="multiplies all waits")
    add("--wait-cap", type=_amount, default=WAIT_CAP_S, help="seconds")
    add("--json", type=Path, metavar="OUT", help="write the figures")
    add("--gate", action="store_true", help="run the gate set (gate.toml) instead and say "
        "which limits are met; status 1 if one is not")  # fmt: skip
    add("--capacity", type=_numbers, metavar="LOW,HIGH", help="find the highest rate between "
        "these that the clairvoyant reference sustains, or that one of --policy does")  # fmt: skip
    add("--slo", type=_seconds, metavar="SECONDS", help="find, for each policy, the highest rate "
        "between the two of --rate at which the mean token latency is within this")  # fmt: skip
    add("--jobs", type=_count, default=1, metavar="N", help="run so many cells at once, each in a "
        "process of its own")  # fmt: skip
    add("--plot", type=Path, metavar="DIR", help="draw them")
    add("--cache", type=Path, metavar="DIR", help="keep results by code, trace and profile")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in re.split(r",(?![^[]*\])", text) if word]  # none inside brackets


def _numbers(text: str) -> list[float]:
    numbers = [_number(word) for word in _words(text)]
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates above 0")
    return numbers


def _number(text: str) -> float:
    """Return a number, or one that fits no limit."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    if not 0 < (seconds := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _amount(text: str) -> float:
    if not 0 <= (amount := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return amount


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _numbered(text: str) -> tuple[tuple[int, float], ...]:
    pairs = [re.fullmatch(r"(\d+)=(\S+)", word) for word in _words(text)]
    values = [(int(pair[1]), _number(pair[2])) for pair in pairs if pair is not None]
    if not pairs or len(values) < len(pairs) or not all(0 < v < math.inf for _, v in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ENGINE=NUMBER, above 0")
    return tuple(values)


_HEAD = (
    f"{'policy':14}{'balancer':14}{'rate':>7}{'seed':>5}{'n':>6}{'left':>5}  "
    f"{'token latency ms: mean':>23}{'p95':>8}{'p99':>8}  {'response s':>10}"
    f"{'slowdown':>9}{'hits':>6}{'recomp':>7}{'batch':>7}{'backlog/s':>10}"
    f"{'ms/step':>8}{'took s':>8}\n"
)


def _show(result: dict[str, Any], took_s: float = 0.0) -> None:
    sys.stdout.write(_line(result, took_s))
    sys.stdout.flush()


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
        f"{result[MEASURED]['decision_ms_per_step']:8.2f}{took_s:8.1f}{_recovery(result)}{_note(result)}\n"
    )


def _note(result: dict[str, Any]) -> str:
    """Return a gate cell's load, or whose figures the clairvoyant reference's are."""
    rho = f"  rho {result['rho']:g}" if "rho" in result else ""
    return f"{rho}  = {result['member']}" if "member" in result else rho


def _recovery(result: dict[str, Any]) -> str:
    if result["mode"] not in ("burst", "crowd"):
        return ""
    seconds = result["recovery_s"]
    return "  never back" if seconds is None else f"  back in {seconds:.0f} s"

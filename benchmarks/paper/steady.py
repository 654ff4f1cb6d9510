"""Programs per second at a latency that stock vLLM holds: no run's length is in the figure.

Above what an engine bears, the rate at a latency measures how long arrivals lasted. So, per trace
and seed: the highest rate that stock vLLM sustains (its *own* capacity), its mean token latency at
0.9 of that, and the highest rate at which every other arm holds that latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Final, NamedTuple

from autellix.server.lab import capacity, cost_model
from autellix.server.lab.measure import Cell, Rule
from benchmarks.paper.single_engine import PROFILE, STOCK, paper_arm

Result = dict[str, Any]
Run = Callable[[Cell], Result]

SHARE: Final = 0.9  # of stock vLLM's own capacity: where it stands
STEP: Final = 1.2  # from one rate to the next, until a limit is crossed
RATES_MAX: Final = 12
#: Programs per second that stock vLLM is known to sustain: where the search begins.
BEGIN_PER_S: Final = {"chat-sharegpt": 0.7, "bfcl-gt": 1.25, "lats": 0.27, "mixed": 0.55}
#: What the issue of the paper's single-engine figure asks of the better of ours.
PAPER: Final = {"chat-sharegpt": 1.9, "bfcl-gt": 1.6, "lats": 1.8, "mixed": 2.5}


def bracket(holds: Callable[[float], bool], begin: float) -> tuple[float, float]:
    """Return a rate at which something holds and the next one, at which it does not.

    Raises:
        NotCrossedError: no such pair was found in ``RATES_MAX`` rates.
    """
    rate = begin
    upwards = holds(rate)
    for _ in range(RATES_MAX):
        following = rate * STEP if upwards else rate / STEP
        if holds(following) != upwards:
            return (rate, following) if upwards else (following, rate)
        rate = following
    raise capacity.NotCrossedError(f"nothing changes between {begin:g}/s and {rate:g}/s")


def edge(holds: Callable[[float], bool], begin: float, tolerance: float) -> float:
    """Return the highest rate at which something holds, from any rate to begin at."""
    known: dict[float, bool] = {}

    def asked(rate: float) -> bool:
        if rate not in known:
            known[rate] = holds(rate)
        return known[rate]

    low, high = bracket(asked, begin)
    return capacity.highest_rate(asked, low, high, tolerance)


def bears(result: Result) -> bool:
    """Return whether a rate is sustained: by the measuring rule, or within what chance explains.

    The rule's 2 % of the arrivals is less than a steady backlog moves by itself in a short window.
    A backlog of n programs that come by chance is steady to about the root of n, so that twice
    that is allowed as well; by the whole rule the 2 % are more.
    """
    rule = result["rule"]
    window_s = float(rule["window_end_s"]) - float(rule["warmup_s"])
    grown = float(result["backlog_slope_per_s"]) * window_s
    by_chance = grown <= 2 * math.sqrt(float(result["backlog_mean"]))
    return capacity.sustains(result) or (by_chance and not result["unfinished"])


class Held(NamedTuple):
    """The rate of an arm at stock vLLM's latency, for one trace and seed."""

    cell: Cell
    share: float  # of stock vLLM's rate
    there: Result
    at_stocks: Result  # the arm at stock vLLM's rate


def search(cell: Cell, arms: Sequence[str], run: Run, tolerance: float) -> list[Held]:
    """Return what each arm holds for one trace and seed, stock vLLM first.

    Args:
        cell: Trace, seed and rule; arm and rate are replaced.
        arms: Besides stock vLLM.
        run: Runs a cell, the same one in no time.
        tolerance: Of a rate.
    """

    def ran(arm: str, rate_per_s: float) -> Result:
        return run(replace(cell, arm=arm, rate_per_s=rate_per_s))

    def within(arm: str, rate_per_s: float) -> bool:
        return _mean_s(ran(arm, rate_per_s)) <= limit_s

    most = edge(lambda rate: bears(ran(STOCK, rate)), BEGIN_PER_S[cell.trace], tolerance)
    stocks = SHARE * most
    stock = ran(STOCK, stocks)
    limit_s = _mean_s(stock)
    held = [Held(cell, 1.0, stock, stock)]
    for arm in arms:
        rate = edge(partial(within, arm), stocks, tolerance)
        held.append(Held(cell, rate / stocks, ran(arm, rate), ran(arm, stocks)))
    return held


def steady(
    traces: Sequence[str], rule: Rule, seeds: int, run: Run, jobs: int, tolerance: float
) -> list[Result]:
    """Search for all traces and seeds, several at once; print and return the cells at the rates."""
    profile = cost_model.load(PROFILE)
    cells = [
        Cell(trace=trace, arm=STOCK, profile=profile, rate_per_s=1.0, seed=seed, rule=rule)
        for trace in traces
        for seed in range(seeds)
    ]
    with ThreadPoolExecutor(jobs) as threads:
        ran = threads.map(
            lambda cell: search(cell, (paper_arm(cell.trace), "adaptive"), run, tolerance), cells
        )
        found = [held for some in ran for held in some]
    for trace in traces:
        _show(trace, [held for held in found if held.cell.trace == trace])
    return [held.there for held in found]


def _show(trace: str, held: Sequence[Held]) -> None:
    """Print what the arms hold, with tails and hits, there and at stock vLLM's rate."""
    print(f"\n{trace}: at the latency that stock vLLM has at {SHARE:g} of its own capacity (the "
          f"paper's ratio at its limit: {PAPER[trace]:g})")  # fmt: skip
    for arm in dict.fromkeys(one.there["arm"] for one in held):
        some = [one for one in held if one.there["arm"] == arm]
        print(f"  {arm}: {fmean(one.share for one in some):.2f} x, {len(some)} seeds")
        print(f"    there         {_figures([one.there for one in some])}")
        if arm != STOCK:
            print(f"    at stock's    {_figures([one.at_stocks for one in some])}")


def _figures(results: Sequence[Result]) -> str:
    rate, mean_s = (fmean(result["rate_per_s"] for result in results), fmean(map(_mean_s, results)))
    p99_s = fmean(result["token_latency_s"]["p99"] for result in results)
    hits = fmean(result["engine"]["prefix_hit_share"] for result in results)
    return (f"{rate:.3f}/s: mean {mean_s * 1e3:.1f} ms, P99 {p99_s * 1e3:.1f} ms, hits {hits:.2f}, "
            f"unfinished {sum(result['unfinished'] for result in results)}")  # fmt: skip


def _mean_s(result: Result) -> float:
    return float(result["token_latency_s"]["mean"])

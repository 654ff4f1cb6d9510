"""What load means: the highest rate that the clairvoyant reference sustains, and rates at a limit.

Both are found by bisection. A limit that is not crossed between the two ends is an error, never the
last point of a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from .arms import CLAIRVOYANT
from .measure import Cell
from .metrics import bootstrap

#: The name under which the best of the clairvoyant arms is asked for, cell by cell.
REFERENCE: Final = "clairvoyant"
NO_FIGURE: Final = "no figure"
TOLERANCE = 0.02
#: A backlog that grows by less than this share of the arrivals counts as steady: in a window of
#: finite length the slope of a steady backlog is not exactly 0.
STEADY_SHARE = 0.02

Run = Callable[[Cell], dict[str, Any]]


class NotCrossedError(RuntimeError):
    """The limit does not lie between the two rates that were given."""


def with_members(arms: Sequence[str]) -> list[str]:
    """Return the arms with the reference's members in its place, each arm once.

    >>> with_members(["fcfs", "srpt", "clairvoyant"])
    ['fcfs', 'srpt', 'srpt-smith', 'srpt-admit', 'pfcfs-admit']
    """
    named = (CLAIRVOYANT if arm == REFERENCE else (arm,) for arm in arms)
    return list(dict.fromkeys(arm for some in named for arm in some))


def references(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the clairvoyant reference of each cell, in the order in which members stand.

    It is the result of the member with the least mean token latency, under the reference's name;
    ``member`` says whose it is. A member that measured no program comes last.

    Args:
        results: Of any arms; those of the members count.
    """
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        if result["arm"] in CLAIRVOYANT:
            cell = tuple(result[name] for name in _CELL)
            cells.setdefault(cell, []).append(result)
    best = (min(members, key=_mean_token_s) for members in cells.values())
    return [{**result, "arm": REFERENCE, "member": result["arm"]} for result in best]


_CELL: Final = ("trace", "profile", "rate_per_s", "seed", "engines", "balancer")


def _mean_token_s(result: dict[str, Any]) -> float:
    return float(result["token_latency_s"].get("mean", math.inf))


def sustains(result: dict[str, Any]) -> bool:
    """Return whether programs left as fast as they came in the measured window."""
    slope = float(result["backlog_slope_per_s"])
    return slope <= STEADY_SHARE * float(result["rate_per_s"]) and not result["unfinished"]


def highest_rate(
    holds: Callable[[float], bool], low: float, high: float, tolerance: float = TOLERANCE
) -> float:
    """Return the highest rate at which something holds, to a relative tolerance.

    Args:
        holds: Whether it holds at a rate; expected to hold below some rate and not above it.
        low: A rate at which it holds.
        high: A rate at which it does not.
        tolerance: Of the rate.

    Raises:
        NotCrossedError: it does not hold at ``low``, or holds at ``high``.
    """
    if not holds(low):
        raise NotCrossedError(f"it does not hold at {low}/s: begin lower")
    if holds(high):
        raise NotCrossedError(f"it still holds at {high}/s: no rate below is the limit")
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def reference_capacity(
    cell: Cell,
    run: Run,
    low: float,
    high: float,
    *,
    members: Sequence[str] = CLAIRVOYANT,
    tolerance: float = TOLERANCE,
) -> float:
    """Return the highest rate that any clairvoyant arm sustains on a cell's trace and engine.

    Args:
        cell: Its arm and rate are replaced.
        run: Runs a cell.
        low: A rate that is sustained.
        high: A rate that is not.
        members: The arms that count as the reference.
        tolerance: Of the rate.

    Raises:
        NotCrossedError: see ``highest_rate``.
    """

    def holds(rate: float) -> bool:
        return any(sustains(run(replace(cell, arm=member, rate_per_s=rate))) for member in members)

    return highest_rate(holds, low, high, tolerance)


def rate_at_limit(
    cell: Cell,
    run: Run,
    limit_s: float,
    low: float,
    high: float,
    *,
    figure: str = "mean",
    tolerance: float = TOLERANCE,
) -> float:
    """Return the highest rate at which an arm's token latency stays under a limit.

    Raises:
        NotCrossedError: see ``highest_rate``.
    """
    return highest_rate(
        lambda rate: (
            float(run(replace(cell, rate_per_s=rate))["token_latency_s"][figure]) <= limit_s
        ),
        low,
        high,
        tolerance,
    )


def told(
    found: Sequence[float | NotCrossedError],
    seed: int = 0,
    base: tuple[str, Sequence[float | NotCrossedError]] | None = None,
) -> str:
    """Return rates in words: the one, or their mean over the seeds with its 95 % interval.

    Args:
        found: By seed: a rate, or why there is none.
        seed: The first one.
        base: The name and the rates of whom these are set beside, on the same seeds.
    """
    errors = [
        f"{error}" if len(found) == 1 else f"seed {place}: {error}"
        for place, error in enumerate(found, seed)
        if isinstance(error, NotCrossedError)
    ]
    if errors:
        return f"{NO_FIGURE}: {'; '.join(errors)}"
    rates = _rates(found)
    if len(rates) == 1:
        return f"{rates[0]:.3f} programs/s"
    text = f"{_mean(rates)} programs/s, {len(rates)} seeds"
    if base is None or len(below := _rates(base[1])) < len(rates):
        return text
    ratios = [ours / theirs for ours, theirs in zip(rates, below, strict=True)]
    return f"{text}; {_mean(ratios)} x {base[0]}"


def _rates(found: Sequence[float | NotCrossedError]) -> list[float]:
    return [rate for rate in found if not isinstance(rate, NotCrossedError)]


def _mean(values: Sequence[float]) -> str:
    low, high = bootstrap(values)
    return f"{fmean(values):.3f} [{low:.3f}, {high:.3f}]"

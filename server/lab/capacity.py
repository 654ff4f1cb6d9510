"""What load means: the highest rate that the clairvoyant reference sustains, and rates at a limit.

Both are found by bisection. A limit that is not crossed between the two ends is an error, never the
last point of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .arms import CLAIRVOYANT
from .measure import Cell

TOLERANCE = 0.02
#: A backlog that grows by less than this share of the arrivals counts as steady: in a window of
#: finite length the slope of a steady backlog is not exactly 0.
STEADY_SHARE = 0.02

Run = Callable[[Cell], dict[str, Any]]


class NotCrossedError(RuntimeError):
    """The limit does not lie between the two rates that were given."""


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

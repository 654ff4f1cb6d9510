"""The figures of a run; each is explained in docs/lab.md.

A program that is not over counts with the time it has taken so far, and is reported: dropping it
would favour the arm that starves it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from .run_state import CallRun, ProgramRun
from .virtual_engine import EngineTotals
from .workload import size_class

CLASSES = 4
GOODPUT_FACTORS = (2, 5)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed.

    Nearest rank, so that it is always one of the values.

    >>> quantile([3, 1, 2], 0.5)
    2
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p95 and p99 of values, rounded; an empty dict for none."""
    if not values:
        return {}
    figures = {"mean": sum(values) / len(values)}
    figures |= {f"p{round(q * 100)}": quantile(values, q) for q in (0.5, 0.95, 0.99)}
    return {name: rounded(value) for name, value in figures.items()}


def rounded(value: float) -> float:
    """Return the value with six significant digits: enough, and the same on every machine."""
    return float(f"{value:.6g}")


def response_s(program: ProgramRun, now_s: float) -> float:
    """Return a program's time from arrival to end, or up to now if it is not over."""
    return (now_s if program.ended_s is None else program.ended_s) - program.arrival_s


def program_figures(
    programs: Sequence[ProgramRun], now_s: float, cuts: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of programs.

    Args:
        programs: Those that are measured.
        now_s: When the run ended.
        cuts: Generated tokens at which size classes part.
    """
    classes: list[list[ProgramRun]] = [[] for _ in range(CLASSES)]
    for program in programs:
        classes[size_class(program.program, cuts)].append(program)
    figures = {
        "programs": len(programs),
        "unfinished": sum(p.ended_s is None for p in programs),
        **_times(programs, now_s),
        "by_size": [
            {"programs": len(some), **_times(some, now_s), **_wait_share(some)} for some in classes
        ],
        **_wait_share(programs),
    }
    if programs:
        figures["tool_s_mean"] = rounded(sum(p.tool_s for p in programs) / len(programs))
        figures["goodput_share"] = {
            f"within_{factor}x": rounded(
                sum(
                    p.ended_s is not None and response_s(p, now_s) <= factor * p.alone_s
                    for p in programs
                )
                / len(programs)
            )
            for factor in GOODPUT_FACTORS
        }
    return figures


def _wait_share(programs: Sequence[ProgramRun]) -> dict[str, float]:
    if not programs:
        return {}
    wait_s = sum(p.wait_s for p in programs)
    served_s = sum(p.service_s for p in programs)
    return {"wait_share": rounded(wait_s / max(1e-9, wait_s + served_s))}


def _times(programs: Sequence[ProgramRun], now_s: float) -> dict[str, dict[str, float]]:
    taken_s = [response_s(p, now_s) for p in programs]
    return {
        "token_latency_s": spread(
            [s / p.program.output_tokens for s, p in zip(taken_s, programs, strict=True)]
        ),
        "response_s": spread(taken_s),
        "slowdown": spread([s / p.alone_s for s, p in zip(taken_s, programs, strict=True)]),
    }


def call_figures(calls: Sequence[CallRun]) -> dict[str, Any]:
    """Return the figures of finished calls."""
    if not calls:
        return {}
    prompt = sum(c.call.prompt_tokens for c in calls)
    within = sum(min(c.hit_tokens, _own(c)) for c in calls)
    hits = sum(c.hit_tokens for c in calls)
    return {
        "calls": len(calls),
        "first_token_s": spread([_first_token_s(c) for c in calls]),
        "wait_s": spread([c.wait_s for c in calls]),
        "longest_token_gap_s": spread([c.longest_gap_s for c in calls]),
        "hit_share_within_programs": rounded(within / prompt),
        "hit_share_across_programs": rounded((hits - within) / prompt),
        "hit_share_possible": rounded(sum(c.prompt.shared_tokens for c in calls) / prompt),
        "preempted_share": rounded(sum(c.recomputed_tokens > 0 for c in calls) / len(calls)),
    }


def _own(run: CallRun) -> int:
    return run.prompt.shared_tokens if run.call.cached_prefix_of is not None else 0


def _first_token_s(run: CallRun) -> float:
    assert run.first_token_s is not None
    return run.first_token_s - run.arrival_s


def engine_figures(totals: Sequence[EngineTotals], blocks: int, seconds: float) -> dict[str, Any]:
    """Return the engines' figures over the whole run, warm-up included."""
    steps = max(1, sum(t.steps for t in totals))
    computed = max(1, sum(t.computed_tokens for t in totals))
    prompt = max(1, sum(t.prompt_tokens for t in totals))
    return {
        "steps": sum(t.steps for t in totals),
        "busy_share": rounded(sum(t.busy_s for t in totals) / max(1e-9, seconds * len(totals))),
        "mean_batch": rounded(sum(t.calls_in_steps for t in totals) / steps),
        "mean_waiting_calls": rounded(sum(t.waiting_calls for t in totals) / steps),
        "kv_use": rounded(sum(t.kv_used_blocks for t in totals) / steps / blocks),
        "prefix_hit_share": rounded(sum(t.hit_tokens for t in totals) / prompt),
        "computed_tokens": computed,
        "recomputed_share": rounded(sum(t.recomputed_tokens for t in totals) / computed),
        "preemptions": sum(t.preemptions for t in totals),
        "promotions": sum(t.promotions for t in totals),
        "swap_bytes": sum(t.swap_bytes for t in totals),
    }


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = lambda v: sum(v) / len(v),
    *,
    rounds: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of paired seeds by resampling.

    Args:
        values: One per seed, such as the ratio of two arms on the same seed.
        statistic: What is estimated.
        rounds: How often to resample.
        seed: Of the resampling.
    """
    randomness = random.Random(seed)
    found = sorted(
        statistic([values[randomness.randrange(len(values))] for _ in values])
        for _ in range(rounds)
    )
    return found[int(0.025 * rounds)], found[int(0.975 * rounds) - 1]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of (time, value) points, 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    time_mean = sum(t for t, _ in points) / len(points)
    value_mean = sum(v for _, v in points) / len(points)
    below = sum((t - time_mean) ** 2 for t, _ in points)
    above = sum((t - time_mean) * (v - value_mean) for t, v in points)
    return above / below if below else 0.0

"""The measuring rule: what is run, what of it is measured, and when a figure may be believed.

Ratios of two arms at overload grow with the length of the run, so a number of programs is no
measure. Arrivals last a fixed time; programs that arrive in a window after the warm-up are measured
and run to their end while arrivals go on; those that are not over at the drain limit count with
the time they have taken. Load is given as a share of what the clairvoyant reference sustains.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from . import metrics, workload
from .cost_model import Profile
from .run_state import ProgramRun
from .simulate import Outcome, Simulation, Watcher, order_digest
from .trace import Program
from .virtual_fleet import Faults
from .workload import Arrival, Waits

#: Figures under this name are read off a clock: they differ from run to run, and ``document``
#: leaves them out.
MEASURED: Final = "measured"

Mode = Literal["open", "closed", "offline", "burst", "crowd"]
CROWD_SIZE: Final = 200  # programs that come all at once in the mode of that name


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Times of a run in virtual seconds.

    A ``burst`` comes at half the rate until the warm-up ends, at one and a half times the rate for
    ``burst_overload_s``, and at half of it for one horizon more.
    """

    horizon_s: float = 3600.0
    warmup_s: float = 600.0
    window_end_s: float = 3000.0
    drain_s: float = 7200.0

    def shortened(self, horizon_s: float) -> Rule:
        """Return the rule with everything scaled to another horizon: for quick looks and tests."""
        factor = horizon_s / self.horizon_s
        return Rule(
            horizon_s=horizon_s,
            warmup_s=self.warmup_s * factor,
            window_end_s=self.window_end_s * factor,
            drain_s=self.drain_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: everything that its result depends on."""

    trace: str
    arm: str
    profile: Profile
    rate_per_s: float
    seed: int = 0
    mode: Mode = "open"
    engines: int = 1
    balancer: str = "locality"
    faults: Faults = field(default_factory=Faults)
    programs: int | None = None  # a smoke run: so many programs, all measured
    concurrency: int | None = None  # closed loop
    rule: Rule = field(default_factory=Rule)
    waits: Waits = field(default_factory=Waits)

    def describe(self) -> dict[str, Any]:
        """Return the cell as plain values, the profile by name."""
        plain = asdict(self)
        plain["profile"] = self.profile.name
        return plain


def run_cell(
    cell: Cell, programs: Sequence[Program], *, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Run one cell and return its figures; the same cell gives the same figures.

    Args:
        cell: What to run.
        programs: The trace; those that do not fit the engine are left out, and their share given.
        watcher: Looks after every step.
    """
    outcome, simulation, measured = simulate_cell(cell, programs, watcher=watcher)
    fits = workload.fitting(programs, cell.profile.context_tokens_max)
    wanted = [p for p in outcome.programs if measured(p)]
    wanted.sort(key=lambda p: p.number)
    calls = sorted(outcome.calls, key=lambda c: (c.program.number, c.place))
    now_s = outcome.ended_s
    figures = {
        **cell.describe(),
        "smoke": cell.programs is not None,
        "fits_share": metrics.rounded(len(fits) / len(programs)),
        "virtual_s": metrics.rounded(now_s),
        "arrivals": simulation.created,
        **metrics.program_figures(wanted, now_s, workload.size_classes(fits)),
        **throughput(cell, outcome),
        "call": metrics.call_figures(calls),
        "engine": metrics.engine_figures(outcome.totals, cell.profile.blocks, now_s),
        "completion_order": order_digest(simulation.completion_order),
        MEASURED: _decision_times(outcome),
    }
    if cell.mode in ("closed", "offline"):
        figures["makespan_s"] = metrics.rounded(now_s)
    if cell.mode in ("burst", "crowd"):
        figures["response_by_arrival_s"] = by_arrival(outcome, now_s)
    if cell.mode == "crowd":
        figures["recovery_s"] = recovery_s(outcome, cell.rule, now_s)
    if cell.mode == "burst":
        overload_s = burst_overload_s(cell.rule)
        figures["recovery_s"] = recovery_s(outcome, cell.rule, now_s, overload_s=overload_s)
    return figures


def _decision_times(outcome: Outcome) -> dict[str, float]:
    steps = max(1, sum(t.steps for t in outcome.totals))
    wall_s = sum(t.decision_wall_s for t in outcome.totals)
    return {"decision_ms_per_step": metrics.rounded(wall_s / steps * 1e3)}


def simulate_cell(
    cell: Cell, programs: Sequence[Program], *, watcher: Watcher | None = None
) -> tuple[Outcome, Simulation, Callable[[ProgramRun], bool]]:
    """Run one cell and return the raw outcome, the simulation and which programs are measured."""
    fits = workload.fitting(programs, cell.profile.context_tokens_max)
    measured = _measured(cell)
    simulation = Simulation(
        cell.profile,
        cell.arm,
        _arrivals(cell, fits),
        cell.waits,
        engines=cell.engines,
        balancer=cell.balancer,
        faults=cell.faults,
        concurrency=cell.concurrency if cell.mode == "closed" else None,
        keep_calls=measured,
        watcher=watcher,
    )
    return simulation.run(_until(cell, measured)), simulation, measured


def _arrivals(cell: Cell, fits: Sequence[Program]) -> Iterator[Arrival]:
    rule = cell.rule
    if cell.mode in ("offline", "closed"):
        return workload.at_once(fits, cell.programs or len(fits), cell.seed)
    if cell.mode == "crowd":
        return workload.crowd(
            fits, cell.rate_per_s, rule.horizon_s, cell.seed, rule.warmup_s, CROWD_SIZE
        )
    if cell.mode == "burst":
        phases = [
            (cell.rate_per_s * 0.5, rule.warmup_s),
            (cell.rate_per_s * 1.5, burst_overload_s(rule)),
            (cell.rate_per_s * 0.5, rule.horizon_s),
        ]
        return workload.burst(fits, phases, cell.seed)
    until_s = rule.window_end_s + rule.drain_s if cell.programs is None else float("inf")
    arrivals = workload.poisson(fits, cell.rate_per_s, until_s, cell.seed)
    return arrivals if cell.programs is None else itertools.islice(arrivals, cell.programs)


def _measured(cell: Cell) -> Callable[[ProgramRun], bool]:
    if cell.mode != "open" or cell.programs is not None:
        return lambda _: True
    rule = cell.rule
    return lambda program: rule.warmup_s <= program.arrival_s < rule.window_end_s


def _until(
    cell: Cell, measured: Callable[[ProgramRun], bool]
) -> Callable[[float, Simulation], bool]:
    if cell.mode != "open" or cell.programs is not None:
        return lambda *_: False
    rule = cell.rule
    limit_s = rule.window_end_s + rule.drain_s

    def over(now_s: float, simulation: Simulation) -> bool:
        if now_s < rule.window_end_s:
            return False
        # The oldest programs stand first: as long as one of them is measured, go on.
        return now_s >= limit_s or not any(measured(p) for p in simulation.live.values())

    return over


def throughput(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    """Return what the engines sustained: in the window, or over the whole of other modes."""
    if cell.mode == "open" and cell.programs is None:
        start_s, end_s = cell.rule.warmup_s, min(cell.rule.window_end_s, outcome.ended_s)
    else:
        start_s, end_s = 0.0, outcome.ended_s
    seconds = max(1e-9, end_s - start_s)
    over = [p for p in outcome.programs if p.ended_s and start_s <= p.ended_s < end_s + 1e-9]
    points = [(at_s, float(n)) for at_s, n in outcome.backlog if start_s <= at_s < end_s]
    return {
        "programs_per_s": metrics.rounded(len(over) / seconds),
        "output_tokens_per_s": metrics.rounded(
            sum(p.program.output_tokens for p in over) / seconds
        ),
        "backlog_mean": metrics.rounded(sum(n for _, n in points) / max(1, len(points))),
        "backlog_slope_per_s": metrics.rounded(metrics.slope(points)),
    }


def by_arrival(outcome: Outcome, now_s: float, window_s: float = 150.0) -> list[list[float]]:
    """Return [arrival window's start, programs, mean response] for a burst."""
    windows: dict[int, list[float]] = {}
    for program in outcome.programs:
        window = windows.setdefault(int(program.arrival_s // window_s), [])
        window.append(metrics.response_s(program, now_s))
    return [
        [place * window_s, len(taken), metrics.rounded(sum(taken) / len(taken))]
        for place, taken in sorted(windows.items())
    ]


def burst_overload_s(rule: Rule) -> float:
    """Return how many seconds the overload of a burst lasts; it begins when the warm-up ends."""
    return rule.horizon_s / 12


def recovery_s(
    outcome: Outcome,
    rule: Rule,
    now_s: float,
    window_s: float = 60.0,
    overload_s: float = 0.0,
) -> float | None:
    """Return how long after an overload the mean response is twice what it was before, at most.

    By window of arrival, a crowd itself not counted; the window's end counts, and every window
    after it has to be as good. None: not within the arrivals.

    Args:
        outcome: Of the run.
        rule: Its times; the overload begins at the end of the warm-up.
        now_s: When the run ended.
        window_s: Seconds of a window.
        overload_s: How many seconds programs come too fast, 0 for a crowd; they do not count.
    """
    calm: list[float] = []
    windows: dict[int, list[float]] = {}
    for program in outcome.programs:
        response_s = metrics.response_s(program, now_s)
        after_s = program.arrival_s - rule.warmup_s - overload_s
        if program.number >= workload.CROWD_FROM:
            continue
        if after_s >= 0:
            windows.setdefault(int(after_s // window_s), []).append(response_s)
        elif rule.warmup_s / 2 <= program.arrival_s < rule.warmup_s:
            calm.append(response_s)
    limit_s = 2 * sum(calm) / max(1, len(calm))
    slow = [n for n, taken in windows.items() if sum(taken) / len(taken) > limit_s]
    last = max(slow, default=-1)
    return None if last == max(windows, default=-1) else (last + 2) * window_s

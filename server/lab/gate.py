"""The gate set: which cells the project's policy figures are judged on, and by which limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import tomllib

from . import cost_model
from .arms import CLAIRVOYANT
from .capacity import REFERENCE
from .measure import Cell, Rule
from .metrics import bootstrap

FILE: Final = Path(__file__).parent / "gate.toml"
CELLS_MAX: Final = 60


def table() -> dict[str, Any]:
    """Return the file as it is."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def cells(seed: int = 0, horizon_s: float | None = None) -> list[tuple[float, Cell]]:
    """Return (rho, cell) for the whole set.

    Args:
        seed: Of all cells.
        horizon_s: 3600 by the measuring rule; None: the set's own.
    """
    content = table()
    rule = Rule().shortened(float(content["horizon_s"]) if horizon_s is None else horizon_s)
    found = []
    for group in content["cells"]:
        profile = cost_model.load(group["profile"])
        for trace in group["traces"]:
            capacity = content["capacity"][group["profile"]][trace]
            for rho in group["rho"]:
                for arm in group["arms"]:
                    cell = Cell(
                        trace=trace,
                        arm=arm,
                        profile=profile,
                        rate_per_s=round(rho * capacity, 6),
                        seed=seed,
                        rule=rule,
                    )
                    found.append((rho, cell))
    assert len(found) <= CELLS_MAX, f"{len(found)} cells"
    return found


def short_cells() -> list[Cell]:
    """Return the four short cells that the test suite runs."""
    test = table()["test"]
    profile = replace(
        cost_model.load(test["profile"]),
        kv_tokens=test["kv_tokens"],
        slots=test["slots"],
        context_tokens_max=test["context_tokens_max"],
    )
    return [
        Cell(
            trace=test["trace"],
            arm=arm,
            profile=profile,
            rate_per_s=rate,
            rule=Rule().shortened(test["horizon_s"]),
        )
        for rate in test["rates_per_s"]
        for arm in test["arms"]
    ]


Result = dict[str, Any]
Seed = Mapping[str, Result]  # one load's results on one seed, by arm


class Limit(NamedTuple):
    """What an arm is held to.

    Attributes:
        ratio: One of ``RATIOS``.
        at_most: The ratio, its interval's high end included.
        rho: The lowest and the highest load at which it is judged, as shares of the capacity.
        arm: Who is judged.
        stock: Who stands for vLLM as it is.
    """

    ratio: str
    at_most: float
    rho: tuple[float, float] = (0.0, math.inf)
    arm: str = "adaptive"
    stock: str = "fcfs"

    def applies(self, rho: float | None) -> bool:
        """Return whether it is judged at a load; where the share is not known, it is."""
        return rho is None or self.rho[0] <= rho <= self.rho[1]


class Verdict(NamedTuple):
    """Whether one limit is met at one load, and the line that says so.

    ``met`` is None where an arm or a figure that the ratio needs is missing.
    """

    met: bool | None
    line: str


def limits() -> list[Limit]:
    """Return the limits of the file."""
    content = table()
    judged = content["judged"]
    return [
        Limit(
            ratio=limit["ratio"],
            at_most=float(limit["at_most"]),
            rho=tuple(limit.get("rho", (0.0, math.inf))),
            arm=judged["arm"],
            stock=judged["stock"],
        )
        for limit in content["limits"]
    ]


def verdict(results: Sequence[Result], judged_by: Sequence[Limit]) -> list[Verdict]:
    """Return a verdict per load and limit, the loads in the order of their first results.

    Args:
        results: Of any arms and seeds; a load is a trace, a profile and a rate. ``rho``, where a
            result has it, is the rate as a share of the capacity.
        judged_by: The limits.
    """
    loads: dict[tuple[str, str, float], dict[int, dict[str, Result]]] = {}
    shares: dict[tuple[str, str, float], float | None] = {}
    for result in results:
        load = (result["trace"], result["profile"], result["rate_per_s"])
        loads.setdefault(load, {}).setdefault(result["seed"], {})[result["arm"]] = result
        shares[load] = result.get("rho")
    return [
        _judge(limit, list(seeds.values()), _name(load, shares[load]))
        for load, seeds in loads.items()
        for limit in judged_by
        if limit.applies(shares[load])
    ]


def _name(load: tuple[str, str, float], rho: float | None) -> str:
    trace, profile, rate_per_s = load
    share = "" if rho is None else f" (rho {rho:g})"
    return f"{trace} at {rate_per_s:g}/s{share} on {profile}"


def _judge(limit: Limit, seeds: Sequence[Seed], load: str) -> Verdict:
    try:
        ratios = [RATIOS[limit.ratio](seed, limit) for seed in seeds]
    except MissingError as error:
        return Verdict(None, f"not run  {load}, {limit.ratio}: {error}")
    low, high = bootstrap(ratios) if len(ratios) > 1 else (ratios[0],) * 2
    interval = f" [{low:.3f}, {high:.3f}] of {len(ratios)} seeds" if len(ratios) > 1 else ""
    met = high <= limit.at_most
    figure = f"{fmean(ratios):.3f}{interval}, at most {limit.at_most:g}"
    return Verdict(met, f"{'met' if met else 'MISSED':8} {load}, {limit.ratio}: {figure}")


class MissingError(LookupError):
    """A ratio needs an arm that was not run, or a figure of a run that measured nothing."""


def figure(result: Result, name: str, statistic: str = "mean") -> float:
    """Return a statistic of ``token_latency_s``, ``response_s`` or ``slowdown``.

    Raises:
        MissingError: no program was measured.
    """
    if not result[name]:
        raise MissingError(f"no program of {result['arm']} is measured")
    return float(result[name][statistic])


def token_s(result: Result) -> float:
    """Return the mean token latency."""
    return figure(result, "token_latency_s")


def slowdown_p99(result: Result) -> float:
    """Return the 99th percentile of the programs' slowdowns."""
    return figure(result, "slowdown", "p99")


def quartiles(result: Result) -> list[float]:
    """Return the mean slowdown of each size quartile, the smallest programs first."""
    if not all(quartile["slowdown"] for quartile in result["by_size"]):
        raise MissingError(f"no program of a size quartile of {result['arm']} is measured")
    return [float(quartile["slowdown"]["mean"]) for quartile in result["by_size"]]


def _of(seed: Seed, arm: str) -> Result:
    if arm not in seed:
        raise MissingError(f"{arm} is missing")
    return seed[arm]


def _to_stock(statistic: Callable[[Result], float]) -> Callable[[Seed, Limit], float]:
    """Return the ratio of the judged arm's figure to stock vLLM's."""
    return lambda seed, limit: statistic(_of(seed, limit.arm)) / statistic(_of(seed, limit.stock))


def _to_clairvoyant(seed: Seed, limit: Limit) -> float:
    """Return our mean token latency ÷ that of the best arm that knows the future."""
    known = [seed[arm] for arm in CLAIRVOYANT if arm in seed]
    if not known:
        raise MissingError("no arm that knows the future is there")
    return token_s(_of(seed, limit.arm)) / min(map(token_s, known))


def _others(seed: Seed, limit: Limit) -> list[Result]:
    """Return the results of the other arms that do not know the future."""
    others = [r for arm, r in seed.items() if arm not in (limit.arm, REFERENCE, *CLAIRVOYANT)]
    if not others:
        raise MissingError("no other arm is there")
    return others


def _to_best(seed: Seed, limit: Limit) -> float:
    """Return our mean token latency ÷ that of the best other arm."""
    return token_s(_of(seed, limit.arm)) / min(map(token_s, _others(seed, limit)))


def _own_quartile(seed: Seed, limit: Limit) -> float:
    """Return the largest ratio of a quartile's slowdown to its own under stock vLLM."""
    ours, stock = (quartiles(_of(seed, arm)) for arm in (limit.arm, limit.stock))
    return max(own / theirs for own, theirs in zip(ours, stock, strict=True))


def _others_rate(seed: Seed, limit: Limit) -> float:
    """Return the most programs/s of the other arms ÷ ours."""
    ours = float(_of(seed, limit.arm)["programs_per_s"])
    most = max(float(result["programs_per_s"]) for result in _others(seed, limit))
    if not ours:
        return math.inf if most else 1.0
    return float(most / ours)


#: What limits are put on: each is better the lower, of one load on one seed.
RATIOS: Final[dict[str, Callable[[Seed, Limit], float]]] = {
    "mean token latency ÷ stock's": _to_stock(token_s),
    "mean response ÷ stock's": _to_stock(lambda result: figure(result, "response_s")),
    "mean slowdown ÷ stock's": _to_stock(lambda result: figure(result, "slowdown")),
    "P99 slowdown ÷ stock's": _to_stock(slowdown_p99),
    "worst quartile's slowdown ÷ stock's worst": _to_stock(lambda result: max(quartiles(result))),
    "a quartile's slowdown ÷ its own under stock, worst": _own_quartile,
    "mean token latency ÷ clairvoyant reference": _to_clairvoyant,
    "mean token latency ÷ best other arm": _to_best,
    "best other arm's programs/s ÷ ours": _others_rate,
}

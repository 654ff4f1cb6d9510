"""Latency over load on one engine: the paper's Figures 12 and 13, and what it begins with.

Every arm climbs a ladder of rates, from a light load on, until its mean token latency is above
``STOP`` times stock vLLM's at the light load, and above 0.5 s. So an arm that collapses is not run
beyond its collapse, where a figure measures the length of the run and nothing else.

The paper compares rates at 0.2, 0.5 and 1.0 s a token. On its engine, vLLM 0.6.1, a chat's token
takes 0.15 s of execution and scheduling alone (its time breakdown); on today's it takes an eighth
of that at a light load. So rates are compared at 2, 5 and 10 times the light load's latency here,
and at 0.5 s where that is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autellix.server.lab import cost_model, report
from autellix.server.lab.measure import Cell, Rule
from benchmarks.policy_gate import LEVELS

Result = dict[str, Any]
Run = Callable[[Sequence[Cell]], Sequence[Result]]

PROFILE = "a100-80g-llama-3.1-8b"
PATHS = LEVELS.replace("plas", "atlas")
STOCK = "fcfs"
FACTORS = (2, 5, 10)
STOP = 20
LIMIT_S = 0.5
#: The paper's limits in s a token, beside ours.
PAPER_LIMITS_S = (0.2, 0.5, 1.0)
#: Programs per second: a light load, and from what stock vLLM still bears up to where all give in.
RATES_PER_S = {
    "chat-sharegpt": (0.27, 1.2, 1.5, 1.9),
    "bfcl-gt": (0.48, 1.6, 1.75, 1.9, 2.2, 2.65, 2.8),
    "lats": (0.066, 0.25, 0.45, 0.65),
    "mixed": (0.15, 0.8, 1.2),
}
#: Of an engine without a prefix cache.
UNCACHED_PER_S = {
    "chat-sharegpt": (0.27, 0.54, 0.8, 1.2),
    "bfcl-gt": (0.03, 0.06, 0.12, 0.24),
    "lats": (0.02, 0.066),
    "mixed": (0.05, 0.15, 0.3),
}
#: Autellix ÷ vLLM without prefix cache, ÷ vLLM-opt, ÷ MLFQ at 0.5 s; ÷ vLLM-opt at 0.2 and 1.0 s.
#: Read off the paper's figures, to about 1 %; 8B on one A100.
PAPER = {
    "chat-sharegpt": {"fcfs-nocache": (None, 3.8, None), STOCK: (1.22, 1.91, 1.83),
                      "mlfq": (None, 1.44, 1.31)},
    "bfcl-gt": {"fcfs-nocache": (None, 7.0, None), STOCK: (1.37, 1.64, 1.64),
                "mlfq": (None, 1.35, 1.44)},
    "lats": {"fcfs-nocache": (None, 3.2, None), STOCK: (1.26, 1.82, 1.91),
             "mlfq": (None, 2.10, 2.22)},
    "mixed": {"fcfs-nocache": (None, 10.4, None), STOCK: (1.24, 2.58, 3.33),
              "mlfq": (None, 2.67, 3.60)},
}  # fmt: skip
#: The same at 1.0 s for P95 and P99: ÷ vLLM-opt, ÷ MLFQ.
PAPER_TAILS = {
    "chat-sharegpt": {"p95": (1.71, 1.93), "p99": (1.86, 1.87)},
    "bfcl-gt": {"p95": (1.69, 1.22), "p99": (1.37, 1.02)},
    "lats": {"p95": (1.42, 2.1), "p99": (1.38, 2.30)},
    "mixed": {"p95": (1.63, 1.67), "p99": (1.32, 1.32)},
}
#: Share of a program's time spent waiting at loads of 0.5 and 0.9 (the paper's Figure 5).
PAPER_WAITING = {"chat-sharegpt": (0.57, 0.80), "bfcl-gt": (0.39, 0.87), "lats": (0.64, 0.91)}


def paper_arm(trace: str) -> str:
    """Return the paper's policy for a trace: by the longest path where programs are parallel."""
    return PATHS if trace in ("lats", "mixed") else LEVELS


def arms_of(trace: str) -> tuple[str, ...]:
    """Return the arms of a trace."""
    return (STOCK, "fcfs-nocache", "mlfq", paper_arm(trace), "adaptive", "srpt-smith")


def rates_of(trace: str, arm: str) -> tuple[float, ...]:
    """Return the rates that an arm climbs."""
    return (UNCACHED_PER_S if arm == "fcfs-nocache" else RATES_PER_S)[trace]


def climb(trace: str, arms: Sequence[str], rule: Rule, seeds: int, run: Run) -> Iterator[Result]:
    """Yield the results of a trace, step by step, each arm until it is above all limits.

    Args:
        trace: Whose programs come.
        arms: Stock vLLM among them.
        rule: How long they come.
        seeds: How many of each cell.
        run: Runs cells and returns their results in order.
    """
    profile = cost_model.load(PROFILE)
    limit_s = float("inf")
    for step in range(len(RATES_PER_S[trace])):
        arms = [arm for arm in arms if step < len(rates_of(trace, arm))]
        cells = [
            Cell(trace=trace, arm=arm, profile=profile, rate_per_s=rates_of(trace, arm)[step],
                 seed=seed, rule=rule)
            for arm in arms for seed in range(seeds)
        ]  # fmt: skip
        found = run(cells)
        yield from found
        if not step:
            stock = [r for r in found if r["arm"] == STOCK]
            limit_s = max(LIMIT_S, STOP * _figure_s(stock))
        arms = [a for a in arms if _figure_s([r for r in found if r["arm"] == a]) <= limit_s]


def _figure_s(results: Sequence[Result], figure: str = "mean") -> float:
    return sum(float(r["token_latency_s"][figure]) for r in results) / len(results)


def show(results: Sequence[Result]) -> None:
    """Print, per trace, the rates at each limit and the ratios beside the paper's."""
    for trace in dict.fromkeys(r["trace"] for r in results):
        some = [r for r in results if r["trace"] == trace]
        light_per_s = RATES_PER_S[trace][0]
        light = [r for r in some if r["rate_per_s"] == light_per_s]
        stock = [r for r in light if r["arm"] == STOCK]
        light_s = _figure_s(stock)
        print(f"\n{trace}: stock vLLM gives {light_s * 1e3:.1f} ms a token at {light_per_s:g}/s; "
              "against it there " + ", ".join(
                  f"{arm} {_figure_s([r for r in light if r['arm'] == arm]) / light_s:.3f}"
                  for arm in dict.fromkeys(r["arm"] for r in light) if arm != STOCK))  # fmt: skip
        for figure in ("mean", "p95", "p99"):
            _show_rates(some, trace, _figure_s(stock, figure), figure)
        _show_waiting(some, trace)


def _show_rates(results: Sequence[Result], trace: str, light_s: float, figure: str) -> None:
    """Print the rates at multiples of stock vLLM's own figure at the light load."""
    limits_s = [factor * light_s for factor in FACTORS] + [LIMIT_S] * (figure == "mean")
    names = [f"{factor} x" for factor in FACTORS] + ["0.5 s"] * (figure == "mean")
    rates = {
        name: report.gain_at(results, trace, limit_s, figure)
        for name, limit_s in zip(names, limits_s, strict=True)
    }
    head = " | ".join(
        f"{name} = {limit_s * 1e3:.0f} ms" for name, limit_s in zip(names, limits_s, strict=True)
    )
    print(f"| {figure}: programs/s at | {head} |\n" + "|---" * (len(names) + 1) + "|")
    for arm in dict.fromkeys(r["arm"] for r in results):
        print(f"| `{arm}` | " + " | ".join(_text(rates[name][arm]) for name in names) + " |")
    for ours in (paper_arm(trace), "adaptive"):
        for base in ("fcfs-nocache", STOCK, "mlfq"):
            ratios = " | ".join(_ratio(rates[name], ours, base) for name in names)
            print(f"| {ours.partition(':')[0]} ÷ {base} | {ratios} |")
    for base, theirs in PAPER[trace].items() if figure == "mean" else ():
        text = " | ".join(
            "" if ratio is None else f"{ratio} at {limit_s} s"
            for ratio, limit_s in zip(theirs, PAPER_LIMITS_S, strict=True)
        )
        print(f"| the paper, ÷ {base} | {text} | |")
    if figure != "mean":
        stock, mlfq = PAPER_TAILS[trace][figure]
        print(f"| the paper, ÷ {STOCK}, ÷ mlfq | | | {stock}, {mlfq} at 1.0 s |")


def _text(rate: float | None) -> str:
    return "not crossed" if rate is None else f"{rate:.3f}"


def _ratio(rates: dict[str, float | None], ours: str, base: str) -> str:
    above, below = rates.get(ours), rates.get(base)
    return f"{above / below:.2f}" if above and below else "no figure"


def _show_waiting(results: Sequence[Result], trace: str) -> None:
    """Print the paper's motivation: waiting by load and by size, hits within and across."""
    at_half, at_most = PAPER_WAITING.get(trace, (None, None))
    print(f"share of calls' time spent waiting (the paper, FCFS: {at_half} at load 0.5, {at_most} "
          "at 0.9); by size quartile, the smallest first; prompt tokens found that the program had "
          "itself, that another had, and possible")  # fmt: skip
    for arm in (STOCK, "mlfq", paper_arm(trace), "adaptive"):
        for r in results:
            if r["arm"] != arm or r["seed"] != 0:
                continue
            sizes = " ".join(f"{s.get('wait_share', 0):.2f}" for s in r["by_size"])
            call = r["call"]
            print(f"  {arm:28} {r['rate_per_s']:6.3f}/s waits {r['wait_share']:.2f} ({sizes}), "
                  f"hits {call.get('hit_share_within_programs', 0):.2f} "
                  f"{call.get('hit_share_across_programs', 0):.2f} of "
                  f"{call.get('hit_share_possible', 0):.2f}")  # fmt: skip

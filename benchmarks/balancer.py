"""The balancer's figures from the simulator; the tables of docs/balancer.md are what it prints.

    python -m benchmarks.balancer --parts slo,scale,threshold,adversarial --cache out/balancer

``slo``: programs/s at a token latency, 4 and 8 engines, against ``least-loaded``. ``scale``: one
engine against 4 and 8. ``threshold``: the paper's 2048 tokens, swept. ``adversarial``: loads that
are made to hurt. ``real``: the same engines as vLLM's scheduler, beside the coarse ones.

A horizon shorter than the measuring rule's 3,600 s has a backlog that is shorter in proportion, so
the latency limit is shortened with it: 1.0 s a token becomes 1.0 x horizon / 3600.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autellix.server.lab import cost_model, trace
from autellix.server.lab.measure import Cell, Rule, run_cell
from autellix.server.lab.result_cache import ResultCache
from autellix.server.lab.trace import Call, Program
from autellix.server.lab.virtual_fleet import Faults

PROFILE = cost_model.load("a100-80g-llama-3.1-8b")
FIGURES = ("mean", "p95", "p99")
# programs per second for each engine; a limit must be crossed between two of them
RATES = {
    "chat-sharegpt": (0.75, 1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0),
    "lats": (0.25, 0.35, 0.5, 0.7, 1.0, 1.4),
}
THRESHOLDS = (0, 512, 1024, 2048, 4096, 8192, 1_000_000)


def cell(name: str, balancer: str, engines: int, rate: float, options: Any, **more: Any) -> Cell:
    """Return a cell by the rule at the horizon that was asked for."""
    more = {"arm": options.arm, "rule": Rule().shortened(options.horizon), **more}
    return Cell(trace=name, profile=PROFILE, rate_per_s=rate, engines=engines, balancer=balancer,
                seed=options.seed, **more)  # fmt: skip


class Runner:
    """Runs cells, each once."""

    def __init__(self, folder: Path | None) -> None:
        self._results = ResultCache(folder)
        self._traces: dict[str, Sequence[Program]] = {}

    def __call__(self, some: Cell, programs: Sequence[Program] | None = None) -> dict[str, Any]:
        """Return a cell's figures."""
        if programs is None:
            if some.trace not in self._traces:
                self._traces[some.trace] = trace.load(some.trace)
            programs = self._traces[some.trace]
        started_s = time.process_time()
        result = self._results.get(some, lambda: run_cell(some, programs))
        token, engine = result["token_latency_s"], result["engine"]
        print(
            f"  {some.trace:14}{some.arm:12}{some.balancer:14}{some.engines} engines "
            f"{some.rate_per_s:6.2f}/s n {result['programs']:5} left {result['unfinished']:4} "
            f"token s {token['mean']:.4f} {token['p95']:.4f} {token['p99']:.4f} "
            f"response {result['response_s']['mean']:7.1f} hits {engine['prefix_hit_share']:.3f} "
            f"cpu {time.process_time() - started_s:.1f}",
            flush=True,
        )
        return result


def crossing(points: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Return the rate at which a latency crosses a limit, between two points; None: it does not."""
    ordered = sorted(points)
    for at in range(len(ordered) - 1):
        (rate, value), (next_rate, next_value) = ordered[at : at + 2]
        if value <= limit < next_value:
            share = math.log(limit / value) / math.log(next_value / value)
            return rate * (next_rate / rate) ** share
    return None


def sweep(
    run: Runner, name: str, balancer: str, engines: int, limit: float, options: Any
) -> dict[str, float | None]:
    """Return the rate at the limit for every figure; runs only the rates that are needed."""
    found: dict[float, dict[str, float]] = {}
    for rate in RATES[name]:
        result = run(cell(name, balancer, engines, rate * engines, options))
        found[rate * engines] = result["token_latency_s"]
        if result["token_latency_s"]["mean"] > limit:
            break
    return {f: crossing([(r, v[f]) for r, v in found.items()], limit) for f in FIGURES}


def slo(run: Runner, options: Any) -> Iterator[str]:
    """Yield the table of programs/s at the limit."""
    limit = options.limit * options.horizon / 3600
    yield f"| programs/s at {limit:.3f} s a token | mean | p95 | p99 | ÷ least-loaded |"
    yield "| --- | --- | --- | --- | --- |"
    for name in options.traces:
        for engines in options.engines:
            base: dict[str, float | None] = {}
            for balancer in options.balancers:
                rates = sweep(run, name, balancer, engines, limit, options)
                base = rates if balancer == "least-loaded" else base
                yield (
                    f"| {name}, {engines} engines, `{balancer}` | "
                    + " | ".join(_number(rates[f]) for f in FIGURES)
                    + " | " + ", ".join(_ratio(rates[f], base.get(f)) for f in FIGURES) + " |"
                )  # fmt: skip


def scale(run: Runner, options: Any) -> Iterator[str]:
    """Yield the table of 1 to 8 engines."""
    limit = options.limit * options.horizon / 3600
    yield "| engines | programs/s at the mean limit | ÷ one engine |"
    yield "| --- | --- | --- |"
    for name in options.traces:
        one: float | None = None
        for engines in (1, *options.engines):
            rate = sweep(run, name, "locality", engines, limit, options)["mean"]
            one = rate if engines == 1 else one
            yield f"| {name}, {engines} | {_number(rate)} | {_ratio(rate, one)} |"


def threshold(run: Runner, options: Any) -> Iterator[str]:
    """Yield the table of the paper's threshold at one load."""
    yield "| threshold | token latency mean | p95 | p99 | response | prefix hits |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in options.traces:
        rate = {"chat-sharegpt": 1.0, "lats": 0.35}[name] * 4
        for tokens in THRESHOLDS:
            rule = f"autellix:threshold_tokens={tokens}"
            result = run(cell(name, rule, 4, rate, options))
            yield f"| {name}, {tokens} | " + " | ".join(_row(result)) + " |"


def adversarial(run: Runner, options: Any) -> Iterator[str]:
    """Yield the table of loads that are made to hurt."""
    yield "| load | balancer | token latency mean | p95 | p99 | response | hits | worst ÷ ll |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, (programs, rate, more) in _scenarios(options).items():
        base: dict[str, Any] = {}
        for balancer in options.balancers:
            result = run(cell(name, balancer, 4, rate, options, **more), programs)
            base = result if balancer == "least-loaded" else base
            yield (
                f"| {name} | `{balancer}` | " + " | ".join(_row(result))
                + f" | {_worst(result, base):.3f} |"
            )  # fmt: skip


def real(run: Runner, options: Any) -> Iterator[str]:
    """Yield the table of coarse and real engines on the same load."""
    yield "| load | balancer | engine | token latency mean | p95 | p99 | response | hits |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for balancer in ("least-loaded", "locality"):
        for arm in ("coarse-plas", "plas"):
            result = run(cell("chat-sharegpt", balancer, 4, 4.0, options, arm=arm))
            yield f"| chat, 4.0/s | `{balancer}` | `{arm}` | " + " | ".join(_row(result)) + " |"


def _scenarios(options: Any) -> dict[str, tuple[Sequence[Program], float, dict[str, Any]]]:
    chat = trace.load("chat-sharegpt")
    long = sorted(chat, key=lambda p: p.largest_tokens)[-40:]
    short = [_parallel(f"short{n}", 1, 0, 200, 60) for n in range(360)]
    giant = [_parallel("giant", 400, 4000, 200, 150)]
    middle_s = options.horizon / 2
    at_once = {"mode": "offline", "programs": 400}
    return {
        "giant parallel": ([*chat[:199], *giant], 2.0, {}),
        "giant alone": (giant, 0.02, {}),
        "skewed mix": ([*short, *long], 12.0, {}),
        "dead engine": (chat, 2.2, {"faults": Faults(dead_s=((1, middle_s),))}),
        "slow engine": (chat, 2.2, {"faults": Faults(slow=((2, 2.0),))}),
        "all at once": (chat, 1.0, at_once),
        "nothing shared": ([_serial(f"apart{n}", 8) for n in range(100)], 2.5, {}),
    }


def _parallel(name: str, calls: int, shared: int, own: int, output: int) -> Program:
    """Return a program of calls that all begin at once, with a shared beginning."""
    first = Call(0, (), shared + own, output, None, 0, 0.0, None, None, None)
    rest = [
        Call(n, (), shared + own, output, 0 if shared else None, shared, 0.0, None, None, None)
        for n in range(1, calls)
    ]
    return Program(name, "made", "made", None, None, {}, (first, *rest))


def _serial(name: str, calls: int) -> Program:
    """Return a program of calls in a row that share nothing."""
    made = [
        Call(n, (n - 1,) if n else (), 1500, 120, None, 0, 0.0, None, None, None)
        for n in range(calls)
    ]
    return Program(name, "made", "made", None, None, {}, tuple(made))


def _worst(result: dict[str, Any], base: dict[str, Any]) -> float:
    pairs = [(result["token_latency_s"][f], base["token_latency_s"][f]) for f in FIGURES]
    pairs.append((result["response_s"]["mean"], base["response_s"]["mean"]))
    return max(ours / theirs for ours, theirs in pairs)


def _row(result: dict[str, Any]) -> list[str]:
    token = result["token_latency_s"]
    return [
        *(f"{token[f]:.4f}" for f in FIGURES),
        f"{result['response_s']['mean']:.1f}",
        f"{result['engine']['prefix_hit_share']:.3f}",
    ]


def _number(value: float | None) -> str:
    return "not crossed" if value is None else f"{value:.2f}"


def _ratio(ours: float | None, base: float | None) -> str:
    return "-" if ours is None or not base else f"{ours / base:.2f}"


PARTS: dict[str, Callable[[Runner, Any], Iterator[str]]] = {
    "slo": slo,
    "scale": scale,
    "threshold": threshold,
    "adversarial": adversarial,
    "real": real,
}


def main() -> None:
    """Run what was asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="slo,scale,threshold,adversarial")
    parser.add_argument("--horizon", type=float, default=3600.0)
    parser.add_argument("--limit", type=float, default=1.0)
    parser.add_argument("--arm", default="coarse-plas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default="chat-sharegpt,lats")
    parser.add_argument("--engines", default="4,8")
    parser.add_argument("--balancers", default="least-loaded,autellix,locality")
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    options.traces = options.traces.split(",")
    options.engines = [int(n) for n in options.engines.split(",")]
    options.balancers = options.balancers.split(",")
    run = Runner(options.cache)
    for part in options.parts.split(","):
        print(f"\n{part}: {options.arm}, horizon {options.horizon:g} s, seed {options.seed}")
        print("\n".join(list(PARTS[part](run, options))), flush=True)


if __name__ == "__main__":
    main()

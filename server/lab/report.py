"""Figures and one HTML page from the simulator's or the bench's JSON.

Each figure is a PNG file; the page holds them inside itself, with the numbers as tables, so that it
can be sent as one file. Needs matplotlib (``pip install 'autellix[lab]'``).
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

Result = dict[str, Any]
FIGURES: Final = ("mean", "p95", "p99")
CLASS_NAMES: Final = ("smallest quarter", "second", "third", "largest quarter")


class ReportError(ValueError):
    """There is nothing to report on, or a file is no result of the lab."""


class Figure(NamedTuple):
    """One drawing."""

    name: str
    title: str
    png: bytes


def load(folder: Path) -> list[Result]:
    """Return the results in all JSON files of a folder, or in one file.

    Raises:
        ReportError: none is there, or a file is something else.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
    results: list[Result] = []
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            results += document["results"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ReportError(f"{file.name} is no result of the lab: {error!r}") from error
    if not results:
        raise ReportError(f"no result in {folder}")
    return results


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the figures and ``index.html`` to a folder and return the paths.

    Raises:
        ReportError: matplotlib is missing, or there is no result.
    """
    figures = [
        figure for trace in _values(results, "trace") for figure in _of_trace(results, trace)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        path = folder / f"{figure.name}.png"
        path.write_bytes(figure.png)
        written.append(path)
    page = folder / "index.html"
    page.write_text(_page(results, figures), encoding="utf-8")
    return [*written, page]


def gain_at(
    results: Sequence[Result], trace: str, limit_s: float, figure: str = "mean"
) -> dict[str, float | None]:
    """Return the rate at which each arm's token latency crosses a limit.

    Between two rates of the sweep the latency is taken to grow evenly. An arm whose sweep does
    not cross the limit has none: the last point is no answer.

    Args:
        results: Of a sweep.
        trace: The trace.
        limit_s: Of the token latency.
        figure: ``mean``, ``p50``, ``p95`` or ``p99``.
    """
    found: dict[str, float | None] = {}
    for arm in _values(results, "arm"):
        points = _curve(results, trace, arm, f"token_latency_s.{figure}")
        found[arm] = None
        for (rate, value), (next_rate, next_value) in itertools.pairwise(points):
            if value <= limit_s < next_value:
                share = (limit_s - value) / (next_value - value)
                found[arm] = rate + share * (next_rate - rate)
                break
    return found


def paired_ratios(
    results: Sequence[Result], trace: str, rate: float, arm: str, base: str, figure: str
) -> list[float]:
    """Return an arm's mean figure ÷ another arm's on the same seed, for all seeds both have.

    Args:
        results: Of any runs.
        trace: The trace.
        rate: Programs per second.
        arm: The one above.
        base: The one below.
        figure: ``token_latency_s``, ``response_s`` or ``slowdown``.
    """
    by_arm: dict[str, dict[int, float]] = {arm: {}, base: {}}
    for r in results:
        if (r["trace"], r["rate_per_s"]) == (trace, rate) and r["arm"] in by_arm and r[figure]:
            by_arm[r["arm"]][r["seed"]] = r[figure]["mean"]
    both = sorted(by_arm[arm].keys() & by_arm[base].keys())
    return [by_arm[arm][seed] / by_arm[base][seed] for seed in both]


def _of_trace(results: Sequence[Result], trace: str) -> Iterable[Figure]:
    some = [r for r in results if r["trace"] == trace]
    for key, title in (
        ("token_latency_s", "token latency, s"),
        ("response_s", "program response, s"),
        ("slowdown", "slowdown"),
    ):
        yield _rate_curves(some, trace, key, title)
    yield _size_bars(some, trace)
    yield _waiting_share(some, trace)
    yield _waiting_by_size(some, trace)
    yield _hits(some, trace)
    if any("response_by_arrival_s" in r for r in some):
        yield _burst(some, trace)


def _rate_curves(results: Sequence[Result], trace: str, key: str, title: str) -> Figure:
    figure, axes = _subplots(len(FIGURES))
    for axis, name in zip(axes, FIGURES, strict=True):
        _plot_curves(axis, results, trace, f"{key}.{name}")
        axis.set_title(name)
        axis.set_xlabel("programs per second")
        axis.set_yscale("log")
    axes[0].set_ylabel(title)
    return _figure(figure, axes[-1], f"{trace}-{key}", f"{trace}: {title} over load")


def _busiest(results: Sequence[Result]) -> tuple[float, list[str]]:
    """Return the highest of the rates that the most arms were run at, and those arms."""
    arms: dict[float, list[str]] = {}
    for r in results:
        if r["arm"] not in arms.setdefault(r["rate_per_s"], []):
            arms[r["rate_per_s"]].append(r["arm"])
    rate = max(arms, key=lambda rate: (len(arms[rate]), rate))
    return rate, arms[rate]


def _size_bars(results: Sequence[Result], trace: str) -> Figure:
    figure, (axis,) = _subplots(1)
    rate, arms = _busiest(results)
    for place, arm in enumerate(arms):
        heights = []
        for number in range(len(CLASS_NAMES)):
            values = [
                r["by_size"][number]["slowdown"]["mean"]
                for r in results
                if r["arm"] == arm and r["rate_per_s"] == rate and r["by_size"][number]["slowdown"]
            ]
            heights.append(fmean(values) if values else 0.0)
        left = [number + place / (len(arms) + 1) for number in range(len(CLASS_NAMES))]
        axis.bar(left, heights, width=1 / (len(arms) + 1), label=arm)
    axis.set_xticks([n + 0.4 for n in range(len(CLASS_NAMES))], CLASS_NAMES)
    axis.set_ylabel("mean slowdown")
    title = f"{trace}: slowdown by program size at {rate:g} programs/s"
    return _figure(figure, axis, f"{trace}-sizes", title)


def _waiting_share(results: Sequence[Result], trace: str) -> Figure:
    figure, (axis,) = _subplots(1)
    _plot_curves(axis, results, trace, "wait_share")
    axis.set_ylabel("wait ÷ (wait + service)")
    axis.set_xlabel("programs per second")
    return _figure(figure, axis, f"{trace}-waiting", f"{trace}: share of time spent waiting")


def _waiting_by_size(results: Sequence[Result], trace: str) -> Figure:
    figure, (axis,) = _subplots(1)
    rate, arms = _busiest(results)
    for arm in arms:
        some = [r["by_size"] for r in results if r["arm"] == arm and r["rate_per_s"] == rate]
        heights = [
            fmean(shares)
            for number in range(len(CLASS_NAMES))
            if (shares := [s[number]["wait_share"] for s in some if "wait_share" in s[number]])
        ]
        if len(heights) == len(CLASS_NAMES):
            axis.plot(CLASS_NAMES, heights, marker="o", markersize=3, label=arm)
    axis.set_ylabel("wait ÷ (wait + service)")
    title = f"{trace}: share of time spent waiting by program size at {rate:g} programs/s"
    return _figure(figure, axis, f"{trace}-waiting-sizes", title)


def _hits(results: Sequence[Result], trace: str) -> Figure:
    figure, axes = _subplots(2)
    for axis, where in zip(axes, ("within_programs", "across_programs"), strict=True):
        _plot_curves(axis, results, trace, f"call.hit_share_{where}")
        axis.set_title(where.replace("_", " "))
        axis.set_xlabel("programs per second")
    axes[0].set_ylabel("share of prompt tokens")
    return _figure(figure, axes[-1], f"{trace}-hits", f"{trace}: prompt tokens found in the cache")


def _burst(results: Sequence[Result], trace: str) -> Figure:
    figure, (axis,) = _subplots(1)
    for r in results:
        windows = r.get("response_by_arrival_s")
        if windows:
            axis.plot([w[0] for w in windows], [w[2] for w in windows], label=r["arm"])
    axis.set_yscale("log")
    axis.set_xlabel("arrival, s")
    axis.set_ylabel("mean response, s")
    return _figure(
        figure, axis, f"{trace}-burst", f"{trace}: a burst, and how long it takes to pass"
    )


def _plot_curves(axis: Any, results: Sequence[Result], trace: str, path: str) -> None:
    for arm in _values(results, "arm"):
        points = _curve(results, trace, arm, path)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm)


def _curve(results: Sequence[Result], trace: str, arm: str, path: str) -> list[tuple[float, float]]:
    """Return an arm's rates with their figure's mean over the seeds; programs come by a rate."""
    points: dict[float, list[float]] = {}
    for r in results:
        if r["trace"] == trace and r["arm"] == arm and r.get("mode", "open") == "open":
            value = _value(r, path)
            if value is not None:
                points.setdefault(r["rate_per_s"], []).append(value)
    return [(rate, fmean(points[rate])) for rate in sorted(points)]


def _value(result: Result, path: str) -> Any:
    """Return what stands in a result under names joined by dots; None where nothing does."""
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _values(results: Sequence[Result], key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in results))


def _subplots(count: int) -> tuple[Any, Sequence[Any]]:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ReportError("plots need matplotlib: pip install 'autellix[lab]'") from None
    figure = Canvas(figsize=(4.2 * count + 1.6, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(visible=True, alpha=0.3)
    return figure, axes


def _figure(canvas: Any, axis: Any, name: str, title: str) -> Figure:
    canvas.suptitle(title)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None})
    return Figure(name.replace("/", "_"), title, buffer.getvalue())


def _page(results: Sequence[Result], figures: Sequence[Figure]) -> str:
    parts = [_HEAD]
    for figure in figures:
        data = base64.b64encode(figure.png).decode()
        title = html.escape(figure.title)
        parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    parts.append("<h2>All runs</h2><table><tr>")
    parts += [f"<th>{html.escape(name)}</th>" for name, _ in _COLUMNS]
    for r in results:
        parts.append("</tr><tr>")
        parts += [f"<td>{html.escape(_cell(r, path))}</td>" for _, path in _COLUMNS]
    parts.append("</tr></table></body></html>\n")
    return "".join(parts)


def _cell(result: Result, path: str) -> str:
    value = _value(result, path)
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


_COLUMNS: Final = (
    ("trace", "trace"), ("policy", "arm"), ("rate", "rate_per_s"), ("seed", "seed"),
    ("programs", "programs"), ("unfinished", "unfinished"),
    ("token latency mean s", "token_latency_s.mean"), ("p95", "token_latency_s.p95"),
    ("p99", "token_latency_s.p99"), ("response mean s", "response_s.mean"),
    ("slowdown mean", "slowdown.mean"), ("slowdown p99", "slowdown.p99"),
    ("programs/s", "programs_per_s"), ("tokens/s", "output_tokens_per_s"),
    ("hits", "engine.prefix_hit_share"), ("recomputed", "engine.recomputed_share"),
    ("preemptions", "engine.preemptions"), ("batch", "engine.mean_batch"),
    ("KV use", "engine.kv_use"), ("backlog/s", "backlog_slope_per_s"),
)  # fmt: skip

_HEAD: Final = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>autellix lab</title><style>'
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
    "img{max-width:100%}table{border-collapse:collapse;font-size:12px}"
    "td,th{border:1px solid #ccc;padding:2px 6px;text-align:right}"
    "</style></head><body><h1>autellix lab</h1><p>Each figure's definition is in docs/lab.md. "
    "Below saturation the policies coincide: without a queue there is nothing to gain.</p>"
)

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
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from .setting import (
    Group,
    Result,
    groups,
    is_smoke,
    mode_of,
    open_runs,
    setting_of,
    windowed_runs,
)

LIMIT_S: Final = 0.5  # token latency at which rates are compared
BASE: Final = "fcfs"  # the arm that ratios are taken to
FIGURES: Final = ("mean", "p95", "p99")
LETTERS_PER_INCH: Final = 11  # of a title
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


def draw(
    results: Sequence[Result], folder: Path, *, limit_s: float = LIMIT_S, base: str = BASE
) -> list[Path]:
    """Write the figures and ``index.html`` to a folder and return the paths.

    Args:
        results: Of any runs; each setting gets figures of its own.
        folder: Made if it is not there.
        limit_s: Token latency at which rates are compared.
        base: The arm that ratios are taken to.

    Raises:
        ReportError: matplotlib is missing, or there is no result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, parts = [], []
    for group in groups(results):
        figures = list(_of_group(group, limit_s, base))
        for figure in figures:
            path = folder / f"{figure.name}.png"
            path.write_bytes(figure.png)
            written.append(path)
        parts += [_picture(figure) for figure in figures]
        parts.append(_gain_table(group, limit_s, base))
    page = folder / "index.html"
    page.write_text(_page(results, parts), encoding="utf-8")
    return [*written, page]


def gain_at(
    results: Sequence[Result], trace: str, limit_s: float, figure: str = "mean"
) -> dict[str, float | None]:
    """Return the rate at which each arm's token latency crosses a limit.

    Between two rates of the sweep the latency is taken to grow evenly. An arm whose sweep does
    not cross the limit has none: the last point is no answer.

    Args:
        results: Of a sweep; only runs in which programs come by a rate count.
        trace: The trace.
        limit_s: Of the token latency.
        figure: ``mean``, ``p50``, ``p95`` or ``p99``.

    Raises:
        ReportError: the trace's runs are of several settings.
    """
    some = open_runs([r for r in results if r["trace"] == trace])
    _check_alike(some)
    found: dict[str, float | None] = {}
    for arm in _values(some, "arm"):
        points = _curve(some, arm, f"token_latency_s.{figure}")
        found[arm] = None
        for (rate, value), (next_rate, next_value) in itertools.pairwise(points):
            if value <= limit_s < next_value:
                share = (limit_s - value) / (next_value - value)
                found[arm] = rate + share * (next_rate - rate)
                break
    return found


class Gain(NamedTuple):
    """What an arm bears at equal latency.

    Attributes:
        arm: The arm.
        rate_per_s: At which it crosses the limit; None: its sweep does not.
        ratio: To the base's rate; None where one of the two is missing.
    """

    arm: str
    rate_per_s: float | None
    ratio: float | None


def gains(results: Sequence[Result], trace: str, limit_s: float, base: str) -> list[Gain]:
    """Return each arm's rate at a limit of the mean token latency, and its ratio to the base's.

    Raises:
        ReportError: the trace's runs are of several settings.
    """
    rates = gain_at(results, trace, limit_s)
    below = rates.get(base)
    return [
        Gain(arm, rate, rate / below if rate is not None and below else None)
        for arm, rate in rates.items()
    ]


def paired_ratios(
    results: Sequence[Result],
    trace: str,
    rate: float,
    arm: str,
    base: str,
    figure: str,
    *,
    mode: str = "open",
) -> list[float]:
    """Return an arm's mean figure ÷ another arm's on the same seed, for all seeds both have.

    Args:
        results: Of any runs; what was run twice on a seed counts with its mean.
        trace: The trace.
        rate: Programs per second.
        arm: The one above.
        base: The one below.
        figure: ``token_latency_s``, ``response_s`` or ``slowdown``.
        mode: The mode that the runs were in.

    Raises:
        ReportError: the runs are of several settings.
    """
    wanted = (trace, rate, mode)
    some = [r for r in results if (r["trace"], r["rate_per_s"], mode_of(r)) == wanted]
    _check_alike(some)
    by_arm: dict[str, dict[int, list[float]]] = {arm: {}, base: {}}
    for r in some:
        if r["arm"] in by_arm and r[figure]:
            by_arm[r["arm"]].setdefault(r["seed"], []).append(r[figure]["mean"])
    both = sorted(by_arm[arm].keys() & by_arm[base].keys())
    return [fmean(by_arm[arm][seed]) / fmean(by_arm[base][seed]) for seed in both]


def _check_alike(results: Sequence[Result]) -> None:
    settings = {setting_of(r) for r in results}
    if len(settings) > 1:
        raise ReportError(f"runs of {len(settings)} settings have no figure in common")


def _of_group(group: Group, limit_s: float, base: str) -> Iterable[Figure]:
    some = open_runs(group.results)
    if some:
        for key, title in (
            ("token_latency_s", "token latency, s"),
            ("response_s", "program response, s"),
            ("slowdown", "slowdown"),
        ):
            yield _rate_curves(some, group, key, title)
        yield _size_bars(some, group)
    if any("wait_share" in r for r in some):
        yield _waiting_share(some, group)
        yield _waiting_by_size(some, group)
    if any("hit_share_within_programs" in r.get("call", {}) for r in some):
        yield _hits(some, group)
    found = gains(some, some[0]["trace"], limit_s, base) if some else []
    if any(gain.rate_per_s is not None for gain in found):
        yield _gain_bars(found, group, limit_s, base)
    for mode in dict.fromkeys(map(mode_of, windowed_runs(group.results))):
        yield _burst([r for r in windowed_runs(group.results) if mode_of(r) == mode], group, mode)


def _rate_curves(results: Sequence[Result], group: Group, key: str, title: str) -> Figure:
    figure, axes = _subplots(len(FIGURES))
    for axis, name in zip(axes, FIGURES, strict=True):
        _plot_curves(axis, results, f"{key}.{name}")
        axis.set_title(name)
        axis.set_xlabel("programs per second")
        axis.set_yscale("log")
    axes[0].set_ylabel(title)
    return _figure(figure, axes[-1], f"{group.stem}-{key}", f"{group.heading}: {title} over load")


def _busiest(results: Sequence[Result]) -> tuple[float, list[str]]:
    """Return the highest of the rates that the most arms were run at, and those arms."""
    arms: dict[float, list[str]] = {}
    for r in results:
        if r["arm"] not in arms.setdefault(r["rate_per_s"], []):
            arms[r["rate_per_s"]].append(r["arm"])
    rate = max(arms, key=lambda rate: (len(arms[rate]), rate))
    return rate, arms[rate]


def _size_bars(results: Sequence[Result], group: Group) -> Figure:
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
    title = f"{group.heading}: slowdown by program size at {rate:g} programs/s"
    return _figure(figure, axis, f"{group.stem}-sizes", title)


def _waiting_share(results: Sequence[Result], group: Group) -> Figure:
    figure, (axis,) = _subplots(1)
    _plot_curves(axis, results, "wait_share")
    axis.set_ylabel("wait ÷ (wait + service)")
    axis.set_xlabel("programs per second")
    title = f"{group.heading}: share of time spent waiting"
    return _figure(figure, axis, f"{group.stem}-waiting", title)


def _waiting_by_size(results: Sequence[Result], group: Group) -> Figure:
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
    title = f"{group.heading}: share of time spent waiting by program size at {rate:g} programs/s"
    return _figure(figure, axis, f"{group.stem}-waiting-sizes", title)


def _hits(results: Sequence[Result], group: Group) -> Figure:
    figure, axes = _subplots(2)
    for axis, where in zip(axes, ("within_programs", "across_programs"), strict=True):
        _plot_curves(axis, results, f"call.hit_share_{where}")
        axis.set_title(where.replace("_", " "))
        axis.set_xlabel("programs per second")
    axes[0].set_ylabel("share of prompt tokens")
    title = f"{group.heading}: prompt tokens found in the cache"
    return _figure(figure, axes[-1], f"{group.stem}-hits", title)


def _gain_bars(found: Sequence[Gain], group: Group, limit_s: float, base: str) -> Figure:
    """Draw rates at the limit, and beside them ratios to the base where it has a rate."""
    has_ratios = any(gain.ratio is not None for gain in found)
    figure, axes = _subplots(2 if has_ratios else 1)
    arms = [gain.arm for gain in found]
    columns = [[gain.rate_per_s for gain in found], [gain.ratio for gain in found]]
    labels = ["programs per second", f"rate ÷ that of {base}"]
    for axis, values, label in zip(axes, columns, labels, strict=False):
        bars = axis.barh(arms, [value or 0.0 for value in values])
        axis.bar_label(bars, [_rate_text(value) for value in values], padding=2, fontsize=7)
        axis.set_xlabel(label)
        axis.margins(x=0.2)
        axis.invert_yaxis()  # the first arm on top
    title = f"{group.heading}: rate at a mean token latency of {limit_s:g} s"
    return _figure(figure, axes[-1], f"{group.stem}-gain", title)


def _rate_text(value: float | None) -> str:
    return "not crossed" if value is None else f"{value:.3g}"


def _burst(results: Sequence[Result], group: Group, mode: str) -> Figure:
    figure, (axis,) = _subplots(1)
    rates, seeds = _values(results, "rate_per_s"), _values(results, "seed")
    for r in results:
        label = r["arm"]
        label += f" {r['rate_per_s']:g}/s" if len(rates) > 1 else ""
        label += f" seed {r['seed']}" if len(seeds) > 1 else ""
        windows = r["response_by_arrival_s"]
        axis.plot([w[0] for w in windows], [w[2] for w in windows], label=label)
    axis.set_yscale("log")
    axis.set_xlabel("arrival, s")
    axis.set_ylabel("mean response, s")
    title = f"{group.heading}: a {mode}, and how long it takes to pass"
    return _figure(figure, axis, f"{group.stem}-{mode}", title)


def _plot_curves(axis: Any, results: Sequence[Result], path: str) -> None:
    for arm in _values(results, "arm"):
        points = _curve(results, arm, path)
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=arm)


def _curve(results: Sequence[Result], arm: str, path: str) -> list[tuple[float, float]]:
    """Return an arm's rates with their figure's mean over the seeds."""
    points: dict[float, list[float]] = {}
    for r in results:
        value = _value(r, path) if r["arm"] == arm else None
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
    letters = int(canvas.get_figwidth() * LETTERS_PER_INCH)
    canvas.suptitle(textwrap.fill(title, letters))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Software": None})
    return Figure(name.replace("/", "_"), title, buffer.getvalue())


def _picture(figure: Figure) -> str:
    data = base64.b64encode(figure.png).decode()
    title = html.escape(figure.title)
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">'


def _gain_table(group: Group, limit_s: float, base: str) -> str:
    """Return the rates at the limit as a table; nothing if no programs came by a rate."""
    some = open_runs(group.results)
    if not some:
        return ""
    heading = f"{group.heading}: programs per second at a mean token latency of {limit_s:g} s"
    rows = [
        (gain.arm, _rate_text(gain.rate_per_s), "" if gain.ratio is None else f"{gain.ratio:.3g}")
        for gain in gains(some, some[0]["trace"], limit_s, base)
    ]
    return f"<h2>{html.escape(heading)}</h2>" + _table(("policy", "rate", f"÷ {base}"), rows)


def _page(results: Sequence[Result], parts: Sequence[str]) -> str:
    rows = [[_cell(r, path) for _, path in _COLUMNS] for r in results]
    runs = _table([name for name, _ in _COLUMNS], rows)
    smoke = _SMOKE if any(map(is_smoke, results)) else ""
    return "".join([_HEAD, smoke, *parts, "<h2>All runs</h2>", runs, "</body></html>\n"])


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{head}</tr>{''.join(body)}</table>"


def _cell(result: Result, path: str) -> str:
    if path == "smoke":
        return "smoke run" if is_smoke(result) else ""
    value = _value(result, path)
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


_COLUMNS: Final = (
    ("trace", "trace"), ("profile", "profile"), ("engines", "engines"), ("balancer", "balancer"),
    ("mode", "mode"), ("smoke", "smoke"), ("policy", "arm"), ("rate", "rate_per_s"),
    ("seed", "seed"),
    ("programs", "programs"), ("unfinished", "unfinished"),
    ("token latency mean s", "token_latency_s.mean"), ("p95", "token_latency_s.p95"),
    ("p99", "token_latency_s.p99"), ("response mean s", "response_s.mean"),
    ("slowdown mean", "slowdown.mean"), ("slowdown p99", "slowdown.p99"),
    ("programs/s", "programs_per_s"), ("tokens/s", "output_tokens_per_s"),
    ("hits", "engine.prefix_hit_share"), ("recomputed", "engine.recomputed_share"),
    ("preemptions", "engine.preemptions"), ("batch", "engine.mean_batch"),
    ("KV use", "engine.kv_use"), ("backlog/s", "backlog_slope_per_s"),
)  # fmt: skip

_SMOKE: Final = (
    "<p>A <b>smoke run</b> is cut to some programs, all of which are measured: no ratio of such "
    "runs means anything.</p>"
)

_HEAD: Final = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>autellix lab</title><style>'
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}"
    "img{max-width:100%}table{border-collapse:collapse;font-size:12px}"
    "td,th{border:1px solid #ccc;padding:2px 6px;text-align:right}"
    "</style></head><body><h1>autellix lab</h1><p>Each figure's definition is in docs/lab.md. "
    "Below saturation the policies coincide: without a queue there is nothing to gain.</p>"
)

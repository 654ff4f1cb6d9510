"""Prometheus metrics: counters and histograms that cost next to nothing, and their text form.

A value is a plain number in a dict; nothing is locked, since everything belongs to the event loop,
and text is made only when it is asked for. Label sets are bounded: a metric takes at most
``SERIES_MAX`` series, and what comes after that is counted in one more, whose labels say ``other``.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

SERIES_MAX: Final = 512
OTHER: Final = "other"

#: Bucket bounds, each the upper end of its bucket.
SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    300.0, 600.0,
)  # fmt: skip
SHORT_SECONDS: Final = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0,
)  # fmt: skip
LONG_SECONDS: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)
TOKENS: Final = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
RATIOS: Final = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
COUNTS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

Labels = tuple[str, ...]


class Metric(NamedTuple):
    """What a metric is; the document of the metrics is made from these."""

    name: str
    kind: str  # counter, gauge, histogram
    help: str
    labels: Labels = ()


class Counter:
    """A number for each label set, that only grows."""

    __slots__ = ("metric", "values")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[Labels, float] = {}

    def add(self, amount: float = 1, labels: Labels = ()) -> None:
        """Count."""
        values = self.values
        if labels not in values and len(values) >= SERIES_MAX:
            labels = (OTHER,) * len(labels)
        values[labels] = values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        """Yield the samples."""
        return samples(self.metric, self.values)


class Histogram:
    """Counts of observations by size."""

    __slots__ = ("_bounds", "_counts", "_sum", "metric")

    def __init__(self, metric: Metric, bounds: Sequence[float]) -> None:
        assert metric.kind == "histogram"
        assert not metric.labels, "no metric of ours needs a histogram for each label set"
        self.metric = metric
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count an observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """Yield the samples: cumulative buckets, sum and count."""
        name = self.metric.name
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            total += count
            yield f'{name}_bucket{{le="{bound:g}"}} {total}'
        total += self._counts[-1]
        yield f'{name}_bucket{{le="+Inf"}} {total}'
        yield f"{name}_sum {number(self._sum)}"
        yield f"{name}_count {total}"


def samples(metric: Metric, values: Mapping[Labels, float]) -> Iterator[str]:
    """Yield a sample for each label set.

    >>> list(samples(Metric("m", "gauge", "", ("engine",)), {("e0",): 2}))
    ['m{engine="e0"} 2']
    """
    for labels, value in values.items():
        if labels:
            pairs = zip(metric.labels, labels, strict=True)
            text = ",".join(f'{name}="{escape(label)}"' for name, label in pairs)
            yield f"{metric.name}{{{text}}} {number(value)}"
        else:
            yield f"{metric.name} {number(value)}"


def family(metric: Metric, lines: Iterable[str]) -> str:
    """Return a metric with its samples."""
    head = f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    return head + "".join(f"{line}\n" for line in lines)


def number(value: float) -> str:
    """Return a value in the fewest digits that say it.

    >>> number(3.0), number(0.1), number(float("inf"))
    ('3', '0.1', '+Inf')
    """
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def escape(label: str) -> str:
    """Return a label's value as the text form wants it."""
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class MergeError(ValueError):
    """A text is no exposition of metrics."""


def merge(texts: Mapping[str, str], label: str) -> str:
    r"""Return the metrics of several sources as one text, with a label that names the source.

    Args:
        texts: Source → its exposition.
        label: The name of the label; the sources do not use it themselves.

    Raises:
        MergeError: a line is neither a comment nor a sample.

    >>> print(merge({"e0": "# TYPE a gauge\na 1\n", "e1": 'a{x="y"} 2'}, "source"), end="")
    # TYPE a gauge
    a{source="e0"} 1
    a{source="e1",x="y"} 2
    """
    heads: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for source, text in texts.items():
        mark = f'{label}="{escape(source)}"'
        current = ""
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(None, 3)
                if len(words) > 2 and words[1] in ("HELP", "TYPE"):
                    current = words[2]
                    head = heads.setdefault(current, [])
                    if not any(old.startswith(f"# {words[1]} ") for old in head):
                        head.append(line)
            elif line.strip():
                name = _name_of(line)
                if not current or not name.startswith(current):
                    current = name  # without a head of its own
                lines.setdefault(current, []).append(_with_label(line, name, mark))
    parts = []
    for name, found in lines.items():
        parts += [*heads.get(name, ()), *found]
    return "".join(f"{line}\n" for line in parts)


def _name_of(line: str) -> str:
    name = line.partition("{")[0].partition(" ")[0]
    if not name or " " not in line:
        raise MergeError(f"no sample: {line[:80]!r}")
    return name


def _with_label(line: str, name: str, mark: str) -> str:
    rest = line[len(name) :]
    if rest.startswith("{}"):
        rest = rest[2:]
    if rest.startswith("{"):
        return f"{name}{{{mark},{rest[1:]}"
    return f"{name}{{{mark}}}{rest}"

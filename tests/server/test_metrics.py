"""Prometheus's text form: what we write, Prometheus's own parser reads."""

from __future__ import annotations

import doctest

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from autellix.server import call_metrics, metrics
from autellix.server.accounts import Charged
from autellix.server.call_log import CallLog
from autellix.server.call_metrics import CallMetrics
from autellix.server.channel import CallEvent
from autellix.server.metrics import Counter, Histogram, MergeError, Metric, family, merge
from autellix.server.process_table import ProcessTable

from .test_call_log import begun, report


def values(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what Prometheus would read: (sample, label values) → value."""
    return {(s.name, tuple(s.labels.values())): s.value for f in parse(text) for s in f.samples}


def test_the_examples_hold():
    """The doctests of the module."""
    assert doctest.testmod(metrics).failed == 0


def test_a_histogram_is_cumulative():
    """Bounds are upper ends, inclusive; the last bucket holds everything."""
    histogram = Histogram(Metric("h", "histogram", "H."), (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    read = values(family(histogram.metric, histogram.lines()))
    assert read["h_bucket", ("1",)] == 2
    assert read["h_bucket", ("2",)] == 3
    assert read["h_bucket", ("+Inf",)] == read["h_count", ()] == 4
    assert read["h_sum", ()] == pytest.approx(102.0)


def test_series_are_bounded():
    """A label that takes any number of values ends in one series called other."""
    counter = Counter(Metric("c_total", "counter", "C.", ("what",)))
    for number in range(5 * metrics.SERIES_MAX):
        counter.add(1, (f"w{number}",))
    assert len(counter.values) == metrics.SERIES_MAX + 1
    assert counter.values["other",] == 4 * metrics.SERIES_MAX
    counter.add(2, ("w0",))
    assert counter.values["w0",] == 3


def test_labels_are_escaped():
    """Quotes, backslashes and line ends in a label do not break the text."""
    counter = Counter(Metric("c_total", "counter", "C.", ("what",)))
    counter.add(1, ('a"b\\c\nd',))
    assert values(family(counter.metric, counter.lines())) == {("c_total", ('a"b\\c\nd',)): 1.0}


def test_engines_are_merged_family_by_family():
    """Samples of one family stand together, each with its engine; heads are not repeated."""
    text = '# HELP x:y Y.\n# TYPE x:y counter\nx:y_total{engine="0"} 3\n# TYPE z gauge\nz 1\n'
    merged = merge({"e0": text, "e1": text}, "autellix_engine")
    assert merged.count("# TYPE x:y counter") == 1
    assert values(merged)["z", ("e1",)] == 1
    assert 'x:y_total{autellix_engine="e1",engine="0"} 3' in merged.splitlines()
    with pytest.raises(MergeError):
        merge({"e0": "<html>"}, "autellix_engine")


def test_calls_and_programs_are_counted():
    """Outcomes, waits, preemptions by reason, tokens once, slowdown and fairness."""
    log, table, counted = CallLog(), ProcessTable(), CallMetrics()
    record = begun(log, table, "a", 1)
    record.sent("e0", "first", {}, 1.5)
    events = (CallEvent(1.0, "preempt", 2, "waiting:1+swap"), CallEvent(2.0, "preempt", 2, "room"))
    told = report(record.call_id, events=events, preemptions=3, swaps=1, promotions=1)
    assert table.get(record.program_id) is not None
    counted.reported("e0", told)
    record.note_usage(99, None, 99)
    record.ended(502, "failed", 3.0)
    counted.call_over(record)
    program = table.get(record.program_id)
    assert program is not None
    program.calls_reported, program.wait_s = 1, 1.0
    program.account.restore(Charged(1.0))
    counted.program_over(program, 9.0)
    read = values(counted.text())
    assert read["autellix_calls_total", ("failed",)] == 1
    assert read["autellix_call_errors_total", ("502",)] == 1
    assert read["autellix_placements_total", ("first",)] == 1
    for reason in ("waiting", "room", "other"):
        assert read["autellix_preemptions_total", ("e0", reason)] == 1
    assert read["autellix_prompt_tokens_total", ("e0",)] == 10  # the engine's word, not usage
    assert read["autellix_program_slowdown_sum", ()] == pytest.approx(2.0)
    assert read["autellix_programs_ended_total", ("expired",)] == 1
    assert read["autellix_fairness_jain", ()] == pytest.approx(1.0)
    counted.forget_engines({"e9"})
    assert ("autellix_prompt_tokens_total", ("e0",)) not in values(counted.text())


def test_every_metric_says_what_it_is():
    """Names, kinds and help of the metrics are as Prometheus's conventions have them."""
    described = [m for m in vars(call_metrics).values() if isinstance(m, Metric)]
    assert len({m.name for m in described}) == len(described)
    for metric in described:
        assert metric.name.startswith("autellix_")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith((".", "mistake"))

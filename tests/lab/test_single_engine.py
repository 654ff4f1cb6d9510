"""The climb over loads: who is run where, and what is printed beside the paper."""

from __future__ import annotations

from collections.abc import Sequence

from autellix.server.lab.measure import Cell, Rule
from benchmarks.paper import single_engine

from .test_report import result

#: Mean token latency in s; an arm that stands has the light load's.
COLLAPSE_PER_S = {"fcfs": 1.7, "plas:level_bounds_s=[5,20,80]": 2.5}


def run(cells: Sequence[Cell]) -> list[dict]:
    """Return results of an engine that collapses all at once."""
    return [
        {**result(cell.arm, cell.rate_per_s, 1.0 if cell.rate_per_s > COLLAPSE_PER_S[cell.arm]
                  else 0.02), "trace": cell.trace, "call": {}}
        for cell in cells
    ]  # fmt: skip


def test_an_arm_climbs_until_it_has_collapsed():
    """The light load first; nothing is run beyond an arm's own collapse."""
    arms = list(COLLAPSE_PER_S)
    found = list(single_engine.climb("bfcl-gt", arms, Rule(), 1, run))
    rates = {arm: [r["rate_per_s"] for r in found if r["arm"] == arm] for arm in arms}
    assert rates["fcfs"] == [0.48, 1.6, 1.75]
    assert rates["plas:level_bounds_s=[5,20,80]"] == [0.48, 1.6, 1.75, 1.9, 2.2, 2.65]


def test_the_rates_at_a_limit_stand_beside_the_papers(capsys):
    """A ratio where both arms cross the limit, and none where one does not."""
    found = list(single_engine.climb("bfcl-gt", list(COLLAPSE_PER_S), Rule(), 1, run))
    single_engine.show(found)
    lines = capsys.readouterr().out.splitlines()
    ratio = next(line for line in lines if line.startswith("| plas ÷ fcfs |"))
    # At 2 x 20 ms: 2.2 + 0.45 x 0.02 ÷ 0.98 against 1.6 + 0.15 x 0.02 ÷ 0.98.
    assert ratio.split(" | ")[1] == "1.38"
    paper = next(line for line in lines if line.startswith("| the paper, ÷ fcfs |"))
    assert paper.startswith("| the paper, ÷ fcfs | 1.37 at 0.2 s | 1.64 at 0.5 s")
    assert next(line for line in lines if line.startswith("| plas ÷ mlfq")).count("no figure") == 4

"""The search for rates at stock vLLM's latency (benchmarks/paper/steady.py)."""

from __future__ import annotations

import pytest

from autellix.server.lab import cost_model
from autellix.server.lab.capacity import NotCrossedError
from autellix.server.lab.measure import Cell
from benchmarks.paper import steady

CELL = Cell(
    trace="bfcl-gt", arm="", profile=cost_model.load("a100-80g-llama-3.1-8b"), rate_per_s=1.0
)


@pytest.mark.parametrize("limit", [0.13, 0.9, 1.0, 1.3, 7.0])
def test_an_edge_is_found_from_either_side(limit: float):
    """Upwards from a rate that holds, downwards from one that does not."""
    assert limit / 1.02 <= steady.edge(lambda rate: rate <= limit, 1.0, 0.02) <= limit


def test_no_edge_is_no_figure():
    """Neither a rate that always holds nor one that never does."""
    for answer in (True, False):
        with pytest.raises(NotCrossedError):
            steady.edge(lambda _, answer=answer: answer, 1.0, 0.02)


def engine(cell: Cell) -> dict:
    """An engine that sustains 2 programs/s; under our arms its latency grows half as fast."""
    slowness = {"fcfs": 1.0}.get(cell.arm, 0.5)
    return {
        "arm": cell.arm, "rate_per_s": cell.rate_per_s, "unfinished": 0,
        "backlog_slope_per_s": 0.0 if cell.rate_per_s <= 2.0 else 1.0, "backlog_mean": 25.0,
        "rule": {"warmup_s": 100.0, "window_end_s": 500.0},
        "token_latency_s": {"mean": slowness * cell.rate_per_s, "p99": slowness},
    }  # fmt: skip


def test_rates_are_held_against_stock_vllm_at_its_own_capacity():
    """Stock stands at 0.9 of what it sustains; an arm may take as much as its latency allows."""
    stock, plas, adaptive = steady.search(CELL, ("plas", "adaptive"), engine, 0.02)
    assert stock.there["rate_per_s"] == pytest.approx(1.8, rel=0.02)
    for held in (plas, adaptive):
        assert held.share == pytest.approx(2.0, rel=0.02)
        assert held.at_stocks["rate_per_s"] == stock.there["rate_per_s"]
        assert held.there["token_latency_s"]["mean"] <= stock.there["token_latency_s"]["mean"]


@pytest.mark.parametrize(
    ("slope", "unfinished", "steady_"),
    [(0.02, 0, True), (0.025, 0, True), (0.026, 0, False), (0.0, 1, False)],
)
def test_a_short_window_is_not_judged_by_less_than_chance(slope, unfinished, steady_):
    """25 programs are 25 +- 5: ten more or less after 400 s are no growth. Nor is 2 % of it."""
    result = {**engine(CELL), "backlog_slope_per_s": slope, "unfinished": unfinished}
    assert steady.bears(result) is steady_

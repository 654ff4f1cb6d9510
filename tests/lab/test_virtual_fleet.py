"""Several engines in the simulator: the real balancer, dead and slow engines, the coarse engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.lab import cost_model, trace
from autellix.server.lab.coarse_engine import Cache
from autellix.server.lab.measure import Cell, Rule, run_cell, simulate_cell
from autellix.server.lab.simulate_command import document
from autellix.server.lab.virtual_fleet import Faults
from autellix.server.policy.balancer import PLACEMENTS

A100 = cost_model.load("a100-80g-llama-3.1-8b")


def cell(balancer: str, name: str = "chat-sharegpt", arm: str = "coarse-plas", **changes) -> Cell:
    """Return a cell of a few programs on three engines with little memory."""
    profile = replace(A100, kv_tokens=60_000, slots=16, context_tokens_max=20_000)
    changes = {"profile": profile, "rate_per_s": 4.0, "programs": 40, "engines": 3, **changes}
    return Cell(trace=name, arm=arm, balancer=balancer, **changes)


def run(some: Cell):
    """Return the simulation of a cell, run to its end."""
    outcome, simulation, _ = simulate_cell(some, trace.load(some.trace))
    return outcome, simulation


@pytest.mark.parametrize("balancer", sorted(PLACEMENTS))
@pytest.mark.parametrize("name", ["chat-sharegpt", "lats"])
def test_every_rule_serves_every_program(balancer: str, name: str):
    """No call is lost, and no count is left when all is over."""
    outcome, simulation = run(cell(balancer, name, programs=40 if name != "lats" else 3))
    assert outcome.unfinished == 0
    calls = sum(len(p.program.calls) for p in outcome.programs)
    assert len(outcome.calls) == calls == len(simulation.completion_order)
    assert simulation.fleet.balancer.calls() == {}
    assert simulation.fleet.balancer.faults() == []
    assert simulation.fleet.balancer.leaks == 0
    if hasattr(simulation.fleet.balancer.placement, "__len__") and balancer != "prefix-tree":
        assert len(simulation.fleet.balancer.placement) == 0


@pytest.mark.parametrize("balancer", sorted(PLACEMENTS))
def test_an_engine_that_dies_gets_nothing_more(balancer: str):
    """Its calls begin again elsewhere, and every program still ends."""
    some = cell(balancer, faults=Faults(dead_s=((1, 5.0),)))
    outcome, simulation = run(some)
    assert outcome.unfinished == 0
    assert all(run.engine != 1 for run in outcome.calls if run.finished_s > 5.0)
    assert any(run.engine == 1 for run in outcome.calls)
    assert simulation.fleet.balancer.calls() == {}


def test_a_slow_engine_gets_less():
    """Both by the count of calls and by the pace it is seen to have."""
    for balancer in ("least-loaded", "locality"):
        some = cell(balancer, programs=80, faults=Faults(slow=((2, 3.0),)))
        outcome, _ = run(some)
        shares = [sum(c.engine == n for c in outcome.calls) for n in range(3)]
        assert shares[2] < 0.7 * min(shares[:2]), (balancer, shares)


def test_the_same_fleet_gives_the_same_figures():
    """Byte for byte."""
    programs = trace.load("chat-sharegpt")
    one, two = (document([run_cell(cell("locality"), programs)]) for _ in range(2))
    assert one == two


def test_the_rules_are_the_same_on_the_real_scheduler():
    """The fleet asks the same object, whatever runs in the engines."""
    outcome, simulation = run(cell("locality", arm="plas", programs=12))
    assert outcome.unfinished == 0
    assert {run.engine for run in outcome.calls} == {0, 1, 2}
    assert simulation.fleet.balancer.calls() == {}


def test_a_program_finds_its_own_beginnings_where_it_stays():
    """Locality finds all that can be found; rules that know no programs do not."""
    programs = trace.load("chat-sharegpt")
    misses = {}
    for name in ("round-robin", "least-loaded", "locality"):
        call = run_cell(cell(name, profile=A100), programs)["call"]
        misses[name] = call["hit_share_possible"] - call["hit_share_within_programs"]
    assert misses["locality"] < 0.01
    assert misses["round-robin"] > 0.05
    assert misses["least-loaded"] > 0.05


def test_a_call_alone_takes_what_the_cost_model_says():
    """On an idle coarse engine a program's response is its time alone."""
    some = cell("locality", engines=1, programs=3, rate_per_s=0.001)
    outcome, _ = run(some)
    for program in outcome.programs:
        response = program.ended_s - program.arrival_s
        assert response == pytest.approx(program.alone_s, rel=0.03)


def test_rates_scale_with_the_horizon_of_the_rule():
    """An open run of a fleet measures its window as one engine's does."""
    some = cell("least-loaded", programs=None, rate_per_s=2.0, rule=Rule().shortened(60))
    figures = run_cell(some, trace.load("chat-sharegpt"))
    assert figures["programs"] > 20
    assert figures["balancer"] == "least-loaded"


class _Run:
    """A call of the cache's tests."""

    def __init__(self, pieces):
        self.prompt = type("Prompt", (), {"pieces": pieces})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=3),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_the_cache_counts_what_it_holds(operations):
    """Held and idle tokens add up after any takes and releases, and eviction makes the room."""
    cache = Cache(100)
    held = []
    for number, (beginning, let_go) in enumerate(operations):
        own = (1000 + number, 0, 10)
        seen = dict.fromkeys(s for s, _ in beginning)
        counts = dict(beginning)
        pieces = (*((segment, 0, counts[segment]) for segment in seen), own)
        tokens = sum(count for _, _, count in pieces)
        run = _Run(pieces)
        hit, added = cache.find(run, tokens, 1)
        before = cache.held
        cache.take(run, tokens)
        assert 0 <= hit < tokens
        assert cache.held - before <= added
        held.append((run, tokens))
        if let_go:
            run, tokens = held.pop(0)
            cache.release(run, tokens, tokens)
        cache.evict(0)
        assert cache.held == sum(cache._tokens[s] for s in cache._holders)
        assert cache.idle == sum(cache._tokens[s] for s in cache._idle)
        assert cache.held + cache.idle == sum(cache._tokens.values())
        assert cache.idle == 0 or cache.held + cache.idle <= 100
    for run, tokens in held:
        cache.release(run, tokens, tokens)
    assert cache.held == 0
    assert not cache._holders

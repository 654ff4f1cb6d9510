"""Small cells whose figures can be counted by hand: modes, promotions, preemptions, blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autellix.server.lab import cli, metrics, trace
from autellix.server.lab.arms import UnknownArmError, build
from autellix.server.lab.measure import Cell, Rule, run_cell, simulate_cell
from autellix.server.lab.simulate import Simulation
from autellix.server.lab.simulate_command import document
from autellix.server.lab.trace import Call, Program
from autellix.server.lab.workload import Arrival, Waits

LAB_PAGE = Path(__file__).parents[2] / "docs" / "lab.md"


def chain(*calls: tuple[int, int], name: str = "p") -> Program:
    """Return a program of calls one after the other, each (prompt, output) tokens and all new."""
    made = [
        Call(place, (place - 1,) if place else (), prompt, output, None, 0, None, None, None, None)
        for place, (prompt, output) in enumerate(calls)
    ]
    return Program(name, "hand", "chain", None, None, {}, tuple(made))


def bfcl_cell(profile, arm: str, **changes) -> Cell:
    """Return a cell of eight programs that have to wait for one another."""
    changes = {"programs": 8, "rate_per_s": 1.0, **changes}
    return Cell(trace="bfcl-gt", arm=arm, profile=profile, **changes)


@pytest.fixture
def tiny_profile(small_profile):
    """Two slots, six blocks of sixteen tokens and vLLM's null block, one batch at a time."""
    return replace(
        small_profile, kv_tokens=7 * 16, slots=2, context_tokens_max=64, batches_in_flight=1,
        turnaround_s=0.0,
    )  # fmt: skip


# ── the engine's figures ───────────────────────────────────────────────────────────────────────


def test_the_figures_of_an_engine_are_those_counted_by_hand(tiny_profile):
    """Two calls of 32 + 20 tokens, and seven blocks where eight would be wanted.

    The first call runs in steps 1 to 20. The second comes into step 2 and has computed 47 tokens
    when the first needs its fourth block, in step 18. Once the first is over it finds its two full
    blocks, computes 16 tokens (15 for the second time) in step 21 and its last three in 22 to 24.
    """
    cell = Cell(
        trace="hand", arm="fcfs", profile=tiny_profile, rate_per_s=1.0, programs=2, mode="offline"
    )  # fmt: skip
    figures = run_cell(cell, [chain((32, 20))])["engine"]
    used = [2, 5, *[6] * 15, *[4] * 3, 3, *[4] * 3]
    assert figures["steps"] == len(used) == 24
    assert figures["preemptions"] == 1
    assert figures["mean_batch"] == metrics.rounded((20 + 16 + 4) / 24)
    assert figures["mean_waiting_calls"] == 3 / 24
    assert figures["computed_tokens"] == (32 + 19) + (32 + 15) + (16 + 3)
    assert figures["recomputed_share"] == metrics.rounded(15 / 117)
    assert figures["kv_use"] == metrics.rounded(sum(blocks + 1 for blocks in used) / 24 / 7)


def test_only_the_calls_that_waited_long_count_as_promoted(small_profile):
    """``adaptive`` gives calls other places and promotes nobody; a small β promotes."""
    programs = trace.load("bfcl-gt")
    adaptive = run_cell(bfcl_cell(small_profile, "adaptive"), programs)["engine"]
    assert adaptive["mean_waiting_calls"] > 0.5
    assert adaptive["promotions"] == 0
    assert run_cell(bfcl_cell(small_profile, "plas:beta=0.5"), programs)["engine"]["promotions"] > 0


def test_preemptions_of_calls_that_never_end_count(small_profile):
    """A cell that is cut off counts what the scheduler counts, and not only of what is over."""
    rule = Rule(horizon_s=8.0, warmup_s=0.0, window_end_s=6.0, drain_s=2.0)
    cell = bfcl_cell(small_profile, "plas:beta=0.5", programs=None, rate_per_s=3.0, rule=rule)
    outcome, simulation, _ = simulate_cell(cell, trace.load("bfcl-gt"))
    engine = simulation.engines[0]
    accounts = engine.seat.scheduler.accounts
    assert sum(run.request.num_preemptions for run in engine.runs.values()) > 0
    assert outcome.totals[0].preemptions == accounts.preemptions
    assert outcome.totals[0].promotions == accounts.promotions > 0


# ── modes ──────────────────────────────────────────────────────────────────────────────────────


def test_a_smoke_run_says_so(small_profile):
    """``programs`` is the number that was measured; whether it was asked for stands beside it."""
    programs = trace.load("bfcl-gt")
    smoke = run_cell(bfcl_cell(small_profile, "fcfs", programs=2), programs)
    rule = Rule(horizon_s=6.0, warmup_s=0.0, window_end_s=4.0, drain_s=2.0)
    measured = run_cell(bfcl_cell(small_profile, "fcfs", programs=None, rule=rule), programs)
    assert (smoke["smoke"], smoke["programs"]) == (True, 2)
    assert measured["smoke"] is False
    assert measured["programs"] > 0


def test_an_offline_run_lasts_until_its_last_program_is_over(small_profile):
    cell = bfcl_cell(small_profile, "fcfs", programs=6, mode="offline")
    outcome, _, _ = simulate_cell(cell, trace.load("bfcl-gt"))
    figures = run_cell(cell, trace.load("bfcl-gt"))
    assert all(program.arrival_s == 0.0 for program in outcome.programs)
    last_s = max(program.ended_s for program in outcome.programs)
    assert figures["makespan_s"] == figures["virtual_s"] == metrics.rounded(last_s)
    assert (figures["programs"], figures["unfinished"]) == (6, 0)


def test_a_closed_loop_has_so_many_programs_and_never_more(small_profile):
    """A program comes at the moment that another one ends."""
    cell = bfcl_cell(small_profile, "fcfs", programs=9, mode="closed", concurrency=3)
    outcome, _, _ = simulate_cell(cell, trace.load("bfcl-gt"))
    taken = sorted((p.arrival_s, p.ended_s) for p in outcome.programs)
    assert len(taken) == 9
    live = [sum(come <= at_s < end for come, end in taken) for at_s, _ in taken]
    assert max(live) == 3
    assert live[3:] == [3] * 6
    assert {come for come, _ in taken[3:]} <= {end for _, end in taken}


def test_programs_that_are_cut_off_count_with_the_time_they_have_taken(small_profile):
    """Overload and a short drain: the unfinished ones are in every mean."""
    rule = Rule(horizon_s=30.0, warmup_s=0.0, window_end_s=28.0, drain_s=2.0)
    cell = bfcl_cell(small_profile, "admit", programs=None, rate_per_s=2.0, rule=rule)
    figures = run_cell(cell, trace.load("bfcl-gt"))
    outcome, _, measured = simulate_cell(cell, trace.load("bfcl-gt"))
    wanted = [p for p in outcome.programs if measured(p)]
    left = [p for p in wanted if p.ended_s is None]
    assert figures["unfinished"] == len(left) > 5
    assert figures["programs"] == len(wanted) > len(left)
    assert 29.5 < outcome.ended_s <= 30.0
    taken_s = [(p.ended_s or outcome.ended_s) - p.arrival_s for p in wanted]
    assert figures["response_s"]["mean"] == metrics.rounded(sum(taken_s) / len(taken_s))


def test_a_burst_says_when_it_is_over(tiny_profile):
    """From the end of the overload: the first window from which on responses are as before.

    A step takes 0.2 s, a program two, so the engine sustains one a second; at 1.5 a second for
    50 s some twenty-five are too many, and leave at half a program a second.
    """
    profile = replace(tiny_profile, gap_s=0.2)
    rule = Rule(horizon_s=600.0, warmup_s=120.0)
    cell = Cell(
        trace="hand", arm="fcfs", profile=profile, rate_per_s=1.0, mode="burst", rule=rule
    )  # fmt: skip
    figures = run_cell(cell, [chain((16, 10))])
    outcome, _, _ = simulate_cell(cell, [chain((16, 10))])

    def mean_s(start_s: float, end_s: float) -> float:
        taken = [
            p.ended_s - p.arrival_s for p in outcome.programs if start_s <= p.arrival_s < end_s
        ]
        return sum(taken) / len(taken)

    twice_s = 2 * mean_s(60.0, 120.0)
    slow = [mean_s(170.0 + at_s, 230.0 + at_s) > twice_s for at_s in range(0, 600, 60)]
    assert slow[0]
    assert not slow[-1]
    last = max(at for at, is_slow in enumerate(slow) if is_slow)
    assert figures["recovery_s"] == (last + 2) * 60.0


# ── an arm ─────────────────────────────────────────────────────────────────────────────────────


def test_vllm_priority_serves_less_service_first_and_then_the_older(small_profile):
    """One slot: a program that has had service waits for those that have had none."""
    profile = replace(small_profile, slots=1, batches_in_flight=1, turnaround_s=0.0)
    arrivals = [
        Arrival(0.0, 0, chain((64, 40), (64, 40), name="two calls")),
        Arrival(0.1, 1, chain((64, 400), name="long")),  # runs while the others come
        Arrival(1.0, 2, chain((64, 40))),
        Arrival(1.1, 3, chain((64, 40))),
    ]
    orders = {}
    for arm in ("fcfs", "vllm-priority"):
        simulation = Simulation(profile, arm, iter(arrivals), Waits())
        outcome = simulation.run()
        ended = sorted(outcome.calls, key=lambda run: run.finished_s)
        orders[arm] = [(run.program.number, run.place) for run in ended]
    assert orders["fcfs"] == [(0, 0), (1, 0), (0, 1), (2, 0), (3, 0)]
    assert orders["vllm-priority"] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


# ── what the files hold ────────────────────────────────────────────────────────────────────────


def test_decision_times_stand_beside_the_results(tmp_path: Path):
    """In ``.timing``, which a clock makes, and not in the JSON, which is the same every time."""
    out = tmp_path / "r.json"
    arguments = ["--trace", "bfcl-gt", "--policy", "fcfs,plas", "--programs", "1"]
    assert cli.simulate([*arguments, "--json", str(out)]) == 0
    times = json.loads(out.with_suffix(".timing").read_text(encoding="utf-8"))
    assert [entry["arm"] for entry in times] == ["fcfs", "plas"]
    assert all(0 < entry["measured"]["decision_ms_per_step"] < 1000 for entry in times)
    assert "decision_ms_per_step" not in out.read_text(encoding="utf-8")


def keys_of(value: Any, path: Sequence[str] = ()) -> Iterator[str]:
    """Yield every key of a document, with the keys above it."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield ".".join((*path, key))
            yield from keys_of(below, (*path, key))
    elif isinstance(value, list):
        for below in value:
            yield from keys_of(below, path)


def test_every_key_of_a_result_is_explained(small_profile, tiny_profile):
    """Its name stands in the table of docs/lab.md, as code; so none is added in silence."""
    page = LAB_PAGE.read_text(encoding="utf-8")
    section = page.split("## Figures in the JSON, per run\n")[1].split("\n## ")[0]
    named = {word for code in re.findall("`([^`]+)`", section) for word in code.split(".")}
    rule = Rule(horizon_s=60.0, warmup_s=20.0, window_end_s=50.0)
    burst = Cell(
        trace="hand", arm="fcfs", profile=tiny_profile, rate_per_s=1.0, mode="burst", rule=rule
    )  # fmt: skip
    closed = bfcl_cell(small_profile, "plas", programs=2, mode="closed", concurrency=1)
    results = [run_cell(burst, [chain((16, 4))]), run_cell(closed, trace.load("bfcl-gt"))]
    found = set(keys_of(json.loads(document(results))["results"]))
    assert {"engine.steps", "call.first_token_s.p99", "recovery_s", "makespan_s"} <= found
    missing = sorted(path for path in found if path.rpartition(".")[2] not in named)
    assert not missing, f"not in the table of docs/lab.md: {missing}"


# ── the swap ───────────────────────────────────────────────────────────────────────────────────


def test_swapped_programs_compute_less_and_pay_for_the_link(small_profile):
    """Agents whose tools take long, on an engine too small for them: their KV goes out and back."""
    profile = replace(small_profile, kv_tokens=40_000)
    cell = Cell(
        trace="mini-swe", arm="adaptive", profile=profile, rate_per_s=0.3, programs=10,
        waits=Waits(cap_s=60.0),
    )  # fmt: skip
    programs = trace.load("mini-swe")
    dropped, swapped = (
        run_cell(replace(cell, arm=arm), programs)["engine"]
        for arm in ("adaptive", "adaptive:swap_gib=16")
    )
    block_bytes = profile.block_tokens * profile.kv_bytes_per_token
    assert dropped["swap_bytes"] == 0 < swapped["swap_bytes"]
    assert swapped["swap_bytes"] % block_bytes == 0
    assert swapped["computed_tokens"] < dropped["computed_tokens"]
    assert swapped["prefix_hit_share"] > dropped["prefix_hit_share"]


@pytest.mark.parametrize("value", ["-1", "0", '"much"', "null", "true", "1e-07"])
def test_a_host_pool_has_a_size(small_profile, value: str):
    """What is wrong is named."""
    with pytest.raises(UnknownArmError, match=f"swap_gib = {re.escape(value)}"):
        build(f"adaptive:swap_gib={value}", small_profile)


@pytest.mark.parametrize("settings", ["swap_always=true", "swap_gib=1;swap_always=7"])
def test_always_is_a_choice_of_a_pool(small_profile, settings: str):
    """Without a pool there is nothing to choose."""
    with pytest.raises(UnknownArmError, match=r"swap_always = .*; it is true or false"):
        build(f"adaptive:{settings}", small_profile)

"""What must hold after every step holds under every arm, and the checker sees each rule broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autellix.server.lab import arms, trace
from autellix.server.lab.cost_model import Profile
from autellix.server.lab.invariants import BrokenInvariantError, InvariantChecker
from autellix.server.lab.measure import Cell, run_cell, simulate_cell
from autellix.server.policy.starvation import PromotionClock

# A seed that ever broke an invariant is put here, (trace, arm, seed), and stays.
REGRESSIONS: tuple[tuple[str, str, int], ...] = ()
SEEDS = (0, 1)
MANY_SEEDS = (0, 1, 2, 3, 4)
# β of 8 is not reached in so short a run; with these there are hundreds of promotions.
PROMOTING = ("mlfq:beta=0.5", "plas:beta=0.5", "atlas:beta=0.5")
ARMS = (*arms.names(), *PROMOTING)
LATS_ARMS = ("atlas", "adaptive", "atlas:beta=0.5")
TINY = {"kv_tokens": 8_000, "slots": 4, "context_tokens_max": 7_000}  # for short calls
PROGRAMS = {"bfcl-gt": 8, "chat-sharegpt": 16, "lats": 2}
RATES = {"bfcl-gt": 1.0, "chat-sharegpt": 8.0, "lats": 2.0}
OUTPUT_TOKENS_MAX = {"bfcl-gt": 10_000, "chat-sharegpt": 600, "lats": 1_900}


@cache
def short_programs(name: str) -> tuple[trace.Program, ...]:
    """Return the programs of a trace that are over soon."""
    return tuple(p for p in trace.load(name) if p.output_tokens <= OUTPUT_TOKENS_MAX[name])


def check(profile: Profile, name: str, arm: str, seed: int) -> dict[str, Any]:
    """Run short programs of a trace that fill the engine; return the figures."""
    if name != "bfcl-gt":
        profile = replace(profile, **TINY)
    cell = Cell(
        trace=name, arm=arm, profile=profile, seed=seed, rate_per_s=RATES[name],
        programs=PROGRAMS[name],
    )  # fmt: skip
    figures = watch(cell, short_programs(name))
    assert figures["engine"]["mean_waiting_calls"] > 0, "a cell without a queue shows nothing"
    return figures


def check_long_chats(profile: Profile, arm: str, seed: int) -> None:
    """Run sixteen whole chats, which go on for minutes."""
    cell = Cell(
        trace="chat-sharegpt", arm=arm, profile=profile, seed=seed, rate_per_s=2.0, programs=16
    )  # fmt: skip
    watch(cell, trace.load("chat-sharegpt"))


def watch(cell: Cell, programs: Sequence[trace.Program]) -> dict[str, Any]:
    """Run a cell with the checker after every step; return its figures."""
    checker = InvariantChecker()
    try:
        figures = run_cell(cell, programs, watcher=checker)
    except BrokenInvariantError as error:
        seed = (cell.trace, cell.arm, cell.seed)
        pytest.fail(f"add {seed} to REGRESSIONS: {error}")
    assert figures["unfinished"] == 0
    assert figures["programs"] == cell.programs
    assert checker.steps > 100
    return figures


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_lost_under_any_policy(small_profile, arm: str, depth: int):
    """After every step: calls, blocks, programs and time are accounted for, on every seed."""
    profile = replace(small_profile, batches_in_flight=depth)
    wanted = [("bfcl-gt", arm, seed) for seed in SEEDS]
    wanted += [("chat-sharegpt", arm, SEEDS[0])] if depth == 1 else []
    wanted += [r for r in REGRESSIONS if r[1] == arm]
    found = [check(profile, *one) for one in wanted]
    if arm in PROMOTING:
        assert found[0]["engine"]["promotions"] > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arm", LATS_ARMS)
def test_nothing_is_lost_of_parallel_programs(small_profile, arm: str, seed: int):
    """The same for a tree search, whose calls come five at a time."""
    check(small_profile, "lats", arm, seed)


@pytest.mark.parametrize("arm", ["fcfs", "plas", "adaptive"])
def test_nothing_is_lost_of_long_chats(small_profile, arm: str):
    """The same where calls grow long; the other arms are among the heavy tests."""
    check_long_chats(replace(small_profile, batches_in_flight=1), arm, SEEDS[0])


@pytest.mark.heavy
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", MANY_SEEDS)
def test_nothing_is_lost_on_more_seeds(small_profile, arm: str, seed: int):
    """Five seeds of each trace, short programs and long, with one batch in flight and two."""
    for depth in (1, 2):
        profile = replace(small_profile, batches_in_flight=depth)
        for name in PROGRAMS:
            check(profile, name, arm, seed)
        check_long_chats(profile, arm, seed)


def test_the_pins_of_continuum_end(small_profile):
    """At the end no block is pinned: all but vLLM's null block are free."""
    cell = Cell(
        trace="bfcl-gt", arm="continuum", profile=small_profile, rate_per_s=1.0, programs=8
    )  # fmt: skip
    outcome, simulation, _ = simulate_cell(cell, trace.load("bfcl-gt"))
    assert outcome.unfinished == 0
    pool = simulation.engines[0].seat.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == small_profile.blocks - 1


# ── a checker that never fails proves nothing: each rule is broken once ────────────────────────


def lose(simulation, engine) -> None:
    """A running call is in no queue any more."""
    engine.seat.scheduler.running.pop()


def lose_outright(simulation, engine) -> None:
    """The scheduler knows nothing of a call that the engine has taken."""
    scheduler = engine.seat.scheduler
    del scheduler.requests[scheduler.running.pop().request_id]


def lose_at_the_door(simulation, engine) -> None:
    """The door forgets the calls of a program."""
    held = engine.seat._held
    del held[next(iter(held))]


def double(simulation, engine) -> None:
    """A call runs twice."""
    running = engine.seat.scheduler.running
    running.append(running[0])


def double_at_the_door(simulation, engine) -> None:
    """A call that runs stands at the door as well."""
    request_id = engine.seat.scheduler.running[0].request_id
    engine.seat._held[-1] = [engine.runs[request_id]]


def outlive(simulation, engine) -> None:
    """A call is over and still in the scheduler."""
    del engine.runs[engine.seat.scheduler.running[0].request_id]


def leak(simulation, engine) -> None:
    """A block belongs to nobody."""
    engine.seat.scheduler.kv_cache_manager.block_pool.get_new_blocks(1)


def miscount(simulation, engine) -> None:
    """A block is held more often than it is counted."""
    scheduler = engine.seat.scheduler
    manager = scheduler.kv_cache_manager
    block_id = manager.get_block_ids(scheduler.running[0].request_id)[0][0]
    manager.block_pool.blocks[block_id].ref_cnt += 1


def forget_an_end(simulation, engine) -> None:
    """A program is created that is neither live nor over."""
    simulation.created += 1


def say_too_much(simulation, engine) -> None:
    """A call has one token more than it generates."""
    request = engine.seat.scheduler.running[0]
    output_tokens = engine.runs[request.request_id].call.output_tokens
    request.append_output_token_ids([7] * (output_tokens + 1 - request.num_output_tokens))


BREAKS: dict[str, tuple[str, Callable[[Any, Any], None], str]] = {
    "lost": ("fcfs", lose, "calls lost or left over"),
    "lost outright": ("fcfs", lose_outright, "calls that nobody has"),
    "lost at the door": ("admit", lose_at_the_door, "calls that nobody has"),
    "doubled": ("fcfs", double, "a call stands twice"),
    "doubled at the door": ("admit", double_at_the_door, "in the engine and at the door"),
    "over and there": ("fcfs", outlive, "a call that is over is still there"),
    "leaked block": ("fcfs", leak, "free .* held .* null is not"),
    "miscounted block": ("fcfs", miscount, "is held 1 times, counted 2"),
    "created, not live": ("fcfs", forget_an_end, "programs created"),
    "too many tokens": ("fcfs", say_too_much, "has too many tokens"),
}


class Saboteur(InvariantChecker):
    """Breaks something once, when there is something to break, and then looks."""

    def __init__(self, broken: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._broken = broken
        self.done_at: int | None = None

    def after_step(self, simulation, engine, now_s):
        seat = engine.seat
        ready = self.steps >= 50 and len(seat.scheduler.running) > 0
        if self.done_at is None and ready and getattr(seat, "_held", True):
            self._broken(simulation, engine)
            self.done_at = self.steps
        super().after_step(simulation, engine, now_s)


@pytest.mark.parametrize("name", BREAKS)
def test_the_checker_sees_what_is_broken(small_profile, name: str):
    """At the very step, and by the rule that it breaks."""
    arm, broken, message = BREAKS[name]
    saboteur = Saboteur(broken)
    cell = Cell(trace="bfcl-gt", arm=arm, profile=small_profile, rate_per_s=1.0, programs=8)
    with pytest.raises(BrokenInvariantError, match=message):
        run_cell(cell, trace.load("bfcl-gt"), watcher=saboteur)
    assert saboteur.done_at is not None
    assert saboteur.steps == saboteur.done_at + 1


def test_the_checker_sees_time_go_back(small_profile):
    class Yesterday(InvariantChecker):
        def after_step(self, simulation, engine, now_s):
            super().after_step(simulation, engine, now_s - (5.0 if self.steps == 50 else 0.0))

    checker = Yesterday()
    cell = Cell(trace="bfcl-gt", arm="fcfs", profile=small_profile, rate_per_s=1.0, programs=8)
    with pytest.raises(BrokenInvariantError, match="time went back"):
        run_cell(cell, trace.load("bfcl-gt"), watcher=checker)
    assert checker.steps == 51


@pytest.mark.parametrize("policy", ["mlfq", "plas", "atlas"])
def test_the_checker_sees_an_early_promotion(small_profile, monkeypatch, policy: str):
    """A clock that is half a second fast promotes before β is reached."""
    due = PromotionClock.due
    monkeypatch.setattr(PromotionClock, "due", lambda clock, now_s: due(clock, now_s + 0.5))
    cell = Cell(
        trace="bfcl-gt", arm=f"{policy}:beta=0.5", profile=small_profile, rate_per_s=1.0, programs=8
    )  # fmt: skip
    with pytest.raises(BrokenInvariantError, match="promoted before its time"):
        run_cell(cell, trace.load("bfcl-gt"), watcher=InvariantChecker())

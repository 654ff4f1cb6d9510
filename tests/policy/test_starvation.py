"""What β guarantees, by random search: see docs/scheduler.md for the statement and its proof."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from autellix.server.policy.base import Arrival
from autellix.server.policy.config import PolicyConfig
from autellix.server.policy.leveled import make_policy

from .toy import Toy, ToyCall

STEP_S = 0.5


def ratio(toy: ToyCall, config: PolicyConfig, now_s: float) -> float:
    """Return (W_program + W_call) ÷ (T_program + T_call), straight from the definition."""
    call, program = toy.call, toy.call.program
    waited = call.total_wait_s(now_s) - call.wait_at_reset_s
    served = call.service_s - call.service_at_reset_s + config.first_step_s
    if config.policy == "plas":
        waited, served = waited + program.wait_sum_s, served + program.sum_s
    elif config.policy == "atlas":
        waited, served = waited + program.wait_path_s, served + program.path_s
    return waited / served


class Watch:
    """Checks the statement in every step of a toy run."""

    def __init__(self, config: PolicyConfig, slots: int) -> None:
        self.config = config
        self.slots = slots
        self.promoted: dict[str, tuple[int, int, set[str]]] = {}  # bound, waited, may overtake
        self.promotions = 0

    def __call__(self, toy: Toy, inside: list[ToyCall]) -> None:
        now_s = toy.now * STEP_S
        for call in inside:
            is_waiting = call.call.waiting_since_s is not None
            if is_waiting and call.call.level > 1 and self.config.beta is not None:
                assert ratio(call, self.config, now_s) < self.config.beta + 1e-9
        for call in toy.promoted:
            self.promotions += 1
            assert call.call.key[:2] == (1, now_s)
            ahead = [c for c in inside if c.call.key < call.call.key]
            assert all(c.call.level == 1 for c in ahead)
            work = sum(math.ceil(c.call.quantum_left_s / STEP_S - 1e-9) for c in ahead)
            names = {c.program if self.by_program else c.name for c in ahead}
            if self.by_program:
                names |= {c.program for c in toy.calls if self.known(c, toy)}
            self.promoted[call.name] = (work // self.slots, 0, names)
        for call in inside:
            if call.name in self.promoted and call.call.promoted:
                self.look_at(call, inside)
            else:
                self.promoted.pop(call.name, None)

    @property
    def by_program(self) -> bool:
        return self.config.order == "program" and self.config.policy != "mlfq"

    def known(self, call: ToyCall, toy: Toy) -> bool:
        """Return whether the program of a call has arrived."""
        return any(c.begun is not None for c in toy.calls if c.program == call.program)

    def look_at(self, call: ToyCall, inside: list[ToyCall]) -> None:
        """A promoted call: who is ahead of it, and has it waited too long?"""
        bound, waited, names = self.promoted[call.name]
        ahead = [c for c in inside if c.call.key < call.call.key]
        assert {c.program if self.by_program else c.name for c in ahead} <= names
        if len(ahead) >= self.slots:
            waited += 1
            self.promoted[call.name] = (bound, waited, names)
            if not self.by_program:
                assert waited <= bound, f"{call.name} waits {waited} steps, more than {bound}"


def workload(rng: random.Random) -> tuple[PolicyConfig, list[ToyCall], int]:
    """Return random settings, calls and slots."""
    bounds = sorted(rng.sample(range(1, 25), rng.randint(1, 5)))
    config = PolicyConfig(
        policy=rng.choice(["mlfq", "plas", "atlas"]),
        level_bounds_s=tuple(bound * STEP_S for bound in bounds),
        beta=rng.choice([0.5, 1.0, 2.0, 4.0]),
        order=rng.choice(["program", "call"]),
        first_step_s=rng.choice([0.05, STEP_S]),
    )
    calls: list[ToyCall] = []
    for number in range(rng.randint(2, 6)):
        program, at = f"p{number}", rng.randint(0, 12)
        earlier: list[str] = []
        for index in range(rng.randint(1, 4)):
            parents = tuple(rng.sample(earlier, min(len(earlier), rng.randint(0, 2))))
            name = f"{program}-{index}"
            calls.append(ToyCall(name, program, rng.randint(1, 14), parents, rng.randint(0, 4), at))
            earlier.append(name)
    return config, calls, rng.randint(1, 3)


def search(seeds: range) -> int:
    """Play one workload for each seed; return the promotions seen."""
    promotions = 0
    for seed in seeds:
        config, calls, slots = workload(random.Random(seed))
        watch = Watch(config, slots)
        Toy(config, calls, slots=slots, step_s=STEP_S, look=watch).run()
        promotions += watch.promotions
    return promotions


def test_beta_bounds_the_wait_in_random_workloads():
    """No waiting call passes β; a promoted one is overtaken only by what was ahead of it."""
    assert search(range(1_500)) > 1_000


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_beta_bounds_the_wait_in_very_many_random_workloads(part: int):
    """The same over 100,000 workloads."""
    assert search(range(part * 10_000, (part + 1) * 10_000)) > 10_000


def policy_of(**changes):
    config = PolicyConfig(
        policy="plas", level_bounds_s=(1.0, 2.0), beta=3.0, first_step_s=1.0, order="call"
    )
    return make_policy(dataclasses.replace(config, **changes))


def test_a_call_is_promoted_at_the_moment_it_is_due():
    """W ÷ T = 3: with one first step and two seconds of service the program may wait nine."""
    policy = policy_of()
    call = policy.arrive(Arrival("c", "p", service_s=2.0), 0.0)
    assert call.level == 3
    assert policy.promote(8.99) == []
    assert policy.promote(9.0) == [call]
    assert (call.level, call.promoted, call.quantum_left_s) == (1, True, 1.0)
    policy.run(call, 9.0)
    policy.charge([call], 1.0)
    assert (call.level, call.promoted) == (3, False)


def test_only_the_calls_counters_are_reset():
    """The program's wait and service stay, so its threads are promoted together."""
    policy = policy_of()
    calls = [policy.arrive(Arrival(f"c{i}", "p", service_s=2.0), 0.0) for i in range(3)]
    assert policy.promote(9.0) == calls
    policy.run(calls[0], 9.0)
    policy.leave(calls[0], 9.5)
    program = policy.ledger.get("p")
    assert (program.sum_s, program.wait_sum_s) == (2.0, 9.0)


def test_a_sibling_that_ends_moves_the_due_time():
    """More wait in the program: due sooner. More service: due later."""
    policy = policy_of()
    first = policy.arrive(Arrival("c1", "p", service_s=2.0), 0.0)
    second = policy.arrive(Arrival("c2", "p", service_s=2.0), 0.0)
    policy.run(first, 4.0)
    policy.charge([first], 1.0)
    policy.leave(first, 5.0)
    # β · (1 + 3) - 4 = 8
    assert policy.promote(7.99) == []
    assert policy.promote(8.0) == [second]


def test_without_beta_nobody_is_promoted():
    """``null`` turns it off."""
    policy = policy_of(beta=None)
    policy.arrive(Arrival("c", "p", service_s=2.0), 0.0)
    assert policy.promote(1e9) == []

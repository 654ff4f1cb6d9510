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


@dataclasses.dataclass
class Promoted:
    """A promoted call under watch.

    Attributes:
        steps: Call-steps that may go before it: what the calls ahead of it had left of level 1.
        overtakes: Calls, or with order by program the programs, that may be ahead of it.
        rooms: Steps of service that each program lacks to the end of level 1.
        behind: Steps in which enough calls to take all places were ahead of it.
        is_behind: Whether that was so in the last step.
        waited: Steps in which it did not run.
        newcomers: Calls of each program that came after the promotion and went ahead.
        widths: The most newcomers of each program that were in the engine at once.
    """

    steps: int
    overtakes: set[str]
    rooms: dict[str, int] = dataclasses.field(default_factory=dict)
    behind: int = 0
    is_behind: bool = False
    waited: int = 0
    newcomers: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    widths: dict[str, int] = dataclasses.field(default_factory=dict)


class Watch:
    """Checks the statement in every step of a toy run."""

    def __init__(self, config: PolicyConfig, slots: int) -> None:
        self.config = config
        self.slots = slots
        self.promoted: dict[str, Promoted] = {}
        self.promotions = 0
        self.overtaken = 0  # steps that promoted calls waited beyond the work of those ahead

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
            names = {c.program if self.by_program else c.name for c in ahead}
            if self.by_program:
                names |= {c.program for c in toy.calls if self.known(c, toy)}
            work = sum(in_steps(c.call.quantum_left_s) for c in ahead)
            self.promoted[call.name] = Promoted(work, names, self.rooms(toy))
        for call in inside:
            watched = self.promoted.get(call.name)
            if watched is not None and call.call.promoted:
                self.look_at(call, watched, inside, is_new=call in toy.promoted)
            else:
                self.promoted.pop(call.name, None)

    @property
    def by_program(self) -> bool:
        return self.config.order == "program" and self.config.policy != "mlfq"

    def known(self, call: ToyCall, toy: Toy) -> bool:
        """Return whether the program of a call has arrived."""
        return any(c.begun is not None for c in toy.calls if c.program == call.program)

    def rooms(self, toy: Toy) -> dict[str, int]:
        """Return, for each program that has arrived, what it lacks to the end of level 1."""
        rooms = {}
        for name in {c.program for c in toy.calls if self.known(c, toy)}:
            program = toy.policy.ledger.get(name)
            used_s = program.path_s if self.config.policy == "atlas" else program.sum_s
            rooms[name] = max(0, in_steps(self.config.level_bounds_s[0] - used_s))
        return rooms

    def look_at(
        self, call: ToyCall, watched: Promoted, inside: list[ToyCall], *, is_new: bool
    ) -> None:
        """A promoted call: who is ahead of it, and has it waited too long?"""
        ahead = [c for c in inside if c.call.key < call.call.key]
        assert {c.program if self.by_program else c.name for c in ahead} <= watched.overtakes
        if not is_new:
            self.note_newcomers(call, watched, ahead, inside)
            if call.call.waiting_since_s is not None:
                assert watched.is_behind, f"{call.name} waits, and a place was free for it"
                watched.waited += 1
        watched.is_behind = len(ahead) >= self.slots
        if watched.is_behind:
            watched.behind += 1
            if not self.by_program:
                bound = watched.steps // self.slots
                assert watched.behind <= bound, f"{call.name} waits more than {bound} steps"
        bound = self.bound(watched)
        assert watched.waited <= bound, f"{call.name} waits {watched.waited} steps, not {bound}"
        self.overtaken += watched.waited > watched.steps // self.slots

    def note_newcomers(
        self, call: ToyCall, watched: Promoted, ahead: list[ToyCall], inside: list[ToyCall]
    ) -> None:
        """Keep the most newcomers of each program at once: calls that went ahead of this one."""
        for one in ahead:
            if one.call.arrival_s > call.call.order_s:
                watched.newcomers.setdefault(one.program, set()).add(one.name)
        for name, calls in watched.newcomers.items():
            here = sum(one.name in calls for one in inside)
            watched.widths[name] = max(watched.widths.get(name, 0), here)

    def bound(self, watched: Promoted) -> int:
        """Return (2) or (3) of the statement, with the programs' widths seen so far."""
        quantum = in_steps(toy_quantum_s(self.config))
        steps = watched.steps
        for name, width in watched.widths.items():
            room = watched.rooms[name]
            steps += (room * width if self.config.policy == "atlas" else room) + width * quantum
        return steps // self.slots


def in_steps(seconds: float) -> int:
    """Return the steps in which this much service is used up."""
    return math.ceil(seconds / STEP_S - 1e-9)


def toy_quantum_s(config: PolicyConfig) -> float:
    return config.level_bounds_s[0] if config.quanta_s is None else config.quanta_s[0]


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


def search(seeds: range) -> tuple[int, int]:
    """Play one workload for each seed; return the promotions and the steps of overtaking seen."""
    promotions = overtaken = 0
    for seed in seeds:
        config, calls, slots = workload(random.Random(seed))
        watch = Watch(config, slots)
        Toy(config, calls, slots=slots, step_s=STEP_S, look=watch).run()
        promotions += watch.promotions
        overtaken += watch.overtaken
    return promotions, overtaken


def test_beta_bounds_the_wait_in_random_workloads():
    """No waiting call passes β; a promoted one waits for what the statement names and no more."""
    promotions, overtaken = search(range(1_500))
    assert promotions > 1_000
    assert overtaken > 10, "no newcomer kept anybody waiting: (3) was not tried"


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(10))
def test_beta_bounds_the_wait_in_very_many_random_workloads(part: int):
    """The same over 100,000 workloads."""
    promotions, overtaken = search(range(part * 10_000, (part + 1) * 10_000))
    assert promotions > 10_000
    assert overtaken > 100


def delay_by(policy: str, lanes: list[list[int]]) -> int:
    """Return the steps that newcomers of an older program keep a promoted call waiting.

    A program takes one step, then three others fill the only place, and one that had fallen to
    level 2 waits behind them until it is promoted. Then the first one is back with calls in lanes,
    each lane one call after the other.
    """
    config = PolicyConfig(
        policy=policy, level_bounds_s=(8 * STEP_S,), beta=1.0, first_step_s=STEP_S, order="program"
    )
    ends = []
    for back in (lanes, []):
        calls = [ToyCall("old-first", "old", 1), ToyCall("late-0", "late", 12, at=1)]
        calls += [ToyCall(f"full-{n}-0", f"full-{n}", 8, at=10) for n in range(3)]
        for lane, lengths in enumerate(back):
            before: tuple[str, ...] = ()
            for n, steps in enumerate(lengths):
                calls.append(ToyCall(f"old-{lane}-{n}", "old", steps, before, at=30))
                before = (f"old-{lane}-{n}",)
        watch = Watch(config, slots=1)
        Toy(config, calls, step_s=STEP_S, look=watch).run()
        assert watch.promotions
        ends.append(next(c for c in calls if c.name == "late-0").ended)
    return ends[0] - ends[1]


@pytest.mark.parametrize("width", [1, 4, 40])
@pytest.mark.parametrize("policy", ["plas", "atlas"])
def test_no_bound_holds_without_the_width_of_older_programs(policy: str, width: int):
    """A fan-out of an older program is ahead as a whole, each of its calls for a quantum."""
    assert delay_by(policy, [[20]] * width) == width * 8


@pytest.mark.parametrize(
    ("policy", "width", "delay"),
    # One step of level 1 was used before, so six calls of one step leave the next in level 1.
    [("plas", 1, 6 + 8), ("atlas", 1, 6 + 8), ("atlas", 3, 3 * (6 + 8))],
)
def test_small_calls_of_an_older_program_overtake_until_it_has_left_level_1(policy, width, delay):
    """One after the other they add up to the end of level 1; on paths, in each lane for itself."""
    assert delay_by(policy, [[1] * 6 + [20]] * width) == delay


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

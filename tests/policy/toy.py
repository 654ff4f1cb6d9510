"""An engine of slots and equal steps, for policies alone: no vLLM, no memory, no prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autellix.server.policy.base import Arrival
from autellix.server.policy.call import Call
from autellix.server.policy.config import PolicyConfig
from autellix.server.policy.leveled import make_policy


@dataclass
class ToyCall:
    """A call of a program: it comes when its parents have ended, after a pause."""

    name: str
    program: str
    steps: int
    parents: tuple[str, ...] = ()
    pause: int = 0
    at: int = 0  # of a call without parents
    begun: int | None = None
    ended: int | None = None
    left: int = 0
    call: Call | None = None


@dataclass
class Toy:
    """Runs calls under a policy, the best ``slots`` of them in each step.

    Attributes:
        look: Called before each step, with the calls in the engine, best first.
    """

    config: PolicyConfig
    calls: list[ToyCall]
    slots: int = 1
    step_s: float = 1.0
    look: Callable[[Toy, list[ToyCall]], None] | None = None
    preempt: bool = True
    now: int = 0
    inside: list[ToyCall] = field(default_factory=list)
    promoted: list[ToyCall] = field(default_factory=list)

    def run(self, steps_max: int = 10_000) -> Toy:
        """Run to the end."""
        policy = self.policy = make_policy(self.config)
        done: dict[str, int] = {}
        todo = list(self.calls)
        running: list[ToyCall] = []
        while todo or self.inside:
            assert self.now < steps_max, "it does not come to an end"
            now_s = self.now * self.step_s
            for toy in [t for t in todo if self._due(t, done)]:
                todo.remove(toy)
                toy.begun, toy.left = self.now, toy.steps
                toy.call = policy.arrive(Arrival(toy.name, toy.program), now_s)
                self.inside.append(toy)
            by_call = {toy.call: toy for toy in self.inside}
            self.promoted = [by_call[call] for call in policy.promote(now_s)]
            self.inside.sort(key=lambda toy: toy.call.key)
            if self.look is not None:
                self.look(self, self.inside)
            running = self._choose(running)
            for toy in self.inside:
                if toy in running:
                    if toy.call.waiting_since_s is not None:
                        policy.run(toy.call, now_s)
                elif toy.call.waiting_since_s is None:
                    policy.wait(toy.call, now_s)
            self.now += 1
            policy.charge([toy.call for toy in running], self.step_s)
            for toy in list(running):
                toy.left -= 1
                if toy.left == 0:
                    running.remove(toy)
                    self.inside.remove(toy)
                    toy.ended = done[toy.name] = self.now
                    policy.leave(toy.call, self.now * self.step_s)
        return self

    def waited(self) -> int:
        """Return the steps that calls waited, all together."""
        return sum(toy.ended - toy.begun - toy.steps for toy in self.calls)

    def _due(self, toy: ToyCall, done: dict[str, int]) -> bool:
        if not toy.parents:
            return toy.at <= self.now
        if any(parent not in done for parent in toy.parents):
            return False
        return max(done[parent] for parent in toy.parents) + toy.pause <= self.now

    def _choose(self, running: list[ToyCall]) -> list[ToyCall]:
        """Preempt for higher levels only, never inside a level, as the scheduler does."""
        chosen = list(running)
        waiting = [toy for toy in self.inside if toy not in chosen]
        for toy in waiting:
            if len(chosen) < self.slots:
                chosen.append(toy)
                continue
            worst = max(chosen, key=lambda other: other.call.key)
            if worst.call.level > toy.call.level:
                chosen[chosen.index(worst)] = toy
        return chosen


def chain(program: str, lengths: list[int], *, at: int = 0, pause: int = 0) -> list[ToyCall]:
    """Return the calls of a program that makes one after the other."""
    calls: list[ToyCall] = []
    for number, steps in enumerate(lengths):
        parents = (calls[-1].name,) if calls else ()
        calls.append(ToyCall(f"{program}{number}", program, steps, parents, pause, at))
    return calls

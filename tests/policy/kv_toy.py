"""An engine of KV tokens and equal steps, for the adaptive policy alone: no vLLM.

Every call takes so many steps and holds its prompt; what is inside runs. It fails if more is
running than the engine holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autellix.server.policy.adaptive import INSIDE, AdaptivePolicy, Room
from autellix.server.policy.base import Arrival
from autellix.server.policy.call import Call
from autellix.server.policy.config import PolicyConfig

BLOCK = 10


@dataclass
class ToyProgram:
    """Calls one after the other, each so many steps, with pauses between them."""

    name: str
    at: int
    steps: list[int]
    tokens: int = 100
    pause: int = 0
    weight: float = 1.0
    deadline: float | None = None
    done: int = 0
    next_at: int = 0
    ended: int | None = None


@dataclass
class KvToy:
    """Runs programs under the adaptive policy.

    Attributes:
        running: Calls that run, with the steps that they have left.
        waiting: Calls that do not run.
        entered: Names of the programs whose calls began to run, in that order.
    """

    programs: list[ToyProgram]
    kv_tokens: int = 1000
    config: PolicyConfig = field(default_factory=lambda: PolicyConfig(policy="adaptive"))
    now: int = 0
    running: dict[str, tuple[Call, int]] = field(default_factory=dict)
    waiting: dict[str, Call] = field(default_factory=dict)
    entered: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = AdaptivePolicy(self.config, Room(self.kv_tokens, BLOCK, 64))
        self._by_name = {program.name: program for program in self.programs}
        for program in self.programs:
            program.next_at = program.at

    def run(self, steps_max: int = 20_000) -> KvToy:
        """Run to the end."""
        while any(program.ended is None for program in self.programs):
            assert self.now < steps_max, "it does not come to an end"
            self.step()
        assert abs(self.policy.running_set.taken_tokens) < 1e-6, (
            self.policy.running_set.taken_tokens
        )
        assert not self.policy.running_set.seated
        assert self.policy.running_set.active == 0
        assert abs(self.policy.running_set.door_tokens) < 1e-6
        return self

    def step(self) -> None:
        """One step: arrivals, who may enter, one step of each running call."""
        for program in self.programs:
            if program.next_at == self.now and program.ended is None:
                self._come(program)
        self.policy.promote(float(self.now))
        for name, call in list(self.waiting.items()):
            if call.level == INSIDE:
                del self.waiting[name]
                self.policy.run(call, float(self.now))
                self.running[name] = (call, self._by_name[name].steps[self._by_name[name].done])
                self.entered.append(name)
        self.check()
        calls = [call for call, _ in self.running.values()]
        self.now += 1
        self.policy.charge(calls, 1.0)
        self.policy.charge_work([(call, 1, call.prompt_tokens) for call in calls], 1.0)
        for name, (call, left) in list(self.running.items()):
            self.running[name] = (call, left - 1)
            if left == 1:
                self._finish(name, call)

    def check(self) -> None:
        """What must hold at any time."""
        rooms = self.policy.running_set
        inside = [m for m in rooms.seated if m.calls]
        assert rooms.active == len(inside)
        assert abs(rooms.taken_tokens - sum(m.taken_tokens for m in rooms.seated)) < 1e-6
        if len(inside) > 1:
            assert rooms.taken_tokens - rooms.coming_tokens <= rooms.most_tokens + 1e-6
        assert not self.waiting or self.running, "calls wait and none runs"

    def _come(self, program: ToyProgram) -> None:
        hashes = [f"{program.name}/{n}" for n in range(program.tokens // BLOCK)]
        arrival = Arrival(
            f"{program.name}-{program.done}",
            program.name,
            prompt_tokens=program.tokens,
            hashes=hashes,
            weight=program.weight,
            deadline_s=program.deadline,
        )
        self.waiting[program.name] = self.policy.arrive(arrival, float(self.now))

    def _finish(self, name: str, call: Call) -> None:
        del self.running[name]
        program = self._by_name[name]
        self.policy.leave(call, float(self.now))
        program.done += 1
        if program.done == len(program.steps):
            program.ended = self.now
            self.policy.forget((name,))
        else:
            program.next_at = self.now + program.pause

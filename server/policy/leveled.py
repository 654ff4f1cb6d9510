"""The policies: FCFS, MLFQ, PLAS and ATLAS are one machine of levels with other entrances.

================  =====================================  ==========================
policy            a call enters at the level of          β counts wait and service of
================  =====================================  ==========================
fcfs              (one level)                            nothing
mlfq              level 1, always                        the call
plas              the sum of its program's service       program (sums) and call
atlas             its program's longest path of service  program (paths) and call
================  =====================================  ==========================

Inside a level the order is first come, first served, by arrival of the program or of the call. A
call that uses up its quantum drops one level. A promoted call queues in level 1 as if it had
arrived at its promotion; when its quantum there is used up it returns to its own level, where the
paper would let it climb down step by step (source: the paper's Alg. 1; the difference gives one
quantum of boost for each promotion, not one for each level).

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from .adaptive import AdaptivePolicy, Room
from .base import Arrival, Displaced, Policy
from .call import Call
from .config import PolicyConfig
from .queues import Levels
from .service import Ledger, Program, fold
from .starvation import PromotionClock

_Figure = Callable[[Program], float]

_SERVICE: Final[dict[str, _Figure]] = {
    "fcfs": lambda program: program.sum_s,
    "mlfq": lambda program: 0.0,  # noqa: ARG005 - a call knows no program
    "plas": lambda program: program.sum_s,
    "atlas": lambda program: program.path_s,
}
_WAIT: Final[dict[str, _Figure]] = {
    "fcfs": lambda program: program.wait_sum_s,
    "mlfq": lambda program: 0.0,  # noqa: ARG005
    "plas": lambda program: program.wait_sum_s,
    "atlas": lambda program: program.wait_path_s,
}


class LeveledPolicy:
    """See the module. Make one with :func:`make_policy`."""

    by_work = False

    def __init__(self, config: PolicyConfig, ledger: Ledger | None = None) -> None:
        self.config = config
        self.ledger = ledger if ledger is not None else Ledger(config.programs_max)
        self._levels = (
            Levels(config.level_bounds_s, config.quanta_s)
            if config.policy != "fcfs"
            else Levels(())
        )
        self._last = len(self._levels)
        self._by_program = config.order == "program" and config.policy not in ("fcfs", "mlfq")
        self._service_of = _SERVICE[config.policy]
        self._wait_of = _WAIT[config.policy]
        self._clock = (
            PromotionClock(config.beta, config.first_step_s, self._service_of, self._wait_of)
            if config.beta is not None and self._last > 1
            else None
        )
        self._numbers = 0

    def arrive(self, arrival: Arrival, now_s: float) -> Call:
        """Return the call, in its level, waiting."""
        first_s = now_s if arrival.program_arrival_s is None else arrival.program_arrival_s
        program = self.ledger.join(arrival.program_id or arrival.call_id, min(first_s, now_s))
        self._raise(program, arrival)
        self._numbers += 1
        call = Call(arrival.call_id, program, self._numbers, now_s)
        call.prompt_tokens = arrival.prompt_tokens
        call.hashes = arrival.hashes
        call.service_before_s = program.path_s
        call.wait_before_s = program.wait_path_s
        self.enter(call)
        return call

    def enter(self, call: Call) -> None:
        """Put a call into its level as if it had just come; also after a change of policy."""
        call.armed = 0
        level = self._levels.level_of(self._service_of(call.program) + call.service_s)
        call.home_level = level
        call.promoted = False
        call.quantum_left_s = self._levels.quantum_s(level)
        call.place(level, self._order_s(call))
        if call.waiting_since_s is not None:
            self._watch(call)

    def charge(self, calls: Iterable[Call], seconds: float) -> bool:
        """Charge each of these calls; return whether one has changed its level."""
        changed = False
        for call in calls:
            call.service_s += seconds
            call.quantum_left_s -= seconds
            if call.quantum_left_s <= 0:
                self._demote(call)
                changed = True
            if call.waiting_since_s is not None:
                self._watch(call)  # a late output of a call that was taken out: due later
        return changed

    def charge_work(self, parts: Sequence[tuple[Call, int, int]], seconds: float) -> bool:  # noqa: ARG002
        """Do nothing: levels know service only."""
        return False

    def forget(self, program_ids: Iterable[str]) -> None:
        """Forget programs that are over."""
        self.ledger.forget(program_ids)

    def note_tool(self, program_id: str, tool: str | None, now_s: float) -> None:
        """Do nothing: levels keep no KV for anybody."""

    def note_fetch(self, token_s: float) -> None:
        """Do nothing: levels keep no KV for anybody."""

    def displaced(self) -> list[Displaced]:
        """Return nothing: levels know no KV."""
        return []

    def evictable(self) -> list[Sequence[Hashable]]:
        """Return nothing: levels know no KV."""
        return []

    def run(self, call: Call, now_s: float) -> None:
        """The call begins to run."""
        if self._clock is not None:
            self._clock.disarm(call)
        call.stop_waiting(now_s)

    def wait(self, call: Call, now_s: float, *, for_slot: bool = False) -> None:  # noqa: ARG002
        """The call was taken out of the batch and waits."""
        call.start_waiting(now_s)
        self._watch(call)

    def promote(self, now_s: float) -> list[Call]:
        """Promote the waiting calls that are due; return them with their new keys."""
        if self._clock is None:
            return []
        calls = self._clock.due(now_s)
        for call in calls:
            call.home_level = call.level
            call.promoted = True
            call.quantum_left_s = self._levels.quantum_s(1)
            call.service_at_reset_s = call.service_s
            call.wait_at_reset_s = call.total_wait_s(now_s)
            call.place(1, now_s)
        return calls

    def leave(self, call: Call, now_s: float) -> None:
        """The call is over, however it ended; its service goes to its program."""
        if self._clock is not None:
            self._clock.disarm(call)
        call.stop_waiting(now_s)
        program = call.program
        fold(
            program,
            before_s=call.service_before_s,
            service_s=call.service_s,
            wait_before_s=call.wait_before_s,
            wait_s=call.wait_s,
        )
        self.ledger.leave(program, remember=program.program_id != call.call_id)
        if self._clock is not None:
            self._clock.program_changed(program)

    def _raise(self, program: Program, arrival: Arrival) -> None:
        """The gateway's figure counts if it is larger, in the measure that it says it is in.

        That is another one than the policy's for calls under way while the policy is changed.
        """
        by_path = arrival.by_path
        if by_path is None:
            by_path = self.config.policy == "atlas"
        if by_path:
            program.path_s = max(program.path_s, arrival.service_s)
            program.wait_path_s = max(program.wait_path_s, arrival.wait_s)
        else:
            program.sum_s = max(program.sum_s, arrival.service_s)
            program.wait_sum_s = max(program.wait_sum_s, arrival.wait_s)
        if self._clock is not None:
            self._clock.program_changed(program)

    def _order_s(self, call: Call) -> float:
        return call.program.arrival_s if self._by_program else call.arrival_s

    def _demote(self, call: Call) -> None:
        """Take it to where its next quantum is; a step may be longer than a quantum."""
        level = call.level
        while call.quantum_left_s <= 0 and level < self._last:
            level = max(level + 1, call.home_level) if call.promoted else level + 1
            call.promoted = False
            call.quantum_left_s += self._levels.quantum_s(level)
        call.home_level = level
        call.place(level, self._order_s(call))

    def _watch(self, call: Call) -> None:
        if self._clock is not None:
            self._clock.disarm(call)
            if call.level > 1:
                self._clock.arm(call)


def make_policy(
    config: PolicyConfig, ledger: Ledger | None = None, room: Room | None = None
) -> Policy:
    """Return a policy.

    Args:
        config: Which one.
        ledger: Carries the programs over from the policy before.
        room: What the engine has; ``adaptive`` needs it.
    """
    if config.policy == "adaptive":
        assert room is not None, "the adaptive policy needs to know the engine's room"
        return AdaptivePolicy(config, room, ledger)
    return LeveledPolicy(config, ledger)

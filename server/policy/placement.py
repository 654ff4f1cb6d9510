"""Which engine gets a call: what is known of calls and engines, and the plain rules.

A rule is told when its calls end and what they were measured to cost. It places calls only where it
is allowed to (`choose` gets the engines that take calls), and it keeps no count of calls: the
`balancer.Balancer` does, so that no rule can leak one. The simulator and the server run the same
objects.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

PROGRAMS_MAX: Final = 65_536  # of the programs a rule remembers, the ones used last


class CallFacts(NamedTuple):
    """A call that wants an engine."""

    call_id: str
    program_id: str
    prompt_tokens: int  # exact, or by the ratio learned for the model
    siblings: int = 0  # calls of its program in flight
    prefix: tuple[int, ...] = ()  # of its content, one chained hash per chunk; only if wanted


class EngineView(NamedTuple):
    """An engine that takes calls. What nobody knows is None."""

    engine_id: str
    calls: int  # in the engine: our own count, or the engine's if it is higher
    running: int | None = None
    waiting: int | None = None
    slots: int | None = None
    kv_tokens: int | None = None  # room of its KV cache
    pace_s: float | None = None  # seconds in steps per generated token, of late


class Usage(NamedTuple):
    """What an engine measured of a call that is over."""

    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    service_s: float


class Placement(Protocol):
    """A rule that places calls."""

    #: Whether `choose` wants ``CallFacts.prefix``, which costs time to make.
    wants_prefix: bool

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:
        """Return the engine for a call, one of ``engines``, of which there is at least one."""
        ...

    def ended(self, call: CallFacts, engine_id: str, now_s: float) -> None:
        """The call is over, however it went."""
        ...

    def measured(self, call: CallFacts, engine_id: str, usage: Usage, now_s: float) -> None:
        """The engine has said what the call took; before or after `ended`, or never."""
        ...

    def forget_program(self, program_id: str) -> None:
        """No call of it will come."""
        ...

    def forget_engine(self, engine_id: str) -> None:
        """The engine is gone, or has started anew and holds nothing."""
        ...


class Plain:
    """A rule that learns nothing: the hooks do nothing."""

    wants_prefix = False

    def ended(self, call: CallFacts, engine_id: str, now_s: float) -> None:
        """Do nothing."""

    def measured(self, call: CallFacts, engine_id: str, usage: Usage, now_s: float) -> None:
        """Do nothing."""

    def forget_program(self, program_id: str) -> None:
        """Do nothing."""

    def forget_engine(self, engine_id: str) -> None:
        """Do nothing."""


class RoundRobin(Plain):
    """One engine after the other, whatever the call."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:  # noqa: ARG002
        """Return the next engine."""
        self._turn += 1
        return engines[(self._turn - 1) % len(engines)].engine_id


class LeastLoaded(Plain):
    """The engine with the fewest calls; of several, each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:  # noqa: ARG002
        """Return the engine with the fewest calls."""
        self._turn += 1
        return least_loaded(engines, self._turn).engine_id


class ProgramHash(Plain):
    """The engine with the highest hash of program and engine: nothing to remember.

    When an engine goes, only its programs move, and each to a place of its own.
    """

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:  # noqa: ARG002
        """Return the program's engine."""
        return max(engines, key=lambda e: (_score(call.program_id, e.engine_id), e.engine_id))[0]


class Autellix(Plain):
    """The paper's rule: short calls to the least loaded engine, long ones to the program's.

    A program's engine is the least loaded one at its first long call, and stays it for as long as
    it takes calls.

    Args:
        threshold_tokens: A longer prompt is a long call.
        programs_max: How many programs' engines are remembered.
    """

    def __init__(self, *, threshold_tokens: int = 2048, programs_max: int = PROGRAMS_MAX) -> None:
        self._threshold = threshold_tokens
        self._programs_max = programs_max
        self._pins: OrderedDict[str, str] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        """Return how many programs it remembers."""
        return len(self._pins)

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:  # noqa: ARG002
        """Return the least loaded engine, or the program's."""
        self._turn += 1
        if call.prompt_tokens <= self._threshold:
            return least_loaded(engines, self._turn).engine_id
        pin = self._pins.get(call.program_id)
        if pin is None or all(engine.engine_id != pin for engine in engines):
            pin = self._pins[call.program_id] = least_loaded(engines, self._turn).engine_id
            if len(self._pins) > self._programs_max:
                self._pins.popitem(last=False)
        self._pins.move_to_end(call.program_id)
        return pin

    def forget_program(self, program_id: str) -> None:
        """Forget its engine."""
        self._pins.pop(program_id, None)


def least_loaded(engines: Sequence[EngineView], turn: int) -> EngineView:
    """Return the engine with the fewest calls; of several the next at or after ``turn``."""
    count = len(engines)
    best = engines[turn % count]
    for step in range(1, count):
        engine = engines[(turn + step) % count]
        if engine.calls < best.calls:
            best = engine
    return best


def _score(program_id: str, engine_id: str) -> bytes:
    return hashlib.blake2b(f"{program_id}\0{engine_id}".encode(), digest_size=8).digest()

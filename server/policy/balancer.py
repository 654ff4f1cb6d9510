"""The balancer: counts the calls on every engine, gathers what is known of each, asks the rule.

It is the one way to an engine for every endpoint. A call that is placed holds a ticket until it is
over; counts are the tickets there are. Engines say how many calls they have a few times a second:
in between, and where an engine says nothing, the own count rules. What the two differ by is the
*drift*; it is 0 when nothing is in flight.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..types import CallInfo
from .locality import Locality
from .placement import (
    Autellix,
    CallFacts,
    EngineView,
    LeastLoaded,
    Placement,
    ProgramHash,
    RoundRobin,
    Usage,
)
from .prefix_tree import PrefixTree
from .prompt_length import PromptLength

PLACEMENTS: Final[Mapping[str, Callable[..., Placement]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "program-hash": ProgramHash,
    "prefix-tree": PrefixTree,
    "autellix": Autellix,
    "locality": Locality,
}
ENDED_MAX: Final = 16_384  # calls that are over, whose report may still come
CHUNK_BYTES: Final = 512  # of a request's content, what one hash stands for
CHUNKS_MAX: Final = 512
#: An engine that says for so long that it has no call, while we count some and place none, is
#: believed: their tickets are taken back, and counted as leaks.
LEAK_AFTER_S: Final = 30.0
_PACE_KEEP: Final = 0.95  # of an engine's pace, per call


class Load(NamedTuple):
    """What an engine said of itself last."""

    running: int
    waiting: int
    own_calls: int  # our count at that moment


@dataclass(slots=True)
class _Engine:
    """What is known of an engine."""

    calls: int = 0
    placed: int = 0
    placed_s: float = 0.0
    load: Load | None = None
    idle_since_s: float | None = None  # by its own word
    slots: int | None = None
    kv_tokens: int | None = None
    service_s: float = 0.0  # of calls that are over; both sums fade
    output_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class _Ticket:
    """A call that is placed."""

    facts: CallFacts
    engine_id: str
    model: str | None
    size_bytes: int  # 0: its length was exact
    placed_s: float


@dataclass(slots=True)
class _Program:
    """The calls of one program in flight."""

    calls: int = 0
    is_over: bool = False


class UnknownPlacementError(ValueError):
    """There is no rule of that name, or it has no such setting."""


def build(name: str) -> Placement:
    """Return a fresh rule.

    Args:
        name: One of `PLACEMENTS`, or ``NAME:SETTING=NUMBER;...``, such as
            ``autellix:threshold_tokens=512``.

    Raises:
        UnknownPlacementError: there is none of that name, or it has no such setting.
    """
    kind, _, settings = name.partition(":")
    if kind not in PLACEMENTS:
        raise UnknownPlacementError(
            f"balancer: {kind!r} is not allowed; allowed is one of {', '.join(PLACEMENTS)}"
        )
    try:
        pairs = [part.split("=", 1) for part in settings.split(";") if part]
        numbers = {key: float(value) for key, value in pairs}
        return PLACEMENTS[kind](**{k: int(v) if v == int(v) else v for k, v in numbers.items()})
    except (TypeError, ValueError) as error:
        raise UnknownPlacementError(
            f"balancer: {name!r} is not allowed; allowed is {kind}:SETTING=NUMBER ({error})"
        ) from None


@dataclass(slots=True, eq=False)
class Balancer:
    """See the module.

    Args:
        placement: The rule; this object's alone.
    """

    placement: Placement
    lengths: PromptLength = field(default_factory=PromptLength)
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _tickets: dict[str, _Ticket] = field(default_factory=dict)
    _ended: OrderedDict[str, _Ticket] = field(default_factory=OrderedDict)
    _programs: dict[str, _Program] = field(default_factory=dict)
    leaks: int = 0

    def place(
        self,
        call: CallInfo,
        engine_ids: Sequence[str],
        now_s: float,
        *,
        prefix: tuple[int, ...] | None = None,
    ) -> str:
        """Return the engine for a call and hold a ticket for it.

        A call that is placed a second time leaves its first engine.

        Args:
            call: What is known of it.
            engine_ids: The engines that take calls, at least one.
            now_s: The time.
            prefix: Hashes of its content; None: made of ``call.content`` if the rule wants them.
        """
        if call.call_id in self._tickets:
            self.end(call.call_id, now_s)
        exact = call.prompt_tokens is not None
        if prefix is None:
            prefix = chunks(call.content) if self.placement.wants_prefix else ()
        program = self._programs.get(call.program_id)
        facts = CallFacts(
            call.call_id,
            call.program_id,
            call.prompt_tokens
            if call.prompt_tokens is not None
            else self.lengths.estimate(call.model, call.prompt_bytes),
            program.calls if program is not None else 0,
            prefix,
        )
        views = [self._view(engine_id) for engine_id in engine_ids]
        chosen = self.placement.choose(facts, views, now_s)
        size_bytes = 0 if exact else call.prompt_bytes
        self._open(_Ticket(facts, chosen, call.model, size_bytes, now_s))
        return chosen

    def end(self, call_id: str, now_s: float) -> None:
        """Take back a call's ticket; one that is not held is no harm."""
        ticket = self._tickets.pop(call_id, None)
        if ticket is None:
            return
        self._engines[ticket.engine_id].calls -= 1
        program_id = ticket.facts.program_id
        program = self._programs[program_id]
        program.calls -= 1
        self.placement.ended(ticket.facts, ticket.engine_id, now_s)
        if not program.calls:
            del self._programs[program_id]
            if program.is_over:
                self.placement.forget_program(program_id)
        self._ended[call_id] = ticket
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def measured(self, engine_id: str, call_id: str, usage: Usage, now_s: float) -> None:
        """Take in what an engine measured of a call, whichever of `end` and this comes first."""
        engine = self._engine(engine_id)
        if usage.output_tokens > 0:
            engine.service_s = engine.service_s * _PACE_KEEP + usage.service_s
            engine.output_tokens = engine.output_tokens * _PACE_KEEP + usage.output_tokens
        ticket = self._tickets.get(call_id) or self._ended.pop(call_id, None)
        if ticket is None or ticket.engine_id != engine_id:
            return
        if ticket.size_bytes:
            self.lengths.learn(ticket.model, ticket.size_bytes, usage.prompt_tokens)
        self.placement.measured(ticket.facts, engine_id, usage, now_s)

    def said(self, engine_id: str, *, running: int, waiting: int, now_s: float) -> None:
        """Take in what an engine says of itself."""
        engine = self._engine(engine_id)
        engine.load = Load(running, waiting, engine.calls)
        if running + waiting:
            engine.idle_since_s = None
        elif engine.idle_since_s is None:
            engine.idle_since_s = now_s
        elif engine.calls and now_s - max(engine.idle_since_s, engine.placed_s) > LEAK_AFTER_S:
            self._take_back(engine_id, now_s)

    def size_of(self, engine_id: str, *, slots: int, kv_tokens: int) -> None:
        """Take in how much an engine holds."""
        engine = self._engine(engine_id)
        engine.slots, engine.kv_tokens = slots, kv_tokens

    def forget_program(self, program_id: str) -> None:
        """The program is over; what it still has in flight ends as usual."""
        program = self._programs.get(program_id)
        if program is None:
            self.placement.forget_program(program_id)
        else:
            program.is_over = True

    def forget_engine(self, engine_id: str) -> None:
        """The engine is gone or has started anew; tickets of its calls stay until they end."""
        self.placement.forget_engine(engine_id)
        engine = self._engines.get(engine_id)
        if engine is None:
            return
        if engine.calls:
            fresh = _Engine(engine.calls, engine.placed, engine.placed_s)
            fresh.slots, fresh.kv_tokens = engine.slots, engine.kv_tokens
            self._engines[engine_id] = fresh
        else:
            del self._engines[engine_id]

    def calls(self) -> dict[str, int]:
        """Return the calls in flight by engine, engines without any left out."""
        return {name: engine.calls for name, engine in self._engines.items() if engine.calls}

    def drift(self) -> dict[str, int]:
        """Return by engine what it said last minus what we counted then; 0 when all is idle."""
        return {
            name: engine.load.running + engine.load.waiting - engine.load.own_calls
            for name, engine in self._engines.items()
            if engine.load is not None
        }

    def views(self) -> list[dict[str, Any]]:
        """Return what is known of every engine, for people and dashboards."""
        drift = self.drift()
        return [
            {
                **self._view(name)._asdict(),
                "placed": engine.placed,
                "drift": drift.get(name),
            }
            for name, engine in sorted(self._engines.items())
        ]

    def faults(self) -> list[str]:
        """Return what does not add up: nothing, unless this class has a bug."""
        counted: dict[str, int] = {}
        programs: dict[str, int] = {}
        for ticket in self._tickets.values():
            counted[ticket.engine_id] = counted.get(ticket.engine_id, 0) + 1
            name = ticket.facts.program_id
            programs[name] = programs.get(name, 0) + 1
        wrong = []
        if counted != self.calls():
            wrong.append(f"calls are {self.calls()}, the tickets say {counted}")
        if programs != {name: program.calls for name, program in self._programs.items()}:
            wrong.append("calls by program differ from the tickets")
        return wrong

    def _engine(self, engine_id: str) -> _Engine:
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = self._engines[engine_id] = _Engine()
        return engine

    def _take_back(self, engine_id: str, now_s: float) -> None:
        """End the tickets of calls that the engine has not had for long."""
        for call_id, ticket in list(self._tickets.items()):
            if ticket.engine_id == engine_id:
                self.leaks += 1
                self.end(call_id, now_s)

    def _open(self, ticket: _Ticket) -> None:
        self._tickets[ticket.facts.call_id] = ticket
        engine = self._engine(ticket.engine_id)
        engine.calls += 1
        engine.placed += 1
        engine.placed_s = ticket.placed_s
        program = self._programs.setdefault(ticket.facts.program_id, _Program())
        program.calls += 1

    def _view(self, engine_id: str) -> EngineView:
        engine = self._engine(engine_id)
        load = engine.load
        calls = engine.calls
        if load is not None:  # others may use the engine too
            calls = max(calls, load.running + load.waiting + engine.calls - load.own_calls)
        return EngineView(
            engine_id,
            calls,
            load.running if load is not None else None,
            load.waiting if load is not None else None,
            engine.slots,
            engine.kv_tokens,
            engine.service_s / engine.output_tokens if engine.output_tokens else None,
        )


def chunks(content: bytes) -> tuple[int, ...]:
    """Return a chained hash for each whole chunk of a request's content.

    Two requests that begin alike have the same first hashes.
    """
    found = []
    last = 0
    for at in range(0, min(len(content) // CHUNK_BYTES, CHUNKS_MAX) * CHUNK_BYTES, CHUNK_BYTES):
        last = zlib.crc32(content[at : at + CHUNK_BYTES], last)
        found.append(last)
    return tuple(found)

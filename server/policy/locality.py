"""Stay where the program's cache is until that engine is too full; then move the whole program.

What a call costs on an engine is the tokens that must be computed before it and for it: what is
missing of its prompt there, and what the calls in flight there still need, both weighed by how slow
the engine is. A program's next call costs least on the engine that holds its blocks, so it stays.

* A program with no other call in flight leaves only if its engine holds clearly more than its share
  of the load, or makes calls wait while another does not, and another is cheaper. Then it moves as
  a whole: its next calls follow.
* Of a program with several calls in flight a new one alone goes elsewhere when that is cheaper,
  if its engine is too full, or full of this program's own calls. The program has a second home from
  then on: so a wide program uses several engines.

How much of a program an engine still holds is estimated: what it was sent, until as many new tokens
have come after it as the engine's cache has room for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from .placement import PROGRAMS_MAX, CallFacts, EngineView, Usage

HOMES_MAX: Final = 16  # engines on which a program's blocks are known
_DECODE: Final = 2.0  # what a generated token costs, in tokens of a prompt
_KEEP: Final = 0.98  # of the mean output, per call


class _Held(NamedTuple):
    """What an engine holds of a program."""

    tokens: int
    written: int  # the engine's new tokens when it was used last


class _Program:
    """Where a program is."""

    __slots__ = ("held", "home", "moved_s")

    def __init__(self, home: str, now_s: float) -> None:
        self.home = home
        self.moved_s = now_s
        self.held: dict[str, _Held] = {}


class Locality:
    """See the module.

    Args:
        excess: An engine is too full with so much more than the mean load,
        slack_calls: … and so many calls besides (a quarter of its slots if that is less).
        gain: Leaving must make a program's only call cheaper by this share at least.
        rest_s: A program does not move again for so long.
        programs_max: How many programs are remembered.
    """

    wants_prefix = False

    def __init__(
        self,
        *,
        excess: float = 0.25,
        slack_calls: float = 8,
        gain: float = 0.2,
        rest_s: float = 5.0,
        programs_max: int = PROGRAMS_MAX,
    ) -> None:
        self._excess = excess
        self._slack = slack_calls
        self._gain = gain
        self._rest_s = rest_s
        self._programs_max = programs_max
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._written: dict[str, int] = {}
        self._work: dict[str, tuple[str, float]] = {}  # call in flight → engine, tokens to compute
        self._queued: dict[str, float] = {}  # engine → the sum of them
        self._output_tokens = 256.0
        self._turn = 0
        self.moves = 0
        self.spills = 0

    def __len__(self) -> int:
        """Return how many programs it remembers."""
        return len(self._programs)

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:
        """Return the engine that is to run a call."""
        self._turn += 1
        program = self._programs.get(call.program_id)
        if program is None:
            chosen = self._first(engines)
            program = self._programs[call.program_id] = _Program(chosen, now_s)
            if len(self._programs) > self._programs_max:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(call.program_id)
            chosen = self._choose_known(call, program, engines, now_s)
        self._send(call, program, next(e for e in engines if e.engine_id == chosen))
        return chosen

    def _first(self, engines: Sequence[EngineView]) -> str:
        """Return the engine with the least load; of several, each in turn."""
        at = self._turn % len(engines)
        weights = _weights(engines)
        best = min(
            range(len(engines)),
            key=lambda n: ((engines[n].calls + 1) * weights[n], (n - at) % len(engines)),
        )
        return engines[best].engine_id

    def ended(self, call: CallFacts, engine_id: str, now_s: float) -> None:  # noqa: ARG002
        """Take the call's work off its engine."""
        engine, tokens = self._work.pop(call.call_id, (engine_id, 0.0))
        left = self._queued.get(engine, 0.0) - tokens
        if left > 0.5:
            self._queued[engine] = left
        else:
            self._queued.pop(engine, None)

    def measured(self, call: CallFacts, engine_id: str, usage: Usage, now_s: float) -> None:  # noqa: ARG002
        """Learn what the engine holds of the program now, and how long answers are."""
        if usage.output_tokens > 0:
            self._output_tokens += (usage.output_tokens - self._output_tokens) * (1 - _KEEP)
        written = self._written.get(engine_id, 0) + usage.output_tokens
        self._written[engine_id] = written
        program = self._programs.get(call.program_id)
        if program is not None and engine_id in program.held:
            tokens = max(program.held[engine_id].tokens, usage.prompt_tokens + usage.output_tokens)
            program.held[engine_id] = _Held(tokens, written)

    def forget_program(self, program_id: str) -> None:
        """Forget where it is."""
        self._programs.pop(program_id, None)

    def forget_engine(self, engine_id: str) -> None:
        """It holds nothing."""
        self._written.pop(engine_id, None)
        for program in self._programs.values():
            program.held.pop(engine_id, None)

    def _choose_known(
        self, call: CallFacts, program: _Program, engines: Sequence[EngineView], now_s: float
    ) -> str:
        weights = _weights(engines)
        costs = [
            self._cost(call, program, engine) * weight
            for engine, weight in zip(engines, weights, strict=True)
        ]
        home = next((n for n, e in enumerate(engines) if e.engine_id == program.home), None)
        best = min(range(len(engines)), key=lambda n: (costs[n], engines[n].calls))
        if home is None:  # gone, or takes no calls
            return self._move(program, engines[best].engine_id, now_s)
        gain = 0.0 if call.siblings else self._gain
        if costs[best] >= (1 - gain) * costs[home]:
            return program.home
        full = self._too_full(
            engines, [(e.calls + 1) * w for e, w in zip(engines, weights, strict=True)]
        )
        if call.siblings:
            if not full[home] and 2 * call.siblings < engines[home].calls:
                return program.home  # it is others who fill it, and no more than elsewhere
            self.spills += 1
            return engines[best].engine_id
        if full[home] and not full[best] and now_s - program.moved_s >= self._rest_s:
            return self._move(program, engines[best].engine_id, now_s)
        return program.home

    def _move(self, program: _Program, engine_id: str, now_s: float) -> str:
        self.moves += 1
        program.home, program.moved_s = engine_id, now_s
        return engine_id

    def _too_full(self, engines: Sequence[EngineView], loads: Sequence[float]) -> list[bool]:
        """Return which engines hold clearly more than their share, or make calls wait in vain."""
        most = (1 + self._excess) * sum(loads) / len(loads)
        # the least load among the engines where no call waits
        idle = min((loads[n] for n, e in enumerate(engines) if not e.waiting), default=None)
        return [
            load > most + (self._slack if e.slots is None else min(self._slack, e.slots / 4))
            or (bool(e.waiting) and idle is not None and idle + 1 < load)
            for load, e in zip(loads, engines, strict=True)
        ]

    def _cost(self, call: CallFacts, program: _Program, engine: EngineView) -> float:
        """Return what a call costs on an engine, in tokens to compute before it and for it."""
        missing = call.prompt_tokens - self._hit(call, program, engine.engine_id, engine.kv_tokens)
        # Computing it again delays others too; but calls beside this one will share it.
        again = 1.0 + 1.0 / (1 + call.siblings)
        return again * missing + self._queued.get(engine.engine_id, 0.0)

    def _hit(
        self, call: CallFacts, program: _Program, engine_id: str, kv_tokens: int | None
    ) -> int:
        """Return how much of a call's prompt an engine is thought to hold."""
        held = program.held.get(engine_id)
        if held is None:
            return 0
        newer = self._written.get(engine_id, 0) - held.written
        if kv_tokens is not None and newer >= kv_tokens:
            return 0
        return min(held.tokens, call.prompt_tokens)

    def _send(self, call: CallFacts, program: _Program, engine: EngineView) -> None:
        """Note what the engine has to do, and what it will hold."""
        name = engine.engine_id
        new = call.prompt_tokens - self._hit(call, program, name, engine.kv_tokens)
        work = new + _DECODE * self._output_tokens
        self._work[call.call_id] = (name, work)
        self._queued[name] = self._queued.get(name, 0.0) + work
        written = self._written[name] = self._written.get(name, 0) + new
        held = program.held.get(name)
        program.held[name] = _Held(max(call.prompt_tokens, held.tokens if held else 0), written)
        if len(program.held) > HOMES_MAX:
            del program.held[next(other for other in program.held if other != program.home)]


def _weights(engines: Sequence[EngineView]) -> list[float]:
    """Return how slow each engine is, 1 for the mean one."""
    paces = [engine.pace_s for engine in engines if engine.pace_s]
    mean = sum(paces) / len(paces) if paces else 1.0
    return [e.pace_s / mean if e.pace_s else 1.0 for e in engines]

"""The simulation: programs arrive, their calls run on virtual engines, tools take their time.

One heap of events in virtual time. Nothing reads a clock to decide, so the same arguments give the
same result, byte for byte.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .coarse_engine import ORDERS
from .content import ProgramContent, Segments
from .cost_model import Profile
from .run_state import CallRun, ProgramFacts, ProgramRun
from .virtual_engine import EngineTotals
from .virtual_fleet import NO_FAULTS, Faults, SomeEngine, VirtualFleet
from .workload import Arrival, Waits

_ARRIVE, _READY, _LAND, _LAUNCH, _DEATH = range(5)


class Watcher(Protocol):
    """Sees every step; the invariant checker is one."""

    def after_step(self, simulation: Simulation, engine: SomeEngine, now_s: float) -> None:
        """Look at the state after a step has ended."""
        ...


@dataclass
class Outcome:
    """What a simulation leaves: every program, every call, and what the engines did."""

    programs: list[ProgramRun]
    calls: list[CallRun]
    totals: list[EngineTotals]
    ended_s: float
    unfinished: int = 0
    backlog: list[tuple[float, int]] = field(default_factory=list)  # (time, programs in the system)


class Simulation:
    """Programs on engines in virtual time.

    Args:
        profile: Of each engine.
        arm: One of ``arms.names()``.
        arrivals: When which program begins, in time order.
        waits: How tool times are replayed.
        engines: How many.
        balancer: Which engine gets a call; one of ``policy.balancer.PLACEMENTS``.
        faults: What is wrong with engines.
        concurrency: Closed loop: so many programs at once, arrival times are not looked at.
        keep_calls: Of which programs the outcome lists the calls (memory).
        watcher: Looks after every step.
    """

    def __init__(
        self,
        profile: Profile,
        arm: str,
        arrivals: Iterator[Arrival],
        waits: Waits,
        *,
        engines: int = 1,
        balancer: str = "locality",
        faults: Faults = NO_FAULTS,
        concurrency: int | None = None,
        keep_calls: Callable[[ProgramRun], bool] = lambda _: True,
        watcher: Watcher | None = None,
    ) -> None:
        self.fleet = VirtualFleet(profile, arm, engines, balancer, faults)
        self.engines = self.fleet.engines
        self.live: dict[int, ProgramRun] = {}
        self.created = 0
        self.ended = 0
        self.completion_order: list[str] = []
        self._profile = profile
        self._arrivals = arrivals
        self._waits = waits
        self._concurrency = concurrency
        self._keep_calls = keep_calls
        self._watcher = watcher
        self._segments = Segments(profile.block_tokens)
        self._facts: dict[tuple[str, int], ProgramFacts] = {}
        self._events: list[tuple[float, int, int, object]] = []
        self._sequence = 0
        self._with_tokens = arm not in ORDERS
        for index, at_s in faults.dead_s:
            self._push(at_s, _DEATH, index)
        self._outcome = Outcome([], [], [e.totals for e in self.engines], 0.0)

    def run(self, until: Callable[[float, Simulation], bool] = lambda *_: False) -> Outcome:
        """Run until nothing is left to do, or ``until`` says so.

        Args:
            until: Called at each event with the time; true ends the run, and what is not over
                counts as unfinished.
        """
        for _ in range(self._concurrency or 1):
            self._next_arrival()
        now_s = 0.0
        while self._events:
            if until(self._events[0][0], self):
                break
            now_s, _, kind, what = heapq.heappop(self._events)
            self._dispatch(kind, what, now_s)
        self._outcome.ended_s = now_s
        self._outcome.unfinished = len(self.live)
        self._outcome.programs += self.live.values()
        return self._outcome

    def _dispatch(self, kind: int, what: Any, now_s: float) -> None:
        if kind == _ARRIVE:
            self._arrive(what, now_s)
        elif kind == _READY:
            self._start(what[0], what[1], now_s)
        elif kind == _LAND:
            self._land(what, now_s)
        elif kind == _DEATH:
            self._kill(what, now_s)
        else:
            self._launch(what, now_s)

    def _push(self, at_s: float, kind: int, what: object) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_s, self._sequence, kind, what))

    def _next_arrival(self, now_s: float = 0.0) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            at_s = now_s if self._concurrency else arrival.at_s
            self._push(at_s, _ARRIVE, arrival._replace(at_s=at_s))

    def _arrive(self, arrival: Arrival, now_s: float) -> None:
        if not self._concurrency:
            self._next_arrival()
        content = ProgramContent(arrival.program, self._segments)
        program = ProgramRun(arrival, content, self._program_facts(arrival))
        self.live[program.number] = program
        self.created += 1
        self._outcome.backlog.append((now_s, len(self.live)))
        for place in program.roots():
            self._ready(program, place, now_s)

    def _program_facts(self, arrival: Arrival) -> ProgramFacts:
        program = arrival.program
        drawn = self._waits.null == "drawn"
        key = (program.name, arrival.number if drawn else -1)
        facts = self._facts.get(key)
        if facts is None:
            tool_s = [self._waits.before(arrival.number, call) for call in program.calls]
            facts = ProgramFacts(program, self._profile, tool_s)
            if not drawn:
                self._facts[key] = facts
        return facts

    def _ready(self, program: ProgramRun, place: int, now_s: float) -> None:
        call = program.program.calls[place]
        wait_s = self._waits.before(program.number, call)
        program.tool_s += wait_s
        if call.parents:
            wait_s += self._profile.turnaround_s
        if wait_s > 0:
            self._push(now_s + wait_s, _READY, (program, place))
        else:
            self._start(program, place, now_s)

    def _start(self, program: ProgramRun, place: int, now_s: float) -> None:
        assert program.content is not None
        prompt = program.content.begin(program.program.calls[place], with_tokens=self._with_tokens)
        self._send(CallRun(program, place, prompt, now_s), now_s)

    def _send(self, run: CallRun, now_s: float) -> None:
        engine = self.fleet.place(run, now_s)
        engine.add(run, now_s)
        if not engine.has_batch:
            self._launch(engine, now_s)
        elif (end_s := engine.cut(now_s)) is not None:
            self._push(end_s, _LAND, engine)

    def _kill(self, index: int, now_s: float) -> None:
        """An engine dies; its calls begin again elsewhere, as if their client had asked again."""
        for lost in self.fleet.kill(index):
            run = CallRun(lost.program, lost.place, lost.prompt, lost.arrival_s)
            self._send(run, now_s)

    def _launch(self, engine: SomeEngine, now_s: float) -> None:
        before = engine.has_batch
        at_s = engine.launch(now_s)
        if at_s is not None:
            self._push(at_s, _LAND if engine.has_batch else _LAUNCH, engine)
            if engine.has_batch and not before:  # fill the pipeline
                self._launch(engine, now_s)

    def _land(self, engine: SomeEngine, now_s: float) -> None:
        if engine.index in self.fleet.dead or engine.end_s != now_s:
            return  # it has died, or its stretch was cut short
        finished = engine.land(now_s)
        for run in finished:
            self._finish(run, now_s)
        if self._watcher is not None:
            self._watcher.after_step(self, engine, now_s)
        self._launch(engine, now_s)

    def _finish(self, run: CallRun, now_s: float) -> None:
        program = run.program
        self.completion_order.append(run.request_id)
        if self._keep_calls(program):
            self._outcome.calls.append(run)
        run.request = None
        self.fleet.call_over(run, now_s)
        for place in program.finish(run):
            self._ready(program, place, now_s)
        if program.ended_s is not None:
            del self.live[program.number]
            self.fleet.program_over(program)
            self.ended += 1
            self._outcome.programs.append(program)
            self._outcome.backlog.append((now_s, len(self.live)))
            if self._concurrency:
                self._next_arrival(now_s)


def order_digest(order: Sequence[str]) -> str:
    """Return a short digest of a completion order."""
    return hashlib.blake2b("\n".join(order).encode(), digest_size=16).hexdigest()

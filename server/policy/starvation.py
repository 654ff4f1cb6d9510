"""Promotion of calls that wait too long: a clock of due times, so that nobody scans the queue.

A waiting call is due when (W_program + W_call) ÷ (T_program + T_call) reaches β, where W is wait
and T is service. While it waits only W_call grows, by a second a second, so the due time is known:

    due = [since - W_call + β · T_call]  +  [β · (first step + T_program) - W_program]

The first part belongs to the call and stays as it is while it waits, the second to the program and
moves when another call of the program ends. So there is one heap of calls in each program and one
heap of programs: an event costs O(log n), however many calls the program has waiting.
``docs/scheduler.md`` says what β guarantees, and proves it.

Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from .call import Call
from .service import Program


@dataclass(slots=True)
class _Waiting:
    """The waiting calls of one program."""

    calls: list[tuple[float, int, Call]] = field(default_factory=list)  # a heap
    live: int = 0  # entries that are valid
    entry: int = 0  # number of its valid entry in the heap of programs, 0: none


class PromotionClock:
    """Knows which waiting calls are due.

    Args:
        beta: The ratio of wait to service.
        first_step_s: Service a program is taken to have before its first step.
        service_of: The program's service by the policy.
        wait_of: The program's wait by the policy.
    """

    def __init__(
        self,
        beta: float,
        first_step_s: float,
        service_of: Callable[[Program], float],
        wait_of: Callable[[Program], float],
    ) -> None:
        self._beta = beta
        self._first_step_s = first_step_s
        self._service_of = service_of
        self._wait_of = wait_of
        self._programs: dict[Program, _Waiting] = {}
        self._heap: list[tuple[float, int, Program]] = []
        self._entries = 0

    def __len__(self) -> int:
        return sum(waiting.live for waiting in self._programs.values())

    def arm(self, call: Call) -> None:
        """Watch a call that has begun to wait. It must not be watched already."""
        assert call.armed == 0, f"call {call.call_id} is watched already"
        assert call.waiting_since_s is not None
        waiting = self._programs.get(call.program)
        if waiting is None:
            waiting = self._programs[call.program] = _Waiting()
        waited_s = call.wait_s - call.wait_at_reset_s
        served_s = call.service_s - call.service_at_reset_s
        self._entries += 1
        call.armed = self._entries
        waiting.live += 1
        own_s = call.waiting_since_s - waited_s + self._beta * served_s
        heapq.heappush(waiting.calls, (own_s, call.armed, call))
        if waiting.calls[0][2] is call or waiting.entry == 0:
            self._enter(call.program, waiting)

    def disarm(self, call: Call) -> None:
        """Stop watching a call: it runs, or is gone. Harmless if it was not watched."""
        if call.armed == 0:
            return
        call.armed = 0
        waiting = self._programs[call.program]
        waiting.live -= 1
        if waiting.live == 0:
            del self._programs[call.program]
        elif len(waiting.calls) > 2 * waiting.live + 16:
            waiting.calls = [entry for entry in waiting.calls if entry[2].armed == entry[1]]
            heapq.heapify(waiting.calls)

    def program_changed(self, program: Program) -> None:
        """The program's service or wait has moved: its waiting calls are due at another time."""
        waiting = self._programs.get(program)
        if waiting is not None:
            self._enter(program, waiting)

    def due(self, now_s: float) -> list[Call]:
        """Return the calls that are due, the longest due first; they are no longer watched."""
        calls: list[Call] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, entry, program = heapq.heappop(self._heap)
            waiting = self._programs.get(program)
            if waiting is None or waiting.entry != entry:
                continue
            waiting.entry = 0
            self._drop_stale(waiting)
            own_s, _, call = waiting.calls[0]
            if own_s + self._offset_s(program) <= now_s:
                heapq.heappop(waiting.calls)
                self.disarm(call)
                calls.append(call)
            if waiting.live:
                self._enter(program, waiting)
        return calls

    def _enter(self, program: Program, waiting: _Waiting) -> None:
        """Give the program one valid entry, for its first call."""
        self._drop_stale(waiting)
        self._entries += 1
        waiting.entry = self._entries
        due_s = waiting.calls[0][0] + self._offset_s(program)
        heapq.heappush(self._heap, (due_s, waiting.entry, program))
        if len(self._heap) > 2 * len(self._programs) + 64:
            self._heap = [
                entry
                for entry in self._heap
                if (owner := self._programs.get(entry[2])) and owner.entry == entry[1]
            ]
            heapq.heapify(self._heap)

    def _offset_s(self, program: Program) -> float:
        service_s = self._first_step_s + self._service_of(program)
        return self._beta * service_s - self._wait_of(program)

    @staticmethod
    def _drop_stale(waiting: _Waiting) -> None:
        calls = waiting.calls
        while calls[0][2].armed != calls[0][1]:
            heapq.heappop(calls)

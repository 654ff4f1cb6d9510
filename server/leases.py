"""How long programs stay in the table, and which of them gives way when it is full.

Every program is in one of three places: it has a call in flight, it is *silent* (open, without
one), or it is a tombstone (over, and only remembered). A heap holds the time at which each is to be
looked at next; a lease that is renewed meanwhile is only noticed then, so that a renewal costs
nothing. When room is needed the oldest tombstone gives way, then the program that has been silent
longest; one with a call in flight never does.

Pure: time is an argument.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Final

from .program import Program

TOMBSTONE_S: Final = 600.0
ANONYMOUS_TOMBSTONE_S: Final = 60.0
SILENT_MAX_S: Final = 86_400.0  # a heartbeat alone keeps a program no longer than this
PAUSE_S: Final = 5.0  # a longer gap between two sweeps means that the gateway stood still


class Leases:
    """The places and the due times of all programs of one table."""

    def __init__(self, now_s: float, lease_s: float) -> None:
        self.lease_s = lease_s
        self.over: dict[str, None] = {}  # programs that are over since `take_over`
        self._silent: OrderedDict[str, None] = OrderedDict()  # the longest silent first
        self._tombstones: OrderedDict[str, None] = OrderedDict()  # the oldest first
        self._due: list[tuple[float, int, Program]] = []  # one entry a program
        self._order = 0
        self._swept_s = now_s
        self._grace_until_s = now_s

    def add(self, program: Program) -> None:
        """Take a program in; its lease is set."""
        self.settle(program)
        self.arm(program, program.lease_until_s)

    def settle(self, program: Program) -> None:
        """Put a program without a call in flight where it belongs."""
        places = (self._silent, self._tombstones)
        here, there = places[::-1] if program.is_tombstone else places
        there.pop(program.program_id, None)
        here[program.program_id] = None
        here.move_to_end(program.program_id)

    def fly(self, program: Program) -> None:
        """Note that a program has a call in flight."""
        self._silent.pop(program.program_id, None)
        self._tombstones.pop(program.program_id, None)

    def touch(self, program: Program, now_s: float) -> None:
        """Renew a lease; a program that had expired is open again, unless it has ended."""
        lease_s = program.ttl_s or self.lease_s
        program.lease_until_s = min(now_s + lease_s, program.last_call_s + SILENT_MAX_S)
        if program.in_flight:
            return
        if program.ended_s is not None:
            self.bury(program, now_s)
            return
        program.expired = False
        self.settle(program)

    def bury(self, program: Program, now_s: float) -> None:
        """Make a program a tombstone: it has ended or expired, and no call of it is in flight."""
        keep_s = TOMBSTONE_S if program.session is not None else ANONYMOUS_TOMBSTONE_S
        program.lease_until_s = now_s + keep_s
        self.over[program.program_id] = None
        self.settle(program)

    def drop(self, program: Program) -> None:
        """Forget a program."""
        program_id = program.program_id
        self._silent.pop(program_id, None)
        if self._tombstones.pop(program_id, 0) is not None:  # else it was told when it was buried
            self.over[program_id] = None

    def victim(self) -> str | None:
        """Return the program that gives way; None: every one has a call in flight."""
        return next(iter(self._tombstones or self._silent), None)

    def take_over(self) -> list[str]:
        """Return the programs that are over since the last time this was asked."""
        over = list(self.over)
        self.over.clear()
        return over

    def has_due(self, now_s: float) -> bool:
        """Return whether there is a program to be looked at."""
        return bool(self._due) and self._due[0][0] <= now_s

    def note_sweep(self, now_s: float) -> None:
        """After a standstill nobody could renew a lease: give all of them half a lease."""
        if now_s - self._swept_s > PAUSE_S:
            self._grace_until_s = now_s + self.lease_s / 2
        self._swept_s = now_s

    def pop_due(self) -> Program:
        """Return the program that is to be looked at first; it must be armed again or dropped."""
        return heapq.heappop(self._due)[2]

    def due_s(self, program: Program) -> float:
        """Return when a program runs out."""
        if program.is_tombstone or program.in_flight:
            return program.lease_until_s
        return max(program.lease_until_s, self._grace_until_s)

    def arm(self, program: Program, due_s: float) -> None:
        """Look at a program at a time."""
        self._order += 1
        heapq.heappush(self._due, (due_s, self._order, program))

    def check(self, program: Program) -> str | None:
        """Return what is wrong with a program's place."""
        program_id = program.program_id
        places = (program.in_flight > 0, program_id in self._silent,
                  program_id in self._tombstones)  # fmt: skip
        if sum(places) != 1:
            return f"{program_id} is in {places} of (in flight, silent, tombstones)"
        return None

    def check_size(self, programs: int) -> str | None:
        """Return what is wrong with the whole, of which so many programs are known."""
        return "a program has no lease" if len(self._due) < programs else None

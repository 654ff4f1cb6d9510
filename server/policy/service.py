"""Attained service of programs in one engine: the sum (PLAS) and the longest path (ATLAS).

The gateway's process table is the authority over all engines; its figure comes with each call. The
engine's own may be newer (the report of the last call may still be under way), so a program's
service is the larger of the two. It is never too large: the gateway's figure holds only calls that
had ended before this one was sent off, and what is added here ended in this engine afterwards. A
change of policy does not alter that: a figure says whether it is a sum or a path, and fills that
one only.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable


class Program:
    """What one program has used.

    Attributes:
        arrival_s: When this engine first heard of it, or earlier if the gateway says so.
        sum_s: Service of its ended calls, added up.
        path_s: Service along its longest path of calls, as far as seen.
        wait_sum_s: Wait of its ended calls, added up.
        wait_path_s: Wait along the longest path of waits.
        calls: Calls in the engine now.
        member: What the policy keeps with it.
    """

    __slots__ = (
        "arrival_s",
        "calls",
        "ended",
        "member",
        "path_s",
        "program_id",
        "sum_s",
        "wait_path_s",
        "wait_sum_s",
    )

    def __init__(self, program_id: str, arrival_s: float) -> None:
        self.program_id = program_id
        self.arrival_s = arrival_s
        self.sum_s = 0.0
        self.path_s = 0.0
        self.wait_sum_s = 0.0
        self.wait_path_s = 0.0
        self.calls = 0
        self.ended = False
        self.member: object = None


class Ledger:
    """The programs an engine remembers; bounded, the longest idle ones go first."""

    def __init__(self, programs_max: int) -> None:
        assert programs_max > 0
        self._programs_max = programs_max
        self._programs: dict[str, Program] = {}
        self._idle: dict[str, None] = {}  # programs without calls, the longest idle first

    def __len__(self) -> int:
        return len(self._programs)

    def get(self, program_id: str) -> Program | None:
        """Return the program, None if it is not known."""
        return self._programs.get(program_id)

    def join(self, program_id: str, arrival_s: float) -> Program:
        """Return the program of a call that comes in; it is new if it was not known.

        Args:
            program_id: Its name.
            arrival_s: When it began, if it is new.
        """
        program = self._programs.get(program_id)
        if program is None:
            program = self._programs[program_id] = Program(program_id, arrival_s)
            self._forget_idle()
        program.calls += 1
        self._idle.pop(program_id, None)
        return program

    def leave(self, program: Program, *, remember: bool = True) -> None:
        """Note that a call of this program is gone.

        Args:
            program: As ``join`` returned it.
            remember: False for a program that consists of this one call.
        """
        program.calls -= 1
        assert program.calls >= 0, f"program {program.program_id} left more often than it joined"
        if program.calls == 0:
            if program.ended or not remember:
                self._programs.pop(program.program_id, None)
            else:
                self._idle[program.program_id] = None
                self._forget_idle()

    def forget(self, program_ids: Iterable[str]) -> None:
        """Forget programs that are over, those with calls when the last one is gone."""
        for program_id in program_ids:
            program = self._programs.get(program_id)
            if program is None:
                continue
            if program.calls:
                program.ended = True
            else:
                del self._programs[program_id]
                self._idle.pop(program_id, None)

    def _forget_idle(self) -> None:
        while len(self._programs) > self._programs_max and self._idle:
            program_id = next(iter(self._idle))
            del self._idle[program_id]
            del self._programs[program_id]


def fold(
    program: Program, *, before_s: float, service_s: float, wait_before_s: float, wait_s: float
) -> None:
    """Add an ended call to its program; call it once for each call, however it ended.

    Args:
        program: The call's.
        before_s: The program's longest path when the call came.
        service_s: Model time of the call.
        wait_before_s: The program's longest path of waits when the call came.
        wait_s: The call's wait.

    Source: the paper's Eq. 1 (sum) and Alg. 1 line 4 (path).
    """
    program.sum_s += service_s
    program.path_s = max(program.path_s, before_s + service_s)
    program.wait_sum_s += wait_s
    program.wait_path_s = max(program.wait_path_s, wait_before_s + wait_s)

"""What a policy knows of one call while it is in the engine.

Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .service import Program

Key = tuple[int, float, int]


class Call:
    """One call: its place in the queues, its service and its wait.

    Attributes:
        call_id: The engine's name of the call, unique while it lives.
        level: Where it queues, 1 is the most urgent.
        home_level: Where it returns to when the quantum of a promotion is used up.
        key: Its place among all calls, the smallest first: (level, order, number).
        arrival_s: When it came.
        order_s: Its place inside the level.
        displaces_s: Running calls with a place behind this one give it their slot, if the policy
            takes slots inside a level; endless: nobody does.
        quantum_left_s: Service it may still use in this level.
        service_s: Seconds of steps that it had tokens in.
        wait_s: Seconds it was runnable and not running, up to ``waiting_since_s``.
        waiting_since_s: Start of the wait under way, None while it runs.
        service_before_s: The program's service when it came (paper: the scalar at arrival).
        wait_before_s: The program's wait when it came.
        service_at_reset_s: ``service_s`` at the last promotion: T_call counts from there.
        wait_at_reset_s: ``wait_s`` at the last promotion: W_call counts from there.
        promoted: Whether it is in level 1 by promotion.
        armed: Number of its valid entry in the promotion clock, 0: none.
        prompt_tokens, hashes: Its prompt, as it came.
        expected_tokens: KV tokens that it is expected to hold in the end.
        held_tokens: Those that it held after its last step.
        own_tokens: Those of them that no earlier call of its program holds.
        gone: Whether it has left.
        work_s: Its share of the steps that it had tokens in (``work.py``).
    """

    __slots__ = (
        "armed",
        "arrival_s",
        "call_id",
        "displaces_s",
        "expected_tokens",
        "gone",
        "hashes",
        "held_tokens",
        "home_level",
        "key",
        "level",
        "number",
        "order_s",
        "own_tokens",
        "program",
        "promoted",
        "prompt_tokens",
        "quantum_left_s",
        "service_at_reset_s",
        "service_before_s",
        "service_s",
        "wait_at_reset_s",
        "wait_before_s",
        "wait_s",
        "waiting_since_s",
        "work_s",
    )

    def __init__(self, call_id: str, program: Program, number: int, now_s: float) -> None:
        self.call_id = call_id
        self.program = program
        self.number = number
        self.arrival_s = now_s
        self.order_s = now_s
        self.displaces_s = float("inf")
        self.level = self.home_level = 1
        self.key: Key = (1, now_s, number)
        self.quantum_left_s = float("inf")
        self.service_s = 0.0
        self.wait_s = 0.0
        self.waiting_since_s: float | None = now_s
        self.service_before_s = 0.0
        self.wait_before_s = 0.0
        self.service_at_reset_s = 0.0
        self.wait_at_reset_s = 0.0
        self.promoted = False
        self.armed = 0
        self.prompt_tokens = self.expected_tokens = self.held_tokens = self.own_tokens = 0
        self.hashes: Sequence[Hashable] = ()
        self.work_s = 0.0
        self.gone = False

    def place(self, level: int, order_s: float) -> None:
        """Put it into a level."""
        self.level = level
        self.order_s = order_s
        self.key = (level, order_s, self.number)

    def total_wait_s(self, now_s: float) -> float:
        """Return its wait so far, with the one under way."""
        if self.waiting_since_s is None:
            return self.wait_s
        return self.wait_s + (now_s - self.waiting_since_s)

    def start_waiting(self, now_s: float) -> None:
        """It is runnable and does not run from now on."""
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def stop_waiting(self, now_s: float) -> None:
        """It runs from now on, or is gone."""
        self.wait_s = self.total_wait_s(now_s)
        self.waiting_since_s = None

"""Whether an engine moves: the rule that ejects a frozen engine and never a busy one.

Two signals, as each misses what the other sees: an engine core goes on counting steps while its
API server is stopped, and an API server answers ``/health`` while its engine core stands still.

* **answers**: the front end answered an HTTP probe;
* **steps**: the step counter advanced, or there was nothing to do. It comes with the control
  channel's heartbeat, or from the engine's metrics where there is no channel.

An engine is frozen when either signal is older than its limit: ``floor_s``, or eight times the
longest step lately seen where that is more, but at most ``cap_s`` unless the engine itself
announced a long step. The cap keeps the promise that a frozen engine is out within 30 s.

Pure: time is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LONGEST_STEP_WINDOW_S = 600.0
_STEP_FACTOR = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLimits:
    """When silence counts as frozen, in seconds."""

    floor_s: float = 15.0
    cap_s: float = 25.0
    long_step_s: float = 600.0  # for a step the engine announced as long


class ProgressWatch:
    """The two signals of one engine since it became ready."""

    def __init__(self, limits: ProgressLimits, *, now_s: float) -> None:
        self._limits = limits
        self._answered_s = now_s
        self._moved_s = now_s
        self._looked_s = now_s
        self._step: float | None = None
        self._long_step_expected = False
        self._steps: deque[tuple[float, float]] = deque(maxlen=64)  # (seen at, duration), longest

    def note_answer(self, *, now_s: float) -> None:
        """The front end answered."""
        self._answered_s = now_s

    def note_steps(
        self,
        step: float,
        *,
        is_busy: bool,
        now_s: float,
        longest_step_s: float = 0.0,
        long_step_expected: bool = False,
    ) -> None:
        """The step counter was read.

        Args:
            step: The counter; any change counts as progress.
            is_busy: Whether calls run or wait; an idle engine need not step.
            now_s: The time of the reading.
            longest_step_s: The longest step the engine knows of, 0: unknown.
            long_step_expected: Whether the engine announced that this step may be long.
        """
        if step != self._step or not is_busy:
            self._moved_s = now_s
        self._step = step
        self._long_step_expected = long_step_expected
        if longest_step_s > 0:
            while self._steps and self._steps[-1][1] <= longest_step_s:
                self._steps.pop()
            self._steps.append((now_s, longest_step_s))

    def frozen_reason(self, *, now_s: float) -> str | None:
        """Return why the engine counts as frozen, or None if it does not."""
        if now_s - self._looked_s > self._limits.floor_s:
            # This process itself stood still: it saw nothing, so nothing follows from that.
            self._answered_s = max(self._answered_s, now_s)
            self._moved_s = max(self._moved_s, now_s)
        self._looked_s = now_s
        limit_s = self.limit_s(now_s=now_s)
        if (silence_s := now_s - self._answered_s) > limit_s:
            return f"no answer to a health probe for {silence_s:.0f} s"
        step_limit_s = self._limits.long_step_s if self._long_step_expected else limit_s
        if (silence_s := now_s - self._moved_s) > step_limit_s:
            return f"no engine step for {silence_s:.0f} s with calls waiting"
        return None

    def limit_s(self, *, now_s: float) -> float:
        """Return how long a signal may be silent."""
        while self._steps and now_s - self._steps[0][0] > _LONGEST_STEP_WINDOW_S:
            self._steps.popleft()
        longest_s = self._steps[0][1] if self._steps else 0.0
        return min(max(self._limits.floor_s, _STEP_FACTOR * longest_s), self._limits.cap_s)

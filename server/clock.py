"""The one place of the server that reads a clock; everything that decides takes ``now_s``."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time."""

    def now_s(self) -> float:
        """Return seconds that only ever grow; differences mean something, the value does not."""
        ...

    def unix_s(self) -> float:
        """Return seconds since 1970, for people and files; it may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return the wall clock."""
        return time.time()


class ManualClock:
    """A clock that moves only when it is told to: for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time it was moved to."""
        return self._now_s

    def unix_s(self) -> float:
        """Return the same."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward. Time never goes back."""
        assert seconds >= 0, f"time cannot go back by {seconds} s"
        self._now_s += seconds

"""Levels of attained service: where a call enters, how much it may use there, where it drops to.

Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Levels:
    """K levels, counted from 1; level i holds service from bound i-1 up to bound i.

    >>> levels = Levels((1.0, 4.0))
    >>> [levels.level_of(s) for s in (0.0, 0.99, 1.0, 4.0, 1e9)]
    [1, 1, 2, 3, 3]
    >>> levels.quantum_s(1), levels.quantum_s(2), levels.quantum_s(3)
    (1.0, 3.0, inf)
    """

    def __init__(self, bounds_s: Sequence[float], quanta_s: Sequence[float] | None = None) -> None:
        self._bounds_s = tuple(bounds_s)
        if quanta_s is None:
            lower = (0.0, *self._bounds_s)  # one more than there are upper ones
            quanta_s = [high - low for low, high in zip(lower, self._bounds_s, strict=False)]
        assert len(quanta_s) == len(self._bounds_s)
        self._quanta_s = (*quanta_s, float("inf"))

    def __len__(self) -> int:
        return len(self._quanta_s)

    def level_of(self, service_s: float) -> int:
        """Return the level of a program with this much service."""
        return bisect_right(self._bounds_s, service_s) + 1

    def quantum_s(self, level: int) -> float:
        """Return the service a call may use in this level; infinite in the last."""
        return self._quanta_s[level - 1]

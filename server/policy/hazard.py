"""How much is left of something, by how much of it there has been: learned from what ended.

Programs of one kind end after more or less work, tools return after more or less time. Both are
counted in buckets that grow by half: how many came to the end of a bucket, how many ended inside
it. The ratio is the chance to end there, and it counts those that are still under way as well: a
sample of finished programs alone would hold too few long ones.

From the chances follows the *index* of something that has come so far (Gittins): the most endings
that a second of further work buys, over all amounts of further work. Its inverse is what is left,
as far as it matters for the order of service. Where long ones tend to go on for longer (chat) it
grows with attained service, so that the order by it is least attained service first; where all are
alike (function calls) it falls, and programs that began go on. Nobody has to choose.

Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

GROWTH: Final = 1.5
FIRST_S: Final = 0.01
BUCKETS: Final = 34  # up to about 6,600 s
BOUNDS_S: Final = tuple(FIRST_S * GROWTH**power for power in range(BUCKETS - 1))
PRIOR: Final = 0.3  # chance to end in a bucket before anything is known: 1.5 times as much work
PRIOR_WEIGHT: Final = 1.0
FRESH_ENDINGS: Final = 16  # after so many endings the table is made anew
MEMORY: Final = 1024.0  # endings; then all counts are halved


def bucket_of(amount_s: float) -> int:
    """Return the bucket of an amount.

    >>> bucket_of(0.0), bucket_of(0.012), bucket_of(1e9)
    (0, 1, 33)
    """
    return bisect_right(BOUNDS_S, amount_s)


def bound_s(bucket: int) -> float:
    """Return the amount at which a bucket ends; endless for the last one.

    >>> bound_s(0), bound_s(33)
    (0.01, inf)
    """
    return BOUNDS_S[bucket] if bucket < BUCKETS - 1 else float("inf")


class Hazard:
    """Counts of one kind.

    >>> alike, tailed = Hazard(), Hazard()
    >>> for _ in range(50):
    ...     for size_s in (1.0, 1.1, 1.2):
    ...         alike.passed(0, bucket_of(size_s)); alike.ended(bucket_of(size_s))
    ...     for size_s in (0.05, 0.05, 0.05, 5.0):
    ...         tailed.passed(0, bucket_of(size_s)); tailed.ended(bucket_of(size_s))
    >>> alike.left_s(0.9) < alike.left_s(0.0), tailed.left_s(0.9) > tailed.left_s(0.0)
    (True, True)
    """

    __slots__ = ("_ended", "_fresh_at", "_left", "_passed", "endings", "mean_s")

    def __init__(self) -> None:
        self._passed = [0.0] * BUCKETS
        self._ended = [0.0] * BUCKETS
        self._left: list[float] = []
        self._fresh_at = 0.0
        self.endings = 0.0
        self.mean_s = 1.0

    def passed(self, first: int, beyond: int) -> None:
        """Note that one has come out of the buckets from ``first`` on and is in ``beyond`` now."""
        for bucket in range(first, beyond):
            self._passed[bucket] += 1

    def ended(self, bucket: int) -> None:
        """Note that one has ended in this bucket."""
        self._ended[bucket] += 1
        self.endings += 1
        size_s = _middle_s(bucket)
        self.mean_s += (size_s - self.mean_s) / min(self.endings, 256.0)
        if self.endings >= MEMORY:
            self.endings /= 2
            self._fresh_at /= 2
            self._ended = [count / 2 for count in self._ended]
            self._passed = [count / 2 for count in self._passed]

    def left_s(self, attained_s: float) -> float:
        """Return what is left by the index; endless if nothing ever ended beyond."""
        if not self._left or self.endings - self._fresh_at >= FRESH_ENDINGS:
            self._refresh()
        return self._left[bucket_of(attained_s)]

    def _refresh(self) -> None:
        self._fresh_at = self.endings
        chance = [
            (ended + PRIOR * PRIOR_WEIGHT) / (ended + passed + PRIOR_WEIGHT)
            for ended, passed in zip(self._ended, self._passed, strict=True)
        ]
        width_s = [_width_s(bucket) for bucket in range(BUCKETS)]
        left = []
        for first in range(BUCKETS):
            alive, spent_s, won, best = 1.0, 0.0, 0.0, 0.0
            for bucket in range(first, BUCKETS):
                spent_s += alive * width_s[bucket] * (1 - chance[bucket] / 2)
                won += alive * chance[bucket]
                best = max(best, won / spent_s)
                alive *= 1 - chance[bucket]
                if alive < 1e-3:
                    break
            left.append(1.0 / best)
        self._left = left


def _width_s(bucket: int) -> float:
    low_s = BOUNDS_S[bucket - 1] if bucket else 0.0
    high_s = BOUNDS_S[bucket] if bucket < BUCKETS - 1 else BOUNDS_S[-1] * GROWTH
    return high_s - low_s


def _middle_s(bucket: int) -> float:
    low_s = BOUNDS_S[bucket - 1] if bucket else 0.0
    return low_s + _width_s(bucket) / 2

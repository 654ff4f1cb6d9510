"""Whether and when an engine that ended is started again.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


class EngineFailedError(Exception):
    """An engine does not start, or ends again and again; the pool goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How much patience there is. Times are seconds."""

    restart_limit: int  # starts in a row that may fail
    healthy_after_s: float  # a life this long clears the failures
    backoff_s_min: float
    backoff_s_max: float


class Restarts:
    """The starts of one engine so far."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._ever_ready = False

    def wait_after(self, lived_s: float, *, was_ready: bool) -> float | None:
        """Note that a start is over; return the wait before the next, None: there is none.

        There is none when the very first start failed, since wrong arguments stay wrong, or too
        many in a row did not last. Each wait is twice the one before.

        >>> limits = RestartLimits(restart_limit=3, healthy_after_s=60, backoff_s_min=1,
        ...                        backoff_s_max=30)
        >>> starts = Restarts(limits)
        >>> [starts.wait_after(t, was_ready=True) for t in (5.0, 5.0, 99.0, 5.0, 5.0)]
        [1.0, 2.0, 1.0, 2.0, None]
        >>> Restarts(limits).wait_after(5.0, was_ready=False) is None
        True
        """
        self._ever_ready = self._ever_ready or was_ready
        is_healthy = was_ready and lived_s >= self._limits.healthy_after_s
        self._failures = 1 if is_healthy else self._failures + 1
        if not self._ever_ready or self._failures >= self._limits.restart_limit:
            return None
        wait_s = self._limits.backoff_s_min * 2.0 ** (self._failures - 1)
        return min(wait_s, self._limits.backoff_s_max)

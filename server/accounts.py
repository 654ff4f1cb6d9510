"""What a program is charged: the sum of its calls (PLAS) or its longest path (ATLAS).

A call costs what its engine measured, and as long as no engine has told, the wall time that the
gateway saw; the measurement replaces the wall time whenever it comes. For a sum that is easy. For a
path it is not: the cost of a call is part of the start of the calls after it, which may have begun
before the measurement came. So a path is kept open, call by call, until its costs are settled.

Pure.
"""

from __future__ import annotations

from typing import Final, Protocol

UNSETTLED_MAX: Final = 16  # more calls of one program without a measurement: the oldest keeps wall


class Cost:
    """What one call costs so far, and, for a path, where it starts."""

    __slots__ = ("attempts", "ended", "model_s", "reports", "start_s", "waits_on", "wall_s")

    def __init__(self) -> None:
        self.wall_s = 0.0  # counted from the end of the call on
        self.model_s = 0.0
        self.reports: tuple[str, ...] = ()  # the engine requests of this call that have reported
        self.ended = False
        self.attempts: list[Cost] | None = None  # of a call tried again: shared by all of them
        self.start_s = 0.0
        self.waits_on: list[Cost] = []

    @property
    def cost_s(self) -> float:
        """The measured time if there is one, else the wall time; 0 while nobody knows."""
        return self.model_s if self.reports else self.wall_s

    @property
    def charged_s(self) -> float:
        """What the call costs, however often it was tried: its dearest attempt."""
        if self.attempts is None:  # no list of one: it would be a cycle for each call
            return self.cost_s
        return max(attempt.cost_s for attempt in self.attempts)

    def share_with(self, later: Cost) -> None:
        """Make ``later`` another attempt of the same call."""
        if self.attempts is None:
            self.attempts = [self]
        self.attempts.append(later)
        later.attempts = self.attempts


class Account(Protocol):
    """The attained service of one program."""

    @property
    def service_s(self) -> float:
        """Attained service, seconds."""
        ...

    @property
    def own_s(self) -> float:
        """The part of it that this gateway has charged; of a path, the whole of it."""
        ...

    def begin(self, cost: Cost) -> None:
        """Note that a call begins; a retry shares ``cost.attempts`` with its earlier attempts."""
        ...

    def change(self, cost: Cost, before_s: float) -> None:
        """Note that ``cost`` has changed; it was charged ``before_s``."""
        ...

    def restore(self, service_s: float) -> None:
        """Begin with this much service, of an earlier life of the gateway."""
        ...

    def note_elsewhere(self, service_s: float) -> None:
        """Note what other gateways have charged by now: together, or the longest path."""
        ...


class SumAccount:
    """PLAS: the sum over all calls."""

    __slots__ = ("_elsewhere_s", "own_s")

    def __init__(self) -> None:
        self.own_s = 0.0
        self._elsewhere_s = 0.0

    @property
    def service_s(self) -> float:
        """See `Account`."""
        return self.own_s + self._elsewhere_s

    def begin(self, cost: Cost) -> None:
        """See `Account`; a sum does not care when a call began."""

    def change(self, cost: Cost, before_s: float) -> None:
        """See `Account`."""
        # rounding may leave less than nothing of a wall time that is taken back
        self.own_s = max(0.0, self.own_s + cost.charged_s - before_s)

    def restore(self, service_s: float) -> None:
        """See `Account`."""
        self.own_s = service_s

    def note_elsewhere(self, service_s: float) -> None:
        """See `Account`."""
        self._elsewhere_s = service_s


class PathAccount:
    """ATLAS: service = max(service, service at the call's arrival + the call's time)."""

    __slots__ = ("_open", "_settled_s", "_unsettled")

    def __init__(self) -> None:
        self._settled_s = 0.0
        self._open: dict[int, Cost] = {}
        self._unsettled: dict[int, Cost] = {}  # ended, but the cost or the start may still change

    @property
    def service_s(self) -> float:
        """The longest path, with the best that is known of each call."""
        known_s: dict[int, float] = {}
        return max(
            (self._path_s(cost, known_s) for cost in self._unsettled.values()),
            default=self._settled_s,
        )

    @property
    def own_s(self) -> float:
        """See `Account`."""
        return self.service_s

    def begin(self, cost: Cost) -> None:
        """See `Account`."""
        first = cost.attempts[0] if cost.attempts else cost
        if first is not cost:  # a retry starts where the call did
            cost.start_s, cost.waits_on = first.start_s, list(first.waits_on)
        else:
            cost.start_s, cost.waits_on = self._settled_s, list(self._unsettled.values())
        self._open[id(cost)] = cost

    def change(self, cost: Cost, before_s: float) -> None:  # noqa: ARG002  (a sum needs it)
        """See `Account`."""
        if cost.ended and self._open.pop(id(cost), None) is not None:
            self._unsettled[id(cost)] = cost
        if id(cost) not in self._unsettled and cost.ended:  # settled already, by the bound
            self._settled_s = max(self._settled_s, cost.start_s + cost.cost_s)
            return
        self._settle_ready()
        while len(self._unsettled) > UNSETTLED_MAX:
            self._settle(next(iter(self._unsettled.values())))

    def restore(self, service_s: float) -> None:
        """See `Account`."""
        self._settled_s = service_s

    def note_elsewhere(self, service_s: float) -> None:
        """See `Account`; a path that goes on elsewhere is a path all the same."""
        self._settled_s = max(self._settled_s, service_s)

    def _path_s(self, cost: Cost, known_s: dict[int, float]) -> float:
        path_s = known_s.get(id(cost))
        if path_s is None:
            start_s = max((self._path_s(w, known_s) for w in cost.waits_on), default=0.0)
            path_s = known_s[id(cost)] = max(cost.start_s, start_s) + cost.cost_s
            path_s = known_s[id(cost)] = max(path_s, self._settled_s)
        return path_s

    def _settle_ready(self) -> None:
        again = True
        while again:
            again = False
            for cost in list(self._unsettled.values()):
                if cost.reports and not cost.waits_on:
                    self._settle(cost)
                    again = True

    def _settle(self, cost: Cost) -> None:
        del self._unsettled[id(cost)]
        for waited in cost.waits_on:  # only when the bound forces it
            cost.start_s = max(cost.start_s, waited.start_s + waited.cost_s)
        cost.waits_on = []
        path_s = cost.start_s + cost.cost_s
        self._settled_s = max(self._settled_s, path_s)
        for later in (*self._unsettled.values(), *self._open.values()):
            if cost in later.waits_on:
                later.waits_on.remove(cost)
                later.start_s = max(later.start_s, path_s)

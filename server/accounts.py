"""What a program is charged: the sum of its calls (PLAS) and its longest path (ATLAS).

Both are kept all the time, so that a change of policy finds the figure that it goes by. Wait is
kept along its own longest path; its sum is the program's.

A call costs what its engine measured, and as long as no engine has told, the wall time that the
gateway saw; the measurement replaces the wall time whenever it comes. For a sum that is easy. For a
path it is not: the cost of a call is part of the start of the calls after it, which may have begun
before the measurement came. So a path is kept open, call by call, until its costs are settled.

Pure.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Accounting = Literal["plas", "atlas"]

UNSETTLED_MAX: Final = 16  # more calls of one program without a measurement: the oldest keeps wall


class Cost:
    """What one call costs so far, and, for a path, where it starts."""

    __slots__ = (
        "attempts", "ended", "model_s", "reports", "start_s", "wait_s", "wait_start_s", "waits_on",
        "wall_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.wall_s = 0.0  # counted from the end of the call on
        self.model_s = 0.0
        self.reports: tuple[str, ...] = ()  # the engine requests of this call that have reported
        self.wait_s = 0.0  # the longest of its engine requests, which wait side by side
        self.ended = False
        self.attempts: list[Cost] | None = None  # of a call tried again: shared by all of them
        self.start_s = 0.0
        self.wait_start_s = 0.0
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


class Charged(NamedTuple):
    """What a gateway has charged a program, to be remembered and told to other gateways."""

    sum_s: float = 0.0
    path_s: float = 0.0
    wait_path_s: float = 0.0


class Attained(NamedTuple):
    """Service and wait of a program in one measure, seconds."""

    service_s: float
    wait_s: float


class Account:
    """The attained service of one program; ``accounting`` says which measure is asked for."""

    __slots__ = ("accounting", "path", "sum")

    def __init__(self, accounting: Accounting = "plas") -> None:
        self.accounting = accounting
        self.sum = SumAccount()
        self.path = PathAccount()

    @property
    def service_s(self) -> float:
        """Attained service, seconds."""
        return self.sum.service_s if self.accounting == "plas" else self.path.longest().service_s

    def charged(self, running_s: float = 0.0, longest_running_s: float = 0.0) -> Charged:
        """Return what this gateway has charged; of paths, the whole of them.

        Args:
            running_s: What calls in flight have taken so far, together.
            longest_running_s: The longest of them.
        """
        path_s, wait_path_s = self.path.longest()
        return Charged(self.sum.own_s + running_s, path_s + longest_running_s, wait_path_s)

    def begin(self, cost: Cost) -> None:
        """Note that a call begins; a retry shares ``cost.attempts`` with its earlier attempts."""
        self.path.begin(cost)  # a sum does not care when a call began

    def change(self, cost: Cost, before_s: float) -> None:
        """Note that ``cost`` has changed; it was charged ``before_s``."""
        self.sum.change(cost, before_s)
        self.path.change(cost)

    def restore(self, charged: Charged) -> None:
        """Begin with this much, of an earlier life of the gateway."""
        self.sum.own_s = charged.sum_s
        self.path.raise_to(charged.path_s, charged.wait_path_s)

    def note_elsewhere(self, charged: Charged) -> None:
        """Note what other gateways have charged by now: together, and the longest paths."""
        self.sum.elsewhere_s = charged.sum_s
        self.path.raise_to(charged.path_s, charged.wait_path_s)


class SumAccount:
    """PLAS: the sum over all calls."""

    __slots__ = ("elsewhere_s", "own_s")

    def __init__(self) -> None:
        self.own_s = 0.0  # what this gateway has charged
        self.elsewhere_s = 0.0

    @property
    def service_s(self) -> float:
        """Attained service, seconds, of all gateways."""
        return self.own_s + self.elsewhere_s

    def change(self, cost: Cost, before_s: float) -> None:
        """Note that ``cost`` has changed; it was charged ``before_s``."""
        # rounding may leave less than nothing of a wall time that is taken back
        self.own_s = max(0.0, self.own_s + cost.charged_s - before_s)


class PathAccount:
    """ATLAS: service = max(service, service at the call's arrival + the call's time).

    The same for wait, whose longest path may be another one. What is not settled lies in the order
    of the calls' ends, so a call waits on earlier ones only.
    """

    __slots__ = ("_open", "_settled_s", "_settled_wait_s", "_unsettled")

    def __init__(self) -> None:
        self._settled_s = 0.0
        self._settled_wait_s = 0.0
        self._open: dict[int, Cost] = {}
        self._unsettled: dict[int, Cost] = {}  # ended, but the cost or the start may still change

    def longest(self) -> Attained:
        """Return the longest paths, with the best that is known of each call."""
        longest_s, longest_wait_s = self._settled_s, self._settled_wait_s
        ends: dict[int, tuple[float, float]] = {}
        for key, cost in self._unsettled.items():
            start_s, wait_start_s = cost.start_s, cost.wait_start_s
            for waited in cost.waits_on:
                end_s, wait_end_s = ends[id(waited)]
                start_s, wait_start_s = max(start_s, end_s), max(wait_start_s, wait_end_s)
            end_s, wait_end_s = ends[key] = start_s + cost.cost_s, wait_start_s + cost.wait_s
            longest_s, longest_wait_s = max(longest_s, end_s), max(longest_wait_s, wait_end_s)
        return Attained(longest_s, longest_wait_s)

    def begin(self, cost: Cost) -> None:
        """Note that a call begins; a retry starts where the call did."""
        first = cost.attempts[0] if cost.attempts else cost
        if first is not cost:
            cost.start_s, cost.wait_start_s = first.start_s, first.wait_start_s
            cost.waits_on = list(first.waits_on)
        else:
            cost.start_s, cost.wait_start_s = self._settled_s, self._settled_wait_s
            cost.waits_on = list(self._unsettled.values())
        self._open[id(cost)] = cost

    def change(self, cost: Cost) -> None:
        """Note that ``cost`` has changed."""
        if not cost.ended:
            return
        key = id(cost)
        if self._open.pop(key, None) is not None:
            self._unsettled[key] = cost
        elif key not in self._unsettled:  # settled already
            self.raise_to(cost.start_s + cost.cost_s, cost.wait_start_s + cost.wait_s)
            return
        if cost.reports and not cost.waits_on:
            self._settle_ready()
        if len(self._unsettled) > UNSETTLED_MAX:
            self._settle(next(iter(self._unsettled.values())))
            self._settle_ready()

    def raise_to(self, service_s: float, wait_s: float) -> None:
        """Note paths of this length; one that goes on elsewhere is a path all the same."""
        self._settled_s = max(self._settled_s, service_s)
        self._settled_wait_s = max(self._settled_wait_s, wait_s)

    def _settle_ready(self) -> None:
        again = True
        while again:
            again = False
            for cost in list(self._unsettled.values()):
                if cost.reports and not cost.waits_on:
                    self._settle(cost)
                    again = True

    def _settle(self, cost: Cost) -> None:
        """Fix the end of a call that waits on none."""
        assert not cost.waits_on, "a call ends after those that it waits on"
        del self._unsettled[id(cost)]
        end_s, wait_end_s = cost.start_s + cost.cost_s, cost.wait_start_s + cost.wait_s
        self.raise_to(end_s, wait_end_s)
        for later in (*self._unsettled.values(), *self._open.values()):
            if cost in later.waits_on:
                later.waits_on.remove(cost)
                later.start_s = max(later.start_s, end_s)
                later.wait_start_s = max(later.wait_start_s, wait_end_s)

"""What a program is charged: the sum of its calls (PLAS) and its longest path (ATLAS).

Both are kept all the time, so that a change of policy finds the figure that it goes by. Wait is
kept along its own longest path; its sum is the program's.

A call costs what its engine measured, and as long as no engine has told, the wall time that the
gateway saw; the measurement replaces the wall time whenever it comes. Of a call of several engine
requests (n = 3) a sum takes all of them, a path the longest. For a sum that is easy. For a path it
is not: the cost of a call is part of the start of the calls after it, which may have begun
before the measurement came. So a path is kept open, call by call, until its costs are settled.

What other gateways have charged is kept apart: it is assigned, as often as they say it, and is no
part of what this gateway says. Else two gateways that hear of each other's calls in flight would
raise each other without end. A path may go on from one gateway to another, so a call starts no
earlier than the paths elsewhere that were known when it began; there it stays.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Accounting = Literal["plas", "atlas"]

UNSETTLED_MAX: Final = 16  # more calls of one program without a measurement: the oldest keeps wall


class Start:
    """Where calls start that began at the same point of a program's path.

    They wait on all that had ended by then and is not settled yet.
    """

    __slots__ = ("after", "service_s", "wait_s")

    def __init__(self, after: int, service_s: float, wait_s: float) -> None:
        self.after = after  # how many calls of the program had ended
        self.service_s = service_s  # of what is settled; grows until all before it is
        self.wait_s = wait_s


class Cost:
    """What one call costs so far, and, for a path, where it starts and ends."""

    __slots__ = (
        "attempts", "end_number", "ended", "longest_s", "model_s", "reports", "start", "wait_s",
        "waiting", "wall_s",
    )  # fmt: skip

    start: Start  # from `PathAccount.begin` on

    def __init__(self) -> None:
        self.wall_s = 0.0  # counted from the end of the call on
        self.model_s = 0.0  # of its engine requests together
        self.longest_s = 0.0  # of one of them: they run side by side
        self.reports: tuple[str, ...] = ()  # the engine requests of this call that have reported
        self.wait_s = 0.0  # the longest of its engine requests, which wait side by side
        self.ended = False
        self.attempts: list[Cost] | None = None  # of a call tried again: shared by all of them
        self.end_number: int | None = None  # its place in the order of the program's ends
        self.waiting: list[Start] = []  # those that wait on this call

    @property
    def cost_s(self) -> float:
        """The measured time if there is one, else the wall time; 0 while nobody knows."""
        return self.model_s if self.reports else self.wall_s

    @property
    def path_s(self) -> float:
        """How much longer it makes a path: its longest engine request, or the wall time."""
        return self.longest_s if self.reports else self.wall_s

    def tell(self, mark: str, service_s: float, wait_s: float) -> None:
        """Add what one of its engine requests took, named by ``mark``."""
        self.reports += (mark,)
        self.model_s += service_s
        self.longest_s = max(self.longest_s, service_s)
        self.wait_s = max(self.wait_s, wait_s)

    def forget_reports(self) -> None:
        """Take back what was told of the service."""
        self.reports, self.model_s, self.longest_s = (), 0.0, 0.0

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

    def charged(self, running: Sequence[tuple[Cost, float]] = ()) -> Charged:
        """Return what this gateway has charged, what others have charged left out.

        Args:
            running: Calls in flight that no engine has told of, and the time so far of each, s.
        """
        path_s, wait_path_s = self.path.own([(cost.start, so_far_s) for cost, so_far_s in running])
        return Charged(
            self.sum.own_s + sum(so_far_s for _, so_far_s in running), path_s, wait_path_s
        )

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

    def recall(self, charged: Charged) -> None:
        """Add what this gateway had charged before it forgot the program."""
        self.sum.own_s += charged.sum_s
        self.path.raise_to(charged.path_s, charged.wait_path_s)

    def note_elsewhere(self, charged: Charged, ended_path_s: float | None = None) -> None:
        """Note what other gateways have charged by now: together, and the longest paths.

        It takes the place of what was noted before: a path elsewhere that was counted by wall time
        becomes shorter when its engine tells.

        Args:
            charged: Calls in flight there included.
            ended_path_s: The longest path of ended calls, which a call that begins now may come
                after; by default, all of ``charged.path_s``.
        """
        self.sum.elsewhere_s = charged.sum_s
        ended_s = charged.path_s if ended_path_s is None else ended_path_s
        self.path.note_elsewhere(charged.path_s, charged.wait_path_s, ended_s)


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
    of the calls' ends, and a call waits on a run of it from the first one on: on those that ended
    before it began. Each unsettled call lists the starts that wait on it, so settling one costs
    what there is to change and no more; a fan-out that begins at one point is one start. A start
    lies in ``UNSETTLED_MAX`` lists at most.
    """

    __slots__ = (
        "_elsewhere_ended_s", "_elsewhere_s", "_elsewhere_wait_s", "_ends", "_now", "_settled_s",
        "_settled_wait_s", "_unsettled",
    )  # fmt: skip

    def __init__(self) -> None:
        self._settled_s = 0.0
        self._settled_wait_s = 0.0
        self._elsewhere_s = 0.0
        self._elsewhere_ended_s = 0.0  # without what is in flight there
        self._elsewhere_wait_s = 0.0
        self._ends = 0  # how many calls have ended
        self._now: Start | None = None  # of a call that begins now; made by the first one
        self._unsettled: dict[int, Cost] = {}  # ended, but the cost or the start may still change

    def longest(self) -> Attained:
        """Return the longest paths of all gateways, with the best that is known of each call."""
        own_s, own_wait_s = self.own()
        return Attained(max(own_s, self._elsewhere_s), max(own_wait_s, self._elsewhere_wait_s))

    def own(self, running: Sequence[tuple[Start, float]] = ()) -> Attained:
        """Return the longest paths that end with a call of this gateway.

        Args:
            running: Starts of calls in flight to be counted too, and the time so far of each, s.
        """
        numbers: list[int] = []
        reached: list[Attained] = []  # the longest ends up to each number
        longest_s, longest_wait_s = 0.0, 0.0
        for number, cost in self._unsettled.items():
            start_s, wait_start_s = _start(cost.start, numbers, reached)
            longest_s = max(longest_s, start_s + cost.path_s)
            longest_wait_s = max(longest_wait_s, wait_start_s + cost.wait_s)
            numbers.append(number)
            reached.append(Attained(longest_s, longest_wait_s))
        longest_s = max(longest_s, self._settled_s)
        for start, so_far_s in running:
            longest_s = max(longest_s, _start(start, numbers, reached).service_s + so_far_s)
        return Attained(longest_s, max(longest_wait_s, self._settled_wait_s))

    def begin(self, cost: Cost) -> None:
        """Note that a call begins; a retry starts where the call did."""
        if cost.attempts:
            first = cost.attempts[0]
            if first is not cost:
                cost.start = first.start
                return
        if self._now is None:
            self._now = Start(
                self._ends,
                max(self._settled_s, self._elsewhere_ended_s),
                max(self._settled_wait_s, self._elsewhere_wait_s),
            )
            for waited in self._unsettled.values():
                waited.waiting.append(self._now)
        cost.start = self._now

    def change(self, cost: Cost) -> None:
        """Note that ``cost`` has changed."""
        if not cost.ended:
            return
        if cost.end_number is None:
            cost.end_number = self._ends
            self._unsettled[self._ends] = cost
            self._ends += 1
            self._now = None
        elif cost.end_number not in self._unsettled:  # settled already
            self.raise_to(cost.start.service_s + cost.path_s, cost.start.wait_s + cost.wait_s)
            return
        if cost.reports and self._is_first(cost.start):
            self._settle_ready()
        if len(self._unsettled) > UNSETTLED_MAX:
            self._settle(next(iter(self._unsettled.values())))
            self._settle_ready()

    def note_elsewhere(self, service_s: float, wait_s: float, ended_s: float) -> None:
        """Note the longest paths elsewhere; a call that begins later may come after what ended."""
        self._elsewhere_s = service_s
        if (ended_s, wait_s) != (self._elsewhere_ended_s, self._elsewhere_wait_s):
            self._elsewhere_ended_s, self._elsewhere_wait_s = ended_s, wait_s
            self._now = None

    def raise_to(self, service_s: float, wait_s: float) -> None:
        """Note settled paths of this length."""
        self._settled_s = max(self._settled_s, service_s)
        self._settled_wait_s = max(self._settled_wait_s, wait_s)
        self._now = None

    def _settle_ready(self) -> None:
        """Settle what has been told of and waits on none, in the order of the ends.

        A call waits on earlier ones only, so one pass is enough.
        """
        for cost in list(self._unsettled.values()):
            if cost.reports and self._is_first(cost.start):
                self._settle(cost)

    def _is_first(self, start: Start) -> bool:
        """Return whether calls of this start wait on none."""
        return next(iter(self._unsettled)) >= start.after

    def _settle(self, cost: Cost) -> None:
        """Fix the end of a call that waits on none."""
        assert self._is_first(cost.start), "a call ends after those that it waits on"
        assert cost.end_number is not None
        del self._unsettled[cost.end_number]
        end_s, wait_end_s = cost.start.service_s + cost.path_s, cost.start.wait_s + cost.wait_s
        self.raise_to(end_s, wait_end_s)
        for later in cost.waiting:
            later.service_s = max(later.service_s, end_s)
            later.wait_s = max(later.wait_s, wait_end_s)
        cost.waiting.clear()


def _start(start: Start, numbers: Sequence[int], reached: Sequence[Attained]) -> Attained:
    """Return where a call starts; ``reached`` is the longest end up to each of ``numbers``."""
    before = bisect_left(numbers, start.after)
    if not before:
        return Attained(start.service_s, start.wait_s)
    service_s, wait_s = reached[before - 1]
    return Attained(max(start.service_s, service_s), max(start.wait_s, wait_s))

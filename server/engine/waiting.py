"""The waiting queue of vLLM, ordered by the policy: every event costs O(log n).

vLLM's admission loop looks at the front of the queue and stops at the first call that does not fit.
So the front that it is shown is the best call that does fit, by an estimate; who is passed over too
often is passed no more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from ..policy.call import Key

PASSED_MAX = 16  # calls that may be passed over in one step


def _nothing() -> None:
    """Do nothing."""


class WaitingQueue(RequestQueue):
    """Waiting calls, best first.

    Args:
        key_of: The place of a call, the smallest first; asked when it enters or ``moved``.
        fits: Whether it would find room now; None: everybody is shown.
        skip_steps: Steps in which a call may be passed over.

    Attributes:
        gate: Level up to which calls are shown; None: all.
        before_show: Called when a call is asked for.
    """

    def __init__(
        self,
        key_of: Callable[[Request], Key],
        fits: Callable[[Request], bool] | None = None,
        skip_steps: int = 0,
    ) -> None:
        self._key_of = key_of
        self._fits = fits
        self._skip_steps = skip_steps
        self._heap: list[tuple[Key, int, Request]] = []
        self._entries: dict[Request, tuple[int, int]] = {}  # valid heap entry and level of each
        self._by_level: dict[int, int] = {}  # calls in the heap by level
        self._held: dict[Request, None] = {}  # in the queue, but not shown in this step
        self._passed: dict[Request, int] = {}  # steps in which it was passed over
        self._passing: set[Request] = set()  # passed over in this step
        self._shown: Request | None = None
        self._number = 0
        self.gate: int | None = None
        self.before_show: Callable[[], None] = _nothing

    def add_request(self, request: Request) -> None:
        """Put a call in its place."""
        key = self._key_of(request)
        self._forget_entry(request)
        self._number += 1
        self._entries[request] = (self._number, key[0])
        self._by_level[key[0]] = self._by_level.get(key[0], 0) + 1
        heapq.heappush(self._heap, (key, self._number, request))

    def prepend_request(self, request: Request) -> None:
        """Put a call in its place; the policy knows no front."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put calls in their places."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the best call that fits.

        Raises:
            IndexError: there is none to be shown.
        """
        request = self._show()
        if request is None:
            raise IndexError("peek from an empty queue")
        return request

    def pop_request(self) -> Request:
        """Take out the call that ``peek_request`` showed."""
        request = self.peek_request()
        self._drop(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Take out a call, wherever it is. Harmless if it is not here."""
        self._drop(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out calls. Those that are not here do not matter."""
        for request in requests:
            self._drop(request)

    def moved(self, request: Request) -> None:
        """Note that the policy has given a call another place. Harmless if it is not here."""
        if request in self._entries:
            self.add_request(request)

    def hold(self, request: Request) -> None:
        """Hide a call until ``end_step``: a victim must not return in the step that took it out."""
        if self._forget_entry(request):
            self._held[request] = None

    def begin_step(self) -> None:
        """Begin a round of admission: everybody may be shown again."""
        self._shown = None
        for request in self._passing:
            if request in self._entries:
                self.add_request(request)
        self._passing.clear()

    def end_step(self) -> None:
        """End the round: who was hidden in it is back."""
        self.begin_step()
        held, self._held = self._held, {}
        for request in held:
            self.add_request(request)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def reorder(self, fits: Callable[[Request], bool] | None, skip_steps: int) -> None:
        """Ask for every call's place anew, after a change of policy."""
        self._fits = fits
        self._skip_steps = skip_steps
        requests = (*self._entries, *self._held)
        self._heap.clear()
        for request in requests:
            self.add_request(request)
        self._held.clear()

    def count(self, level: int) -> int:
        """Return how many calls of a level wait."""
        return self._by_level.get(level, 0)

    def best(self, limit: int) -> Iterator[Request]:
        """Yield up to ``limit`` calls, best first, fitting or not. Do not change the queue."""
        seen = []
        try:
            for _ in range(limit):
                self._drop_stale()
                if not self._heap:
                    return
                entry = heapq.heappop(self._heap)
                seen.append(entry)
                yield entry[2]
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def first_key(self) -> Key | None:
        """Return the place of the best call, fitting or not; None if there is none."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def __bool__(self) -> bool:
        return self._show() is not None

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def __contains__(self, request: object) -> bool:
        return request in self._entries or request in self._held

    def __iter__(self) -> Iterator[Request]:
        """Go over all calls, best first."""
        return iter(sorted((*self._entries, *self._held), key=self._key_of))

    def _show(self) -> Request | None:
        if self._shown is not None and self._shown in self._entries:
            return self._shown
        self._shown = None
        self.before_show()
        while True:
            self._drop_stale()
            if not self._heap or (self.gate is not None and self._heap[0][0][0] > self.gate):
                return None
            request = self._heap[0][2]
            if self._fits is None or self._fits(request):
                self._shown = request
                return request
            passed = self._passed.get(request, 0)
            if passed >= self._skip_steps or len(self._passing) >= PASSED_MAX:
                return None  # it keeps its place, and nobody passes it
            self._passed[request] = passed + 1
            self._passing.add(request)
            heapq.heappop(self._heap)

    def _drop(self, request: Request) -> None:
        self._forget_entry(request)
        self._held.pop(request, None)
        self._passed.pop(request, None)
        if self._shown is request:
            self._shown = None

    def _drop_stale(self) -> None:
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_valid(self, entry: tuple[Key, int, Request]) -> bool:
        valid = self._entries.get(entry[2])
        return valid is not None and valid[0] == entry[1]

    def _forget_entry(self, request: Request) -> bool:
        entry = self._entries.pop(request, None)
        if entry is None:
            return False
        self._by_level[entry[1]] -= 1
        return True

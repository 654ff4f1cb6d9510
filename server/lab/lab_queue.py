"""Waiting queues of the lab's own arms, under vLLM's scheduler.

An order is a function from a call to a key, lower first. It is looked at when the call enters the
queue and again when its program changes, so every event costs O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue

from .cost_model import Profile
from .run_state import CallRun, ProgramRun

Key = tuple[float, ...]
Order = Callable[[CallRun], Key]


class OrderedQueue(RequestQueue):
    """A waiting queue in the order of a key.

    Args:
        order: The key of a call.
        runs: The calls by request id.
    """

    def __init__(self, order: Order, runs: dict[str, CallRun]) -> None:
        self._order = order
        self._runs = runs
        self._heap: list[tuple[Key, int, Any]] = []
        self._entry: dict[str, int] = {}  # request id → the number of its valid entry
        self._requests: dict[str, Any] = {}
        self._number = 0

    def add_request(self, request: Any) -> None:
        """Put a request at its place."""
        self._number += 1
        self._requests[request.request_id] = request
        self._entry[request.request_id] = self._number
        key = self._order(self._runs[request.request_id])
        heapq.heappush(self._heap, (key, self._number, request))

    def rekey(self, request_ids: Iterable[str]) -> None:
        """Look at the keys of these requests again; those that do not wait are passed over."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self.add_request(request)

    def peek_request(self) -> Any:
        """Return the first request."""
        self._drop_stale()
        if not self._heap:
            raise IndexError("peek from an empty queue")
        return self._heap[0][2]

    def pop_request(self) -> Any:
        """Remove and return the first request."""
        request = self.peek_request()
        heapq.heappop(self._heap)
        self._forget(request)
        return request

    def prepend_request(self, request: Any) -> None:
        """Put a request at its place: the key decides, not the end it comes in at."""
        self.add_request(request)

    def prepend_requests(self, requests: Any) -> None:
        """Put requests at their places."""
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        """Remove a request."""
        if request.request_id not in self._entry:
            raise ValueError(f"{request.request_id} does not wait")
        self._forget(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove those of the requests that wait."""
        for request in requests:
            if request.request_id in self._entry:
                self._forget(request)

    def _forget(self, request: Any) -> None:
        del self._entry[request.request_id], self._requests[request.request_id]

    def _drop_stale(self) -> None:
        while self._heap and self._entry.get(self._heap[0][2].request_id) != self._heap[0][1]:
            heapq.heappop(self._heap)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(
            [r for _, number, r in sorted(self._heap) if self._entry.get(r.request_id) == number]
        )


class OrderedScheduler(AsyncScheduler):
    """vLLM's scheduler with an ordered queue, and preemption for what stands before the batch.

    ``running`` is sorted best-first before each step, so that vLLM's own victim is the worst call.
    """

    preempts = False
    window_steps = 4  # how often preemption is considered

    def order_by(self, order: Order, runs: dict[str, CallRun]) -> None:
        """Set the order; must be called before the first request."""
        self.lab_order = order
        self.lab_runs = runs
        self.lab_steps = 0
        self.waiting = OrderedQueue(order, runs)

    def make_room(self, now_s: float) -> None:
        """Preempt the worst running calls for the best waiting ones that do not fit."""
        self.lab_steps += 1
        self.running.sort(key=lambda r: self.lab_order(self.lab_runs[r.request_id]))
        if not self.preempts or self.lab_steps % self.window_steps or not self.waiting:
            return
        if any(r.num_stale_output_tokens for r in self.running):
            return
        first = self.waiting.peek_request()
        key = self.lab_order(self.lab_runs[first.request_id])
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        need = -(-first.num_tokens // self.block_size)
        slots = self.max_num_running_reqs - len(self.running)
        while self.running and (slots <= 0 or need > free):
            worst = self.running[-1]
            if self.lab_order(self.lab_runs[worst.request_id]) <= key:
                return
            self.running.pop()
            free += len(self.kv_cache_manager.get_block_ids(worst.request_id)[0])
            slots += 1
            self._preempt_request(worst, now_s)
            self.prev_step_scheduled_req_ids.discard(worst.request_id)


class PreemptingScheduler(OrderedScheduler):
    """The same, with preemption on."""

    preempts = True


class OrderedSeat:
    """A scheduler with a lab order.

    Args:
        profile: Its limits.
        order: The key of a call.
        preempts: Whether a better call in the queue displaces a running one.
    """

    promotions = 0

    def __init__(self, profile: Profile, order: Order, *, preempts: bool) -> None:
        from .arms import RequestMaker, scheduler_of

        self.scheduler = scheduler_of(
            profile, PreemptingScheduler if preempts else OrderedScheduler
        )
        self._runs: dict[str, CallRun] = {}
        self._waiting_of: dict[int, set[str]] = {}
        self._make = RequestMaker(profile.block_tokens)
        self.scheduler.order_by(order, self._runs)

    def add(self, run: CallRun, now_s: float) -> None:
        """Hand the call over."""
        self._runs[run.request_id] = run
        self._waiting_of.setdefault(run.program.number, set()).add(run.request_id)
        self.scheduler.add_request(self._make(run, now_s))

    def tell(self, now_s: float) -> None:
        """Do nothing: the orders know no time."""

    def before_step(self, now_s: float) -> None:
        """Sort what runs, and preempt if the order asks for it."""
        self.scheduler.make_room(now_s)

    def after_finish(self, run: CallRun, now_s: float) -> None:  # noqa: ARG002
        """Give the program's other calls their new places."""
        del self._runs[run.request_id]
        others = self._waiting_of[run.program.number]
        others.discard(run.request_id)
        if others:
            self.scheduler.waiting.rekey(sorted(others))
        else:
            del self._waiting_of[run.program.number]


class AdmittingSeat(OrderedSeat):
    """Programs enter, in a given order, only as their KV working set fits; then the order rules.

    Args:
        profile: Its limits.
        order: The key of a call among those that are in.
        door: The key of a program at the door.
        room: The KV tokens to keep for a program.
        preempts: Whether a better call displaces a running one.
        share: How much of the KV cache is given away.
    """

    def __init__(
        self,
        profile: Profile,
        order: Order,
        *,
        door: Callable[[ProgramRun], Key],
        room: Callable[[ProgramRun, CallRun], float],
        preempts: bool = False,
        share: float = 0.95,
    ) -> None:
        super().__init__(profile, order, preempts=preempts)
        self._door = door
        self._room = room
        self._limit = profile.kv_tokens * share
        self._taken = 0.0
        self._inside: dict[int, float] = {}  # program → tokens kept for it
        self._outside: list[tuple[Key, int]] = []
        self._held: dict[int, list[CallRun]] = {}

    def add(self, run: CallRun, now_s: float) -> None:
        """Hand the call over if its program is in, else keep it at the door."""
        number = run.program.number
        if number in self._inside:
            self._grow(run)
            super().add(run, now_s)
            return
        if number not in self._held:
            heapq.heappush(self._outside, (self._door(run.program), number))
        self._held.setdefault(number, []).append(run)

    def before_step(self, now_s: float) -> None:
        """Let in what fits, at least one program."""
        while self._outside:
            number = self._outside[0][1]
            runs = self._held[number]
            tokens = max(self._room(run.program, run) for run in runs)
            if self._inside and self._taken + tokens > self._limit:
                break
            heapq.heappop(self._outside)
            del self._held[number]
            self._inside[number] = tokens
            self._taken += tokens
            for run in runs:
                super().add(run, now_s)
        super().before_step(now_s)

    def after_finish(self, run: CallRun, now_s: float) -> None:
        """Give the room back with the program's last call."""
        super().after_finish(run, now_s)
        if run.program.calls_left == 1:  # this call; it is taken off after us
            self._taken -= self._inside.pop(run.program.number)

    def _grow(self, run: CallRun) -> None:
        number = run.program.number
        more = max(0.0, self._room(run.program, run) - self._inside[number])
        self._inside[number] += more
        self._taken += more

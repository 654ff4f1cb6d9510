"""A coarse engine for fleets: what an engine decides, without vLLM, and many times quicker.

A study of balancers runs hundreds of engine-hours. This engine keeps what placement acts on: slots,
the step's token budget, chunked prefill, a KV cache with prefix hits and least-recently-used
eviction, preemption by recompute when decoding runs out of room, the order of the queue, and the
step time of the cost model. It leaves out vLLM's own code paths, preemption by level, quanta inside
a call, promotion, and the rounding of segments to blocks. docs/balancer.md sets its figures beside
those of the real scheduler.

Time goes by in stretches: steps in which only decoding goes on are taken together, up to the next
step at which a call ends, and cut short at a step's end when a call arrives.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from .cost_model import Profile, Work
from .run_state import CallRun
from .virtual_engine import EngineTotals

LEVELS_S: Final = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0)  # attained service at which levels begin
STRETCH_MAX: Final = 256  # steps

Key = tuple[float, ...]
Order = Callable[[CallRun], Key]


def arrival_order(run: CallRun) -> Key:
    """Order by the call's arrival."""
    return (run.arrival_s,)


def level_order(run: CallRun) -> Key:
    """Order by the level of the program's service, then the program's arrival."""
    service_s = run.program.service_s
    level = sum(service_s >= bound for bound in LEVELS_S)
    return (level, run.program.arrival_s, run.arrival_s)


#: The arms that run on this engine.
ORDERS: Final[dict[str, Order]] = {"coarse-fcfs": arrival_order, "coarse-plas": level_order}


class _Seat:
    """A call in the engine."""

    __slots__ = ("base", "done", "end_number", "end_step", "key", "left", "run", "started_busy_s")

    def __init__(self, run: CallRun, key: Key) -> None:
        self.run = run
        self.key = key
        self.done = 0  # tokens that it has generated
        self.base = 0  # … when it was admitted
        self.left = 0  # tokens to compute before it decodes
        self.end_step = -1  # when it generates its last token
        self.end_number = -1  # of that entry in the engine's heap
        self.started_busy_s = 0.0

    def __lt__(self, other: _Seat) -> bool:
        return self.key < other.key

    @property
    def held(self) -> int:
        """The tokens it needs room for."""
        return self.run.call.prompt_tokens + self.done


class Cache:
    """Which beginnings of segments are in memory, and which of them calls hold.

    A segment follows one beginning only, so its number stands for everything before it too.

    Args:
        capacity: Tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0  # tokens of segments that calls hold
        self.idle = 0  # … that none holds: they may be evicted
        self._tokens: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    def find(self, run: CallRun, tokens: int, block: int) -> tuple[int, int]:
        """Return how many of a call's first tokens are there, and how many it would add."""
        hit = added = at = 0
        whole = True
        for segment, _, count in run.prompt.pieces:
            count = min(count, tokens - at)
            have = self._tokens.get(segment, 0)
            if whole:
                hit += min(have, count)
                whole = have >= count
            added += max(0, count - have) + (0 if segment in self._holders else have)
            at += count
            if at >= tokens:
                break
        return min(hit // block * block, tokens - 1), added

    def take(self, run: CallRun, tokens: int) -> None:
        """Hold a call's first tokens."""
        at = 0
        for segment, _, count in run.prompt.pieces:
            count = min(count, tokens - at)
            have = self._tokens.get(segment, 0)
            holders = self._holders.get(segment, 0)
            if not holders and segment in self._idle:
                del self._idle[segment]
                self.idle -= have
                self.held += have
            if count > have:
                self.held += count - have
                self._tokens[segment] = count
            self._holders[segment] = holders + 1
            at += count
            if at >= tokens:
                break

    def release(self, run: CallRun, tokens: int, taken: int) -> None:
        """Let go of a call's first ``taken`` tokens; it has made them ``tokens``."""
        pieces, at = [], 0
        for segment, _, count in run.prompt.pieces:
            pieces.append((segment, min(count, tokens - at)))
            at += count
            if at >= taken:
                break
        own, count = pieces[-1]
        self.held += max(0, count - self._tokens[own])
        self._tokens[own] = max(count, self._tokens[own])
        for segment, _ in reversed(pieces):  # the end is evicted before the beginning
            holders = self._holders[segment] - 1
            if holders:
                self._holders[segment] = holders
                continue
            del self._holders[segment]
            self.held -= self._tokens[segment]
            self.idle += self._tokens[segment]
            self._idle[segment] = None

    def evict(self, need: int) -> None:
        """Make room for ``need`` tokens besides those that are held."""
        over = self.held + self.idle + need - self.capacity
        while over > 0 and self._idle:
            segment = next(iter(self._idle))
            tokens = self._tokens[segment]
            if tokens > over:
                self._tokens[segment] = tokens - over
                self.idle -= over
                return
            del self._idle[segment], self._tokens[segment]
            self.idle -= tokens
            over -= tokens


class CoarseEngine:
    """One engine; driven like a `VirtualEngine`, one stretch at a time.

    Args:
        profile: What steps cost.
        order: Of the queue.
        index: Its place among the engines.
    """

    def __init__(self, profile: Profile, order: Order, index: int = 0) -> None:
        self.index = index
        self.runs: dict[str, CallRun] = {}
        self.totals = EngineTotals()
        self.has_batch = False
        self.end_s = 0.0
        self._profile = profile
        self._order = order
        self._waiting: list[_Seat] = []
        self._prefilling: list[_Seat] = []
        self._decoding: dict[str, _Seat] = {}
        self._ends: list[tuple[int, int, _Seat]] = []  # (step, number, call), some out of date
        self._ends_made = 0
        self._step = 0
        self._steps = 0  # of this stretch
        self._step_s = 0.0
        self._start_s = 0.0
        self._busy_s = 0.0
        self._context = 0  # tokens of the decoding calls
        self._grown = 0  # of those, generated since they were admitted
        self._cache = Cache(profile.kv_tokens)
        self._first: list[_Seat] = []  # whose prompt ends in this step

    @property
    def calls(self) -> int:
        """Calls in the engine, running and waiting."""
        return len(self.runs)

    @property
    def waiting(self) -> int:
        """Calls that hold no slot."""
        return len(self._waiting)

    def add(self, run: CallRun, now_s: float) -> None:  # noqa: ARG002
        """Take a call."""
        self.runs[run.request_id] = run
        heapq.heappush(self._waiting, _Seat(run, self._order(run)))
        self.totals.prompt_tokens += run.call.prompt_tokens

    def cut(self, now_s: float) -> float | None:
        """End the stretch with the step under way; return when, None if that is no change."""
        if self._steps <= 1:
            return None
        steps = min(self._steps, int((now_s - self._start_s) / self._step_s) + 1)
        if steps == self._steps:
            return None
        self._steps = steps
        self.end_s = self._start_s + steps * self._step_s
        return self.end_s

    def launch(self, now_s: float) -> float | None:
        """Begin a stretch; return when it ends, None if there is nothing to do."""
        if self.has_batch or not self.runs:
            return None
        self._make_room()
        decoding = len(self._decoding)
        tokens, pairs, context = self._chunks(self._profile.chunk_tokens - decoding)
        self._steps = 1 if tokens else self._stretch(decoding)
        middle = self._context + decoding * (self._steps + 1) // 2
        calls = decoding + len(self._prefilling) + len(self._first)
        work = Work(decoding + tokens, middle + context, middle + pairs, calls)
        self._step_s = self._profile.step_s(work)
        self._start_s = now_s
        self.end_s = now_s + self._steps * self._step_s
        self.has_batch = True
        return self.end_s

    def land(self, now_s: float) -> list[CallRun]:
        """End the stretch; return the calls that are over."""
        self.has_batch = False
        self._step += self._steps
        self._busy_s += self._steps * self._step_s
        grown = len(self._decoding) * self._steps
        self._context += grown
        self._grown += grown
        self._count(grown)
        over = []
        while self._ends and self._ends[0][0] <= self._step:
            _, number, seat = heapq.heappop(self._ends)
            if seat.end_number == number:
                over.append(seat)
        for seat in self._first:
            seat.done += 1
            if seat.run.first_token_s is None:
                seat.run.first_token_s = now_s
            self._begin_decoding(seat, over)
        self._first = []
        for seat in over:
            self._finish(seat, now_s)
        return [seat.run for seat in over]

    def _stretch(self, decoding: int) -> int:
        """Return how many steps nothing but decoding happens."""
        while self._ends and self._ends[0][2].end_number != self._ends[0][1]:
            heapq.heappop(self._ends)
        if not self._ends:
            return 1
        steps = min(self._ends[0][0] - self._step, STRETCH_MAX)
        room = self._cache.capacity - self._cache.held - self._grown
        return max(1, min(steps, room // max(1, decoding)))

    def _begin_decoding(self, seat: _Seat, over: list[_Seat]) -> None:
        self._decoding[seat.run.request_id] = seat
        self._context += seat.held
        self._grown += seat.done - seat.base
        left = seat.run.call.output_tokens - seat.done
        seat.end_step = self._step + left
        if left <= 0:
            over.append(seat)
        else:
            self._ends_made = seat.end_number = self._ends_made + 1
            heapq.heappush(self._ends, (seat.end_step, self._ends_made, seat))

    def _finish(self, seat: _Seat, now_s: float) -> None:
        run = seat.run
        self._leave(seat)
        run.finished_s = run.last_token_s = now_s
        del self.runs[run.request_id]

    def _leave(self, seat: _Seat) -> None:
        """Take a decoding call out of the batch; what it made stays in the cache."""
        run = seat.run
        del self._decoding[run.request_id]
        generated = run.call.output_tokens - max(0, seat.end_step - self._step)
        self._context -= run.call.prompt_tokens + generated
        self._grown -= generated - seat.base
        taken = run.call.prompt_tokens + seat.base
        seat.done = generated
        run.service_s += self._busy_s - seat.started_busy_s
        self._cache.release(run, seat.held, taken)
        self._cache.evict(self._grown)

    def _make_room(self) -> None:
        """Preempt, worst first, while what runs does not fit."""
        cache = self._cache
        while len(self._decoding) > 1 and (
            cache.held + self._grown + len(self._decoding) > cache.capacity
        ):
            worst = max(self._decoding.values())
            self._leave(worst)
            worst.end_step = worst.end_number = -1
            worst.base = worst.done
            self.totals.preemptions += 1
            heapq.heappush(self._waiting, worst)
        cache.evict(self._grown + len(self._decoding))

    def _chunks(self, budget: int) -> tuple[int, int, int]:
        """Give the step's budget to prompts; return tokens, pairs and context of them."""
        total = pairs = context = 0
        still: list[_Seat] = []
        queue = self._prefilling
        while total < budget:
            if queue:
                seat = queue.pop(0)
            elif self._waiting and self._has_room(len(still)):
                seat = heapq.heappop(self._waiting)
                self._admit(seat)
            else:
                break
            take = min(seat.left, budget - total)
            seat.left -= take
            end = seat.held - seat.left
            total += take
            pairs += take * (end - take // 2)
            context += end
            if seat.left:
                still.append(seat)
            else:
                self._first.append(seat)
        self._prefilling = still + queue
        return total, pairs, context

    def _has_room(self, prefilling: int) -> bool:
        seats = len(self._decoding) + prefilling + len(self._first)
        if seats >= self._profile.slots:
            return False
        if not seats:
            return True
        seat = self._waiting[0]
        cache = self._cache
        _, added = cache.find(seat.run, seat.held, self._profile.block_tokens)
        return cache.held + self._grown + len(self._decoding) + added <= cache.capacity

    def _admit(self, seat: _Seat) -> None:
        run = seat.run
        hit, _ = self._cache.find(run, seat.held, self._profile.block_tokens)
        self._cache.take(run, seat.held)
        self._cache.evict(self._grown)
        seat.left = seat.held - hit
        seat.started_busy_s = self._busy_s
        if run.started_s is None:
            run.started_s = 0.0
            run.hit_tokens = hit
            self.totals.hit_tokens += hit
        else:
            self.totals.recomputed_tokens += seat.left
            run.recomputed_tokens += seat.left
        self.totals.computed_tokens += seat.left

    def _count(self, grown: int) -> None:
        totals, steps = self.totals, self._steps
        totals.steps += steps
        totals.busy_s += steps * self._step_s
        totals.calls_in_steps += grown + len(self._prefilling) + len(self._first)
        totals.computed_tokens += grown
        used = (self._cache.held + self._grown) // self._profile.block_tokens
        totals.kv_used_blocks += used * steps
        totals.waiting_calls += len(self._waiting) * steps

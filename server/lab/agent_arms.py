"""Two published ways to serve agents, written anew from their papers, to compare with.

``continuum`` (CacheTTL, arXiv 2511.02230): a finished call's KV is pinned for the time to live that
is worth most, argmax over the gaps seen so far of P(gap <= t) x (T x eta + reload) - t, where T is
the mean wait of a call that was not pinned, eta = -corr(calls done, calls left) over finished
programs, and reload the prefill of the context. Order: preempted calls, calls whose KV is pinned,
program arrival. If nothing fits, the pin of the program that came last goes first.

``thunder`` (ThunderAgent, arXiv 2602.13692): programs count with their tokens, those in a tool with
tokens x 2^-t (t in steps of the tick). Every 5 s, above 95 % of the KV programs are paused down to
80 %, those in a tool first, the shortest first; paused ones come back smallest first as they fit. A
pause is over at the latest after 1,800 s. Paused programs' calls are held back; a new program that
does not fit begins paused.

Both stand under vLLM's own scheduler. What the papers leave open is chosen as said here.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

from .clairvoyant import program_order
from .cost_model import Profile
from .lab_queue import OrderedSeat
from .run_state import CallRun, ProgramRun

GAPS_MAX: Final = 200
CANDIDATES: Final = 16
PAUSE_ABOVE: Final = 0.95
PAUSE_DOWN_TO: Final = 0.80
TICK_S: Final = 5.0
PAUSE_MAX_S: Final = 1800.0


class ContinuumSeat(OrderedSeat):
    """See the module."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile, self._key, preempts=False)
        self._profile = profile
        self._pins: dict[int, tuple[float, float, list[Any]]] = {}  # until, program arrival, blocks
        self._left_s: dict[int, float] = {}  # program → when its last call ended
        self._gaps: list[float] = []
        self._missed_wait_s = 0.0  # T
        self._ends: list[tuple[int, int]] = []  # (calls done, calls left) of finished programs
        self._pinned_calls: set[str] = set()
        self._now_s = 0.0

    def _key(self, run: CallRun) -> tuple[float, ...]:
        preempted = run.request is not None and run.request.num_preemptions > 0
        pinned = run.request_id in self._pinned_calls
        return (not preempted, not pinned, *program_order(run))

    def add(self, run: CallRun, now_s: float) -> None:
        """Hand the call over; its program's pin has done its work once it is in the queue."""
        number = run.program.number
        left_s = self._left_s.pop(number, None)
        if left_s is not None:
            self._gaps = [*self._gaps[-GAPS_MAX:], now_s - left_s]
        if number in self._pins:
            self._pinned_calls.add(run.request_id)
            until_s, arrival_s, blocks = self._pins[number]
            self._pins[number] = (float("inf"), arrival_s, blocks)  # until it runs
            del until_s
        super().add(run, now_s)

    def before_step(self, now_s: float) -> None:
        """Let pins go whose time is over, and the last ones if nothing else runs or fits."""
        self._now_s = now_s
        for number in [n for n, (until_s, _, _) in self._pins.items() if until_s < now_s]:
            self._unpin(number)
        scheduler = self.scheduler
        for number in [n for n in self._pins if self._runs_now(n)]:
            self._unpin(number)
        pool = scheduler.kv_cache_manager.block_pool
        while self._pins and scheduler.waiting:
            need = -(-scheduler.waiting.peek_request().num_tokens // scheduler.block_size)
            if scheduler.running and need <= pool.get_num_free_blocks():
                break
            if not scheduler.running or pool.get_num_free_blocks() < len(scheduler.running):
                self._unpin(max(self._pins, key=lambda n: self._pins[n][1]))
            else:
                break
        super().before_step(now_s)

    def after_finish(self, run: CallRun, now_s: float) -> None:
        """Pin the call's blocks, if its program goes on."""
        super().after_finish(run, now_s)
        self._pinned_calls.discard(run.request_id)
        program = run.program
        if run.call.parents and not run.hit_tokens:
            self._missed_wait_s += (run.wait_s - self._missed_wait_s) / 32
        left = program.calls_left - 1
        self._ends = [*self._ends[-1000:], (len(program.program.calls) - left, left)]
        if not left:
            self._unpin(program.number)
            self._left_s.pop(program.number, None)
            return
        self._left_s[program.number] = now_s
        keep_s = self._time_to_live_s(run)
        pool = self.scheduler.kv_cache_manager.block_pool
        blocks = []
        for block_hash in run.request.block_hashes:
            found = pool.get_cached_block(block_hash, [0])
            if not found:
                break
            blocks.append(found[0])
        self._unpin(program.number)
        pool.touch(blocks)
        self._pins[program.number] = (now_s + keep_s, program.arrival_s, blocks)

    def _time_to_live_s(self, run: CallRun) -> float:
        if not self._gaps:
            return 0.0
        new = run.call.prompt_tokens + run.call.output_tokens
        reload_s = self._profile.work_s(0, new, 1)
        worth_s = self._missed_wait_s * max(0.0, self._eta()) + reload_s
        gaps = sorted(self._gaps)
        best = max(
            range(0, len(gaps), max(1, len(gaps) // CANDIDATES)),
            key=lambda at: (at + 1) / len(gaps) * worth_s - gaps[at],
        )
        return gaps[best]

    def _eta(self) -> float:
        n = len(self._ends)
        mean_x = sum(x for x, _ in self._ends) / n
        mean_y = sum(y for _, y in self._ends) / n
        xx = sum((x - mean_x) ** 2 for x, _ in self._ends)
        yy = sum((y - mean_y) ** 2 for _, y in self._ends)
        xy = sum((x - mean_x) * (y - mean_y) for x, y in self._ends)
        return float(-xy / (xx * yy) ** 0.5) if xx and yy else 0.0

    def _runs_now(self, number: int) -> bool:
        waiting = self._waiting_of.get(number, ())
        return any(self._runs[name].started_s is not None for name in waiting)

    def _unpin(self, number: int) -> None:
        pin = self._pins.pop(number, None)
        if pin is not None:
            self.scheduler.kv_cache_manager.block_pool.free_blocks(reversed(pin[2]))


class ThunderSeat(OrderedSeat):
    """See the module."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile, program_order, preempts=False)
        self._kv_tokens = float(profile.kv_tokens)
        self._tokens: dict[int, float] = {}
        self._acting_since_s: dict[int, float] = {}
        self._calls: dict[int, int] = {}
        self._paused: dict[int, float] = {}
        self._held: dict[int, list[CallRun]] = {}
        self._next_tick_s = 0.0

    def add(self, run: CallRun, now_s: float) -> None:
        """Hand the call over, or hold it back if its program is paused or does not fit."""
        program: ProgramRun = run.program
        number = program.number
        tokens = float(run.call.prompt_tokens)
        if (
            number not in self._tokens
            and self._calls
            and self._used(now_s) + tokens > (PAUSE_ABOVE * self._kv_tokens)
        ):
            self._paused[number] = now_s
        self._tokens[number] = max(tokens, self._tokens.get(number, 0.0))
        self._acting_since_s.pop(number, None)
        if number in self._paused:
            self._held.setdefault(number, []).append(run)
            return
        self._calls[number] = self._calls.get(number, 0) + 1
        super().add(run, now_s)

    def before_step(self, now_s: float) -> None:
        """Every tick pause what is too much and let in what fits; never nobody."""
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._pause(now_s)
            self._resume(now_s)
        if not self._calls and self._held:
            self._wake(min(self._held, key=lambda n: self._tokens[n]), now_s)
        super().before_step(now_s)

    def after_finish(self, run: CallRun, now_s: float) -> None:
        """The program acts from now on, or is over."""
        super().after_finish(run, now_s)
        number = run.program.number
        self._calls[number] -= 1
        if not self._calls[number]:
            del self._calls[number]
            self._acting_since_s[number] = now_s
        if run.program.calls_left == 1:  # this call; it is taken off after us
            for book in (self._tokens, self._acting_since_s, self._paused):
                book.pop(number, None)
        else:
            total = float(run.call.prompt_tokens + run.call.output_tokens)
            self._tokens[number] = max(total, self._tokens[number])

    def _used(self, now_s: float) -> float:
        used = 0.0
        for number, tokens in self._tokens.items():
            if number not in self._paused:
                since_s = self._acting_since_s.get(number)
                age = 0.0 if since_s is None else (now_s - since_s) / TICK_S
                used += tokens * 2.0**-age
        return used

    def _pause(self, now_s: float) -> None:
        used = self._used(now_s)
        if used <= PAUSE_ABOVE * self._kv_tokens:
            return
        active = [n for n in self._tokens if n not in self._paused]
        order = [(n not in self._acting_since_s, self._tokens[n], n) for n in active]
        for _, tokens, number in sorted(order)[:-1]:
            if used <= PAUSE_DOWN_TO * self._kv_tokens:
                return
            self._paused[number] = now_s  # its calls under way end first
            used -= tokens

    def _resume(self, now_s: float) -> None:
        used = self._used(now_s)
        order = [
            (now_s - since_s < PAUSE_MAX_S, self._tokens[n], n)
            for n, since_s in self._paused.items()
        ]
        heapq.heapify(order)
        while order:
            in_time, tokens, number = heapq.heappop(order)
            if in_time and used + tokens > PAUSE_ABOVE * self._kv_tokens:
                return
            used += tokens
            self._wake(number, now_s)

    def _wake(self, number: int, now_s: float) -> None:
        self._paused.pop(number, None)
        for run in self._held.pop(number, []):
            self.add(run, now_s)

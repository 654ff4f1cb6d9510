"""What the scheduler keeps beside the policy: who calls are, what they lost, what steps cost.

Written by the scheduler's thread only. The channel's thread reads single figures of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from ..channel import EVENTS_MAX, CallEvent, CallReport
from ..policy.call import Call
from .compat import Identity

RECENT_STEPS: Final = 4096  # over which the longest step is remembered, at least


class _Entry:
    """One call in the engine."""

    __slots__ = (
        "admitted_step",
        "came_s",
        "dropped",
        "events",
        "first_level",
        "hit_tokens",
        "identity",
        "is_saved",
        "level",
        "lost_tokens",
        "preemptions",
        "promotions",
        "swaps",
    )

    def __init__(self, identity: Identity, level: int, now_s: float) -> None:
        self.identity = identity
        self.came_s = now_s
        self.first_level = self.level = level
        self.events: list[tuple[float, str, int, str]] = []
        self.dropped = 0
        self.is_saved = False  # its blocks are in host memory, as far as is known
        self.promotions = 0
        self.admitted_step = 0
        self.hit_tokens: int | None = None
        self.lost_tokens = 0
        self.preemptions = 0
        self.swaps = 0

    def note(self, now_s: float, what: str, level: int, why: str = "") -> None:
        """Keep an event; the first ones are enough to understand a call."""
        self.level = level
        if len(self.events) < EVENTS_MAX:
            self.events.append((now_s - self.came_s, what, level, why))
        else:
            self.dropped += 1


class Accounts:
    """See the module.

    Attributes:
        key: The channel key, None: calls are believed as they come.
        on_report: Gets the report of each call that leaves, without its number; must not block.
        step: Steps whose output has been processed.
        step_started_s: When the oldest step in flight began, None: none is in flight.
        longest_step_s: The longest of at least the last ``RECENT_STEPS`` steps.
        computed_tokens: Tokens that went through the model.
        recomputed_tokens: Those of them that had been computed before a preemption.
        preemptions: Calls taken out of the batch, by us or by vLLM.
        why: Why the scheduler takes calls out just now; empty: vLLM does.
        keeps_events: Whether what happens to calls is kept for their reports.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self.key = key
        self.on_report: Callable[[CallReport], None] | None = None
        self.step = 0
        self.step_started_s: float | None = None
        self.longest_step_s = 0.0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.promotions = 0
        self.why = ""
        self.keeps_events = True
        self._entries: dict[str, _Entry] = {}
        self._started: deque[float] = deque()  # of the steps in flight
        self._longest_before_s = 0.0
        self._clock_offset_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def program_arrival_s(self, arrival_ms: int | None, now_s: float) -> float | None:
        """Return when a program began, on this engine's clock.

        The gateway's clock and this one differ by a constant. Nothing arrives before it was sent,
        so the smallest difference seen is the best estimate of it.
        """
        if arrival_ms is None:
            return None
        offset_s = now_s - arrival_ms / 1000.0
        if self._clock_offset_s is None or offset_s < self._clock_offset_s:
            self._clock_offset_s = offset_s
        return arrival_ms / 1000.0 + self._clock_offset_s

    def deadline_s(self, deadline_ms: int | None) -> float | None:
        """Return a program's deadline on this engine's clock; it came with an arrival."""
        if deadline_ms is None or self._clock_offset_s is None:
            return None
        return deadline_ms / 1000.0 + self._clock_offset_s

    def open(self, request_id: str, identity: Identity, level: int, now_s: float) -> None:
        """A call comes in."""
        self._entries[request_id] = _Entry(identity, level, now_s)

    def admitted(self, call: Call, hit_tokens: int, step: int, now_s: float) -> None:
        """A call begins to run, with this many tokens found in the cache."""
        entry = self._entries[call.call_id]
        entry.admitted_step = step
        if self.keeps_events:
            entry.note(now_s, "run", call.level, _why_run(entry, hit_tokens))
        entry.is_saved = False
        if entry.hit_tokens is None:
            entry.hit_tokens = hit_tokens
        self.recomputed_tokens += max(0, entry.lost_tokens - hit_tokens)
        entry.lost_tokens = 0

    def admitted_at(self, request_id: str) -> int:
        """Return the step in which a call was last admitted."""
        return self._entries[request_id].admitted_step

    def preempted(self, call: Call, computed_tokens: int) -> None:
        """A call was taken out of the batch with this many tokens computed; it waits already."""
        entry = self._entries[call.call_id]
        entry.preemptions += 1
        entry.lost_tokens = computed_tokens
        self.preemptions += 1
        if self.keeps_events:
            assert call.waiting_since_s is not None
            why = (self.why or "engine") + ("+swap" if entry.is_saved else "")
            entry.note(call.waiting_since_s, "preempt", call.level, why)

    def promoted(self, call: Call) -> None:
        """A call that waited too long was put into level 1."""
        entry = self._entries[call.call_id]
        entry.promotions += 1
        self.promotions += 1
        if self.keeps_events:
            entry.note(call.order_s, "promote", call.level)  # it queues as if it had come just now

    def moved(self, call: Call, now_s: float) -> None:
        """A call may have used up its quantum."""
        if self.keeps_events:
            entry = self._entries[call.call_id]
            if call.level != entry.level:
                entry.note(now_s, "demote", call.level)

    def swapped(self, request_id: str) -> None:
        """The blocks of a call were saved or brought back instead of being computed again."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.swaps += 1
            entry.is_saved = True

    def close(self, request: Request, call: Call, reason: str, now_s: float) -> None:
        """A call is over: report it."""
        entry = self._entries.pop(request.request_id)
        if self.on_report is None:
            return
        self.on_report(
            CallReport(
                seq=0,
                call_id=entry.identity.call_id,
                program_id=entry.identity.program_id,
                request_id=request.request_id,
                reason=reason,
                service_s=call.service_s,
                wait_s=call.wait_s,
                preemptions=entry.preemptions,
                swaps=entry.swaps,
                prompt_tokens=request.num_prompt_tokens,
                hit_tokens=entry.hit_tokens or 0,
                output_tokens=request.num_output_tokens,
                level=call.level,
                first_level=entry.first_level,
                promotions=entry.promotions,
                stay_s=now_s - entry.came_s,
                events=tuple(CallEvent(*event) for event in entry.events),
                events_dropped=entry.dropped,
            )
        )

    def step_began(self, now_s: float) -> None:
        """A batch was formed."""
        self._started.append(now_s)
        self.step_started_s = self._started[0]

    def step_done(self, seconds: float, output: SchedulerOutput) -> None:
        """The output of the oldest batch in flight is here; it took ``seconds`` of model time."""
        self._started.popleft()
        self.step_started_s = self._started[0] if self._started else None
        self.step += 1
        self.computed_tokens += output.total_num_scheduled_tokens
        self._longest_before_s = max(self._longest_before_s, seconds)
        self.longest_step_s = max(self.longest_step_s, seconds)
        if self.step % RECENT_STEPS == 0:
            self.longest_step_s = self._longest_before_s
            self._longest_before_s = 0.0


def _why_run(entry: _Entry, hit_tokens: int) -> str:
    """Return how a call comes by the tokens that it does not compute."""
    if entry.is_saved and hit_tokens:
        return "swap_in"
    if entry.preemptions:
        return "hit" if hit_tokens >= entry.lost_tokens > 0 else "recompute"
    return "hit" if hit_tokens else "fresh"

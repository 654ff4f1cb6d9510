"""Counts what windows with resident calls would be for: a free place that nobody is put into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autellix.server.engine import compat
from autellix.server.engine.scheduler import AutellixScheduler


@dataclass
class Missed:
    """Looks at a scheduler after each of its steps.

    A miss is a call that the step left waiting though it was ready and found a slot, all the blocks
    that it needs and a token. Calls behind ``adaptive``'s door are not ready, nor is who was taken
    out in this very step.

    Attributes:
        steps: Steps looked at.
        queued: Those of them in which a ready call was left waiting.
        roomy: Those of the queued in which a slot was free: blocks or tokens were short.
        misses: (step, call) of each miss.
        late: The same of calls that the scheduler takes to be larger than they are: it asks what a
            call needs every ``NEEDS_STEPS`` steps, and a prefix may have got into the cache since.
    """

    scheduler: AutellixScheduler
    steps: int
    queued: int
    roomy: int
    misses: list[tuple[int, str]]
    late: list[tuple[int, str]]

    def look(self, ran: set[str], tokens: int) -> None:
        """Look at a step.

        Args:
            ran: The calls that were running before it.
            tokens: What it left of its tokens.
        """
        scheduler = self.scheduler
        gate = scheduler.waiting.gate
        self.steps += 1
        ready = [
            request
            for request in (*scheduler.kv_holding_waiting, *scheduler.waiting)
            if request.request_id not in ran
            and compat.is_ready(request, scheduler)
            and (gate is None or scheduler.calls[request.request_id].level <= gate)
        ]
        paused = scheduler.num_waiting_for_streaming_input
        slots = compat.slots(scheduler) - len(scheduler.running) - paused
        self.queued += bool(ready)
        self.roomy += bool(ready) and slots > 0
        if slots <= 0 or tokens <= 0:
            return
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for request in ready:
            if compat.blocks_needed(scheduler, request) <= free:
                believed, _ = scheduler._needs.get(request.request_id, (0, 0))
                kind = self.late if believed > free else self.misses
                kind.append((self.steps, request.request_id))


def watch(scheduler: AutellixScheduler) -> Missed:
    """Return the counts of a scheduler; they grow with each step that it schedules from now on."""
    missed = Missed(scheduler, 0, 0, 0, [], [])
    schedule = scheduler.schedule

    def scheduled(*args: Any) -> Any:
        ran = {request.request_id for request in scheduler.running}
        output = schedule(*args)
        left = scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        missed.look(ran, left)
        return output

    scheduler.schedule = scheduled  # type: ignore[method-assign]
    return missed

"""What must hold after every simulated step, whatever the policy.

No call is lost or doubled, blocks are conserved, what was created is live or ended, nobody is
computed past its tokens, time does not go back.
"""

from __future__ import annotations

from typing import Any

from .simulate import Simulation
from .virtual_engine import VirtualEngine


class BrokenInvariantError(AssertionError):
    """A rule does not hold; the message names time, engine and rule."""


class InvariantChecker:
    """Looks at a simulation after every step.

    Args:
        every: Look at blocks and queues each so many steps; counts are looked at each step.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._now_s = 0.0
        self.steps = 0

    def after_step(self, simulation: Simulation, engine: VirtualEngine, now_s: float) -> None:
        """Check everything.

        Raises:
            BrokenInvariantError: a rule does not hold.
        """
        self.steps += 1
        where = f"{now_s:.6f} s, engine {engine.index}, step {self.steps}"
        if now_s < self._now_s:
            raise BrokenInvariantError(f"{where}: time went back from {self._now_s}")
        self._now_s = now_s
        if simulation.created - simulation.ended != len(simulation.live):
            raise BrokenInvariantError(
                f"{where}: {simulation.created} programs created, {simulation.ended} ended, "
                f"{len(simulation.live)} live"
            )
        if self.steps % self._every == 0:
            self._calls(engine, where)
            self._blocks(engine, where)

    def _calls(self, engine: VirtualEngine, where: str) -> None:
        scheduler = engine.seat.scheduler
        running = [r.request_id for r in scheduler.running]
        waiting = [r.request_id for r in scheduler.waiting]
        waiting += [r.request_id for r in scheduler.kv_holding_waiting]
        both = running + waiting
        if len(set(both)) != len(both):
            raise BrokenInvariantError(f"{where}: a call stands twice: {_twice(both)}")
        if set(both) != set(scheduler.requests):
            lost = sorted(set(scheduler.requests) ^ set(both))
            raise BrokenInvariantError(f"{where}: calls lost or left over: {lost[:5]}")
        if not set(both) <= set(engine.runs):
            raise BrokenInvariantError(f"{where}: a call that is over is still there")
        for request_id in running:
            request, run = scheduler.requests[request_id], engine.runs[request_id]
            most = run.call.prompt_tokens + run.call.output_tokens
            if request.num_output_tokens > run.call.output_tokens or request.num_tokens > most:
                raise BrokenInvariantError(f"{where}: {request_id} has too many tokens")

    def _blocks(self, engine: VirtualEngine, where: str) -> None:
        scheduler = engine.seat.scheduler
        manager = scheduler.kv_cache_manager
        held: dict[int, int] = {}
        for request_id in scheduler.requests:
            for block_id in manager.get_block_ids(request_id)[0]:
                held[block_id] = held.get(block_id, 0) + 1
        pool: Any = manager.block_pool
        null_id = pool.null_block.block_id
        held.pop(null_id, None)
        free = pool.get_num_free_blocks()
        if free + len(held) + 1 != pool.num_gpu_blocks:
            raise BrokenInvariantError(
                f"{where}: {free} free + {len(held)} held + 1 null is not {pool.num_gpu_blocks}"
            )
        for block_id, count in held.items():
            if pool.blocks[block_id].ref_cnt != count:
                raise BrokenInvariantError(
                    f"{where}: block {block_id} is held {count} times, "
                    f"counted {pool.blocks[block_id].ref_cnt}"
                )


def _twice(names: list[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)][:5]  # type: ignore[func-returns-value]

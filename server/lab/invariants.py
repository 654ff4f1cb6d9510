"""What must hold after every simulated step, whatever the policy.

No call is lost or doubled, blocks are conserved, what was created is live or ended, nobody is
computed past its tokens, time does not go back, nobody is promoted before its time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..policy.call import Call
from ..policy.leveled import LeveledPolicy
from .simulate import Simulation
from .virtual_engine import VirtualEngine


class BrokenInvariantError(AssertionError):
    """A rule does not hold; the message names time, engine and rule."""


class InvariantChecker:
    """Looks at a simulation after every step; one checker for one simulation.

    Args:
        every: Look at blocks and queues each so many steps; counts are looked at each step, and
            promotions each time, from the end of an engine's first step on.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._now_s = 0.0
        self._watched: set[int] = set()  # engines whose promotions are looked at
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
        if engine.index not in self._watched:
            self._watched.add(engine.index)
            watch_promotions(engine)
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
        known = both + _at_door(engine.seat)
        if len(set(known)) != len(known):
            raise BrokenInvariantError(f"{where}: in the engine and at the door: {_twice(known)}")
        if not set(known) <= set(engine.runs):
            raise BrokenInvariantError(f"{where}: a call that is over is still there")
        if len(known) != len(engine.runs):
            lost = sorted(set(engine.runs) - set(known))
            raise BrokenInvariantError(f"{where}: calls that nobody has: {lost[:5]}")
        for request_id in running:
            request, run = scheduler.requests[request_id], engine.runs[request_id]
            most = run.call.prompt_tokens + run.call.output_tokens
            if request.num_output_tokens > run.call.output_tokens or request.num_tokens > most:
                raise BrokenInvariantError(f"{where}: {request_id} has too many tokens")

    def _blocks(self, engine: VirtualEngine, where: str) -> None:
        scheduler = engine.seat.scheduler
        manager = scheduler.kv_cache_manager
        block_ids = _pinned(engine.seat)
        for request_id in scheduler.requests:
            block_ids += manager.get_block_ids(request_id)[0]
        held = Counter(block_ids)
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


def watch_promotions(engine: VirtualEngine) -> None:
    """From now on raise if a policy of levels promotes a call before its time.

    The rule is written down here anew: (W_program + W_call) ÷ (T_program + T_call) has reached β
    with the call's counters as they stood before its promotion sets them back.

    Raises:
        BrokenInvariantError: raised later, by ``schedule()``, when the rule does not hold.
    """
    scheduler = engine.seat.scheduler
    policy = getattr(scheduler, "autellix", None)
    if not isinstance(policy, LeveledPolicy) or policy.config.beta is None:
        return
    promote, beta = policy.promote, policy.config.beta

    def checked(now_s: float) -> list[Call]:
        ratios = {
            name: wait_to_service(policy, call, now_s) for name, call in scheduler.calls.items()
        }
        calls = promote(now_s)
        for call in calls:
            ratio = ratios[call.call_id]
            if ratio < beta * (1 - 1e-9):
                raise BrokenInvariantError(
                    f"{now_s:.6f} s, engine {engine.index}: {call.call_id} is promoted before "
                    f"its time, at {ratio} of {beta}"
                )
        return calls

    policy.promote = checked  # type: ignore[method-assign]


def wait_to_service(policy: LeveledPolicy, call: Call, now_s: float) -> float:
    """Return the ratio that β bounds, of a call and its program, by the policy's own measure."""
    program = call.program
    service_s, wait_s = {
        "mlfq": (0.0, 0.0),
        "plas": (program.sum_s, program.wait_sum_s),
        "atlas": (program.path_s, program.wait_path_s),
    }[policy.config.policy]
    service_s += policy.config.first_step_s + call.service_s - call.service_at_reset_s
    wait_s += call.total_wait_s(now_s) - call.wait_at_reset_s
    return wait_s / service_s


def _at_door(seat: Any) -> list[str]:
    """Return the calls that an admitting seat of the lab's keeps outside the scheduler."""
    held: dict[int, list[Any]] = getattr(seat, "_held", {})
    return [run.request_id for runs in held.values() for run in runs]


def _pinned(seat: Any) -> list[int]:
    """Return the blocks that a pinning seat of the lab's holds for programs between two calls."""
    pins: dict[int, tuple[float, float, list[Any]]] = getattr(seat, "_pins", {})
    return [block.block_id for _, _, blocks in pins.values() for block in blocks]


def _twice(names: list[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)][:5]  # type: ignore[func-returns-value]

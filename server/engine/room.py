"""Order in the batch, and who leaves it for whom: the part of the scheduler that makes room.

``AutellixScheduler`` stands on this class; what vLLM's ``schedule()`` does is not changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from ..policy.adaptive import INSIDE
from ..policy.base import Policy
from ..policy.call import Call, Key
from ..policy.config import PolicyConfig
from ..policy.victim import Running, Waiting, choose_for_room, choose_victims
from . import compat
from .accounts import Accounts
from .waiting import WaitingQueue

CANDIDATES_MAX = 64  # waiting calls looked at in one decision
COOLDOWN_GROWTH_MAX = 8
KEPT_STEPS = 16  # for so many steps blocks are kept for a call that others gave way to
NEEDS_STEPS = 8  # for so many steps it is believed how many blocks a waiting call needs


def _level(call: Call) -> float:
    return call.level


def _displaces(call: Call) -> float:
    return call.displaces_s


def _order(call: Call) -> float:
    return call.order_s


class RoomMaker(AsyncScheduler):
    """See the module. All of its state is set by ``AutellixScheduler``."""

    config: PolicyConfig
    autellix: Policy
    calls: dict[str, Call]
    accounts: Accounts
    waiting: WaitingQueue
    kv_holding_waiting: WaitingQueue
    running: list[Request]
    _needs: dict[str, tuple[int, int]]
    _kept_for: dict[str, int]
    _held: list[Any]
    _steps_scheduled: int
    _steps_done: int
    _preempt_again_at: int
    _window_open: bool
    _unsorted: bool
    _worst: int | None
    _for_slots: bool

    def _key_of(self, request: Request) -> Key:
        return self.calls[request.request_id].key

    def _worst_level(self) -> int:
        """Return the lowest level in the batch, 0 without one; looked up once between two steps.

        The last of ``running`` need not have it: prompts in parts are behind all others whatever
        their level, and who was admitted since the last sort is at the end.
        """
        if self._worst is None:
            calls = self.calls
            self._worst = max((calls[r.request_id].level for r in self.running), default=0)
        return self._worst

    def _order_running(self) -> None:
        """Best first, but calls with more prompt to compute after all others.

        So the others get their one token each before a long prompt takes what is left of the step,
        as in stock vLLM, and long prompts share what is left in the policy's order.
        """
        running = self.running
        if len(running) < 2 or not (self._unsorted or running[-1].is_prefill_chunk):
            return
        calls = self.calls
        running.sort(key=lambda r: (r.is_prefill_chunk, calls[r.request_id].key))
        self._unsorted = False

    def _preempt(self, now_s: float) -> None:
        """Take calls out of the batch, if it is time to look and there is reason to."""
        if self._pause_state != PauseState.UNPAUSED or self._steps_done < self._preempt_again_at:
            return
        victims, why = self._victims_for_room(), "room"
        if not victims:
            at_window = self._steps_scheduled % self.config.window_steps == 0
            if not (self._window_open or at_window):
                return
            self._window_open = False
            self._for_slots = self.autellix.by_work
            victims = self._victims_for_slots() if self._for_slots else self._victims_for_waiting()
            why = "waiting"
        if victims:
            self._take_out(victims, why, now_s)
        self._for_slots = False

    def _take_out(self, victims: list[int], why: str, now_s: float) -> None:
        chosen = set(victims)
        out = [request for number, request in enumerate(self.running) if number in chosen]
        self.running = [r for number, r in enumerate(self.running) if number not in chosen]
        self.accounts.why = why if why == "room" else f"waiting:{self._best_waiting_level()}"
        for request in out:
            self._preempt_request(request, now_s, drop_stale_output=self.requires_kv_delivery)
            self.waiting.hold(request)
        self.accounts.why = ""
        self._preempt_again_at = self._steps_scheduled

    def _victims_for_waiting(self) -> list[int]:
        """Return whom to take out for waiting calls of higher levels."""
        best = self._best_waiting_level()
        if best is None:
            return []
        calls = self.calls
        if not any(calls[r.request_id].level > best for r in self.running):
            return []
        if self._tokens_are_short():
            return []
        slots = compat.slots(self) - len(self.running) - self.num_waiting_for_streaming_input
        return self._relieve(slots, _level, _level)

    def _victims_for_slots(self) -> list[int]:
        """Return whose slots go to waiting calls that are due much earlier.

        For policies that share out KV themselves: inside one level only slots are taken.
        """
        slots = compat.slots(self) - len(self.running) - self.num_waiting_for_streaming_input
        if slots > 0 or self._best_waiting_level() != INSIDE:
            return []
        if self._tokens_are_short():
            return []
        return self._relieve(slots, _displaces, _order)

    def _relieve(
        self, slots: int, waiting: Callable[[Call], float], running: Callable[[Call], float]
    ) -> list[int]:
        """Return whom to take out, and keep what becomes free for those it is for."""
        names: list[str] = []
        relief = choose_victims(
            self._ready_waiting(names, waiting),
            self._running_calls(running),
            slots=slots,
            blocks=compat.blocks_free(self) - self._blocks_wanted(),
            blocks_of=lambda number: compat.blocks_freed(self, self.running[number]),
        )
        if relief.victims:
            until = self._steps_scheduled + KEPT_STEPS
            self._kept_for.update((names[place], until) for place in relief.helped)
        return relief.victims

    def _victims_for_room(self) -> list[int]:
        """Return whom to take out so that the rest of the batch finds blocks for its next tokens.

        vLLM would take the last of ``running``; here the call that loses least goes.
        """
        running = self.running
        if len(running) < 2:
            return []
        most = len(running) * (2 + self.num_lookahead_tokens) + self._step_blocks()
        free = compat.blocks_free(self) - self._blocks_kept()
        if free >= most:
            return []
        short = self._blocks_wanted() - free
        if short <= 0:
            return []
        rank = self._ranks().__getitem__ if self.autellix.by_work else _level
        return choose_for_room(
            self._running_calls(rank),
            blocks=short,
            blocks_of=lambda number: compat.blocks_freed(self, running[number]),
        )

    def _best_waiting_level(self) -> int | None:
        first = self.waiting.first_key()
        holding = self.kv_holding_waiting.first_key()
        keys = [key for key in (first, holding) if key is not None]
        return min(keys)[0] if keys else None

    def _blocks_kept(self) -> int:
        """Return the blocks that others gave up for waiting calls which do not run yet."""
        if not self._kept_for:
            return 0
        step = self._steps_scheduled
        for name in [name for name, until in self._kept_for.items() if until < step]:
            del self._kept_for[name]
        return sum(self._blocks_needed(self.requests[name]) for name in self._kept_for)

    def _hold_blocks(self) -> None:
        """Hide the kept blocks from running calls, which vLLM serves before the waiting ones.

        Nothing of their content is lost: they come back to where they were before the first waiting
        call is looked at.
        """
        kept = self._blocks_kept()
        if kept:
            free = self.kv_cache_manager.block_pool.free_block_queue
            want = self._blocks_wanted()
            self._held = free.popleft_n(max(0, min(kept, free.num_free_blocks - want)))

    def _end_hold(self) -> None:
        held, self._held = self._held, []
        if held:
            self.kv_cache_manager.block_pool.free_block_queue.prepend_n(held)

    def _ready_waiting(
        self, names: list[str], level_of: Callable[[Call], float]
    ) -> Iterator[Waiting]:
        """Yield the waiting calls that could run at once, best first; note their names."""
        loras = self._loras_running()
        for queue in (self.kv_holding_waiting, self.waiting):
            for request in queue.best(CANDIDATES_MAX):
                if compat.is_ready(request, self) and self._lora_fits(request, loras):
                    level = level_of(self.calls[request.request_id])
                    names.append(request.request_id)
                    yield Waiting(level, self._blocks_needed(request))

    def _running_calls(self, level_of: Callable[[Call], float]) -> list[Running]:
        calls, accounts = self.calls, self.accounts
        step = self._steps_scheduled
        cooldown = self.config.cooldown_steps
        result = []
        for number, request in enumerate(self.running):
            protected = False
            if cooldown and request.num_preemptions:
                factor = min(2 ** (request.num_preemptions - 1), COOLDOWN_GROWTH_MAX)
                since = step - accounts.admitted_at(request.request_id)
                protected = since < cooldown * factor
            level = level_of(calls[request.request_id])
            result.append(Running(level, request.num_computed_tokens, protected, number))
        return result

    def _ranks(self) -> dict[Call, int]:
        """Return the places of the running calls among each other: nobody is alike."""
        calls = [self.calls[request.request_id] for request in self.running]
        return {call: rank for rank, call in enumerate(sorted(calls, key=lambda call: call.key))}

    def _tokens_are_short(self) -> bool:
        """Return whether nobody new finds tokens in this step; if so, look again in the next."""
        if self._tokens_wanted() < self.max_num_scheduled_tokens:
            return False
        self._window_open = True
        return True

    def _tokens_wanted(self) -> int:
        """Return the tokens that running calls want in the next step."""
        return sum(
            r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens
            for r in self.running
        )

    def _blocks_wanted(self) -> int:
        """Return the KV blocks that running calls need for their next tokens."""
        size = self.block_size
        budget = self.max_num_scheduled_tokens
        blocks = 0
        for request in self.running:
            computed = request.num_computed_tokens
            tokens = min(
                request.num_tokens_with_spec + request.num_output_placeholders - computed, budget
            )
            if tokens <= 0:
                continue
            budget -= tokens
            tokens += self.num_lookahead_tokens
            blocks += -(-(computed + tokens) // size) - -(-computed // size)
        return blocks

    def _step_blocks(self) -> int:
        return -(-self.max_num_scheduled_tokens // self.block_size)

    def _fits(self, request: Request) -> bool:
        """Return whether vLLM would admit a call now; who does not hinder anybody is shown."""
        if not self.running or request.status not in (
            RequestStatus.WAITING,
            RequestStatus.PREEMPTED,
        ):
            return True
        if len(self.running) >= compat.slots(self):
            return True  # vLLM goes no further for want of a slot
        free = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        if compat.blocks_at_most(self, request) <= free:
            return True
        if self._blocks_needed(request) > free:
            return False
        if self._needs[request.request_id][1] == self._steps_scheduled:
            return True
        del self._needs[request.request_id]  # who is shown and does not fit stops all behind it
        return self._blocks_needed(request) <= free

    def _blocks_needed(self, request: Request) -> int:
        """Return the blocks that a waiting call needs, as of some steps ago at most.

        The answer takes a look at every block of its prompt, so it is kept for a while.
        """
        known = self._needs.get(request.request_id)
        if known is not None and self._steps_scheduled - known[1] < NEEDS_STEPS:
            return known[0]
        blocks = compat.blocks_needed(self, request)
        self._needs[request.request_id] = (blocks, self._steps_scheduled)
        return blocks

    def _loras_running(self) -> set[int] | None:
        if self.lora_config is None:
            return None
        return {r.lora_request.lora_int_id for r in self.running if r.lora_request}

    def _lora_fits(self, request: Request, loras: set[int] | None) -> bool:
        if loras is None or request.lora_request is None:
            return True
        return request.lora_request.lora_int_id in loras or len(loras) < self.lora_config.max_loras

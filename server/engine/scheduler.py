"""The program-aware scheduler, for stock vLLM's ``--scheduler-cls``.

vLLM's ``schedule()`` is not copied and not overridden in its body. Around it:

* before it, ``running`` is put in order, calls are taken out of the batch where a waiting call of a
  higher level needs their slot or their KV blocks, and the waiting queue is one that shows the best
  call that fits;
* after it, who was admitted stops waiting;
* with the model's output every call is charged the time of its step;
* ``_preempt_request`` sees every victim, ours and vLLM's own; ``_free_request`` is passed exactly
  once by every call, however it ends, so accounting is folded there and nowhere else.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from autellix.errors import ConfigError

from ..channel import (
    CHANNEL_VERSION,
    Heartbeat,
    Hello,
    PolicyWanted,
    RoomFigures,
    SessionEnded,
    ToolNoted,
    digest_settings,
)
from ..clock import Clock, SystemClock
from ..policy.adaptive import INSIDE, AdaptivePolicy, Room
from ..policy.base import Arrival, Policy
from ..policy.call import Call
from ..policy.config import PolicyConfig, parse_config
from ..policy.leveled import make_policy
from . import compat
from .accounts import Accounts
from .connector import find_swap
from .control import EngineChannel, read_settings
from .lifetime import die_with_parent
from .room import RoomMaker
from .waiting import WaitingQueue

logger = logging.getLogger("vllm.autellix.scheduler")  # vLLM shows what is below its own name


class _Step(NamedTuple):
    """A batch in flight."""

    output: SchedulerOutput
    scheduled_s: float


class AutellixScheduler(RoomMaker):
    """See the module.

    Attributes:
        clock: Tells the time; the simulator and the tests put their own here, on the class or on
            the instance.
        config: The settings of the policy.
        calls: What the policy knows of each call in the engine.
        accounts: Who the calls are, and the counters.
    """

    clock: Clock = SystemClock()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.check_version()
        compat.check_config(self.vllm_config)
        settings = self.vllm_config.additional_config or {}
        self.config: PolicyConfig = parse_config(settings.get("autellix"))
        self.autellix: Policy = make_policy(self.config, None, self._room())
        self.accounts, self.channel = self._open_channel()
        self.calls: dict[str, Call] = {}
        # vLLM's own victim is then the last of `running`, which is our worst; with `priority` it
        # would look for the largest header instead.
        self.policy = SchedulingPolicy.FCFS
        self.waiting: WaitingQueue = WaitingQueue(
            self._key_of, self._fits if self.preempts else None, self.config.skip_steps
        )
        self.waiting.gate = self._gate
        self.kv_holding_waiting: WaitingQueue = WaitingQueue(self._key_of)
        self.waiting.before_show = self._end_hold
        compat.join_queues(self)
        self._needs: dict[str, tuple[int, int]] = {}  # blocks of a waiting call, and at which step
        self._kept_for: dict[str, int] = {}  # calls that others gave way to, until which step
        self._held: list[Any] = []  # blocks that running calls do not see
        self._in_flight: deque[_Step] = deque()
        self.running: list[Request] = self.running
        self.swap = find_swap(self.connector)
        self._last_output_s = 0.0
        self._steps_scheduled = 0
        self._steps_done = 0
        self._preempt_again_at = 0  # steps done at which the last victims' blocks are free for sure
        self._window_open = True
        self._unsorted = True
        self._worst: int | None = None  # lowest level in the batch, None: not looked up
        self._for_slots = False
        self._settings_digest = ""  # of what the gateway sent, if it is gone by
        if self.channel is not None:
            self.channel.start()
        logger.info(
            "autellix: policy %s, %d levels, async scheduling %s, model runner V%d",
            self.config.policy,
            self.config.levels,
            "on" if self.scheduler_config.async_scheduling else "off",
            2 if self.use_v2_model_runner else 1,
        )

    @property
    def preempts(self) -> bool:
        """Whether waiting calls may take the place of running ones."""
        return self.config.levels > 1

    @property
    def _gate(self) -> int | None:
        """Level up to which waiting calls are shown to the engine, None: all."""
        return INSIDE if self.config.policy == "adaptive" else None

    def _room(self) -> Room:
        blocks = int(self.cache_config.num_gpu_blocks or self.kv_cache_config.num_blocks)
        return Room(
            max(1, blocks) * self.block_size, self.block_size, self.max_num_scheduled_tokens
        )

    # ── calls come and go ──────────────────────────────────────────────────────────────────────

    def add_request(self, request: Request) -> None:
        """Give a new call its level; everything else is vLLM's."""
        self._read_inbox()
        if request.request_id not in self.requests:
            now_s = self.clock.now_s()
            identity = compat.identify(request, self.accounts.key)
            call = self.autellix.arrive(
                Arrival(
                    request.request_id,
                    identity.program_id,
                    identity.service_s,
                    identity.wait_s,
                    self.accounts.program_arrival_s(identity.arrival_ms, now_s),
                    request.num_prompt_tokens,
                    request.block_hashes,
                    kind=identity.kind,
                    weight=identity.weight,
                    deadline_s=self.accounts.deadline_s(identity.deadline_ms),
                    by_path=identity.by_path,
                ),
                now_s,
            )
            self.calls[request.request_id] = call
            self.accounts.open(request.request_id, identity, call.level, now_s)
            self._window_open = self._window_open or call.level < self._worst_level()
            if self.swap is not None:
                self.swap.fetch(call.program.program_id, request)
        super().add_request(request)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self._needs.pop(request.request_id, None)
        self._kept_for.pop(request.request_id, None)
        call = self.calls.pop(request.request_id, None)
        if call is not None:
            now_s = self.clock.now_s()
            self.autellix.leave(call, now_s)
            self.accounts.close(request, call, compat.reason_of(request), now_s)
            self._window_open = True
            if self.swap is not None and call.program.program_id == call.call_id:
                self.swap.forget((call.call_id,))  # a program of one call: nobody else says so
        return super()._free_request(request, delay_free_blocks)

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        computed = request.num_computed_tokens
        # Dropped output means that the cache is being reset: its KV may be of other weights.
        if self.swap is not None and not drop_stale_output:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            if self.swap.swap_out(request, blocks, computed):
                self.accounts.swapped(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)
        call = self.calls[request.request_id]
        self.autellix.wait(call, self.clock.now_s(), for_slot=self._for_slots)
        self.waiting.moved(request)  # it may have lost its place as well
        self.accounts.preempted(call, computed)

    def forget(self, program_ids: Iterable[str]) -> None:
        """These programs are over."""
        over = tuple(program_ids)
        self.autellix.forget(over)
        if self.swap is not None:
            self.swap.forget(over)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As vLLM's; what was saved to host memory is of the old weights as well."""
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        if done and self.swap is not None:
            self.swap.reset_cache()
        return done

    def set_policy(self, config: PolicyConfig) -> None:
        """Change the policy while calls are queued and running; none is lost.

        Programs keep their service; every call starts anew in the level that the new policy gives
        it, and keeps the service it has used.
        """
        self.config = config
        self.autellix = make_policy(config, self.autellix.ledger, self._room())
        self.waiting.gate = self._gate
        for call in self.calls.values():
            self.autellix.enter(call)
        self.waiting.reorder(self._fits if self.preempts else None, config.skip_steps)
        self.kv_holding_waiting.reorder(None, 0)
        self._window_open = self._unsorted = True

    # ── the control channel ────────────────────────────────────────────────────────────────────

    def _open_channel(self) -> tuple[Accounts, EngineChannel | None]:
        """Return the accounts, and the channel that their reports go to if there is a gateway."""
        parent = die_with_parent()  # with or without a gateway: see the module lifetime
        settings = read_settings(os.environ)
        accounts = Accounts(settings.key)
        if settings.endpoint is None:
            return accounts, None
        channel = EngineChannel(settings, self._hello, self._heartbeat, parent=parent)
        accounts.on_report = channel.report
        return accounts, channel

    def _hello(self, boot_id: str) -> Hello:
        return Hello(
            version=CHANNEL_VERSION,
            engine_id=read_settings(os.environ).engine_id,
            boot_id=boot_id,
            rank=self.parallel_config.data_parallel_index,
            pid=os.getpid(),
            vllm_version=compat.version(),
            scheduler=type(self).__name__,
            policy=self.config.policy,
            async_scheduling=bool(self.scheduler_config.async_scheduling),
            slots=compat.slots(self),
            kv_blocks=int(self.cache_config.num_gpu_blocks or 0),
            block_tokens=self.block_size,
            settings_digest=self._settings_digest,
        )

    def _heartbeat(self, boot_id: str, last_seq: int) -> Heartbeat:
        """Return the state of the engine. Runs in the channel's thread: reads single figures."""
        accounts = self.accounts
        started_s = accounts.step_started_s
        return Heartbeat(
            boot_id=boot_id,
            last_seq=last_seq,
            step=accounts.step,
            step_age_s=None if started_s is None else max(0.0, self.clock.now_s() - started_s),
            longest_step_s=accounts.longest_step_s,
            running=len(self.running),
            waiting=len(self.waiting) + len(self.kv_holding_waiting),
            kv_blocks_free=int(self.kv_cache_manager.block_pool.get_num_free_blocks()),
            computed_tokens=accounts.computed_tokens,
            recomputed_tokens=accounts.recomputed_tokens,
            preemptions=accounts.preemptions,
            level_waiting=tuple(
                self.waiting.count(level) for level in range(1, self.config.levels + 1)
            ),
            long_step_expected=accounts.step == 0,  # the first step may compile kernels
            swap=self.swap.ledger.figures() if self.swap and self.swap.ledger else None,
            room=self._room_figures(),
        )

    def _room_figures(self) -> RoomFigures | None:
        policy = self.autellix
        if not isinstance(policy, AdaptivePolicy):
            return None
        rooms = policy.running_set
        return RoomFigures(
            programs_inside=len(rooms.seated),
            programs_at_door=len(rooms),
            inside_tokens=int(rooms.taken_tokens),
            door_tokens=int(rooms.door_tokens),
            limit_tokens=int(rooms.limit_tokens),
            pauses=rooms.pauses,
        )

    def _read_inbox(self) -> None:
        channel = self.channel
        while channel is not None and channel.inbox:
            message = channel.inbox.popleft()
            if isinstance(message, SessionEnded):
                self.forget(message.program_ids)
            elif isinstance(message, ToolNoted):
                self.autellix.note_tool(message.program_id, message.tool, self.clock.now_s())
            elif isinstance(message, PolicyWanted):
                try:
                    self.set_policy(parse_config(message.settings))
                    self._settings_digest = digest_settings(message.settings)
                except ConfigError as error:
                    logger.warning("autellix: the policy stays as it is: %s", error)
                channel.say_hello()

    def shutdown(self) -> None:
        """End the channel; nothing depends on this being called."""
        if self.channel is not None:
            self.channel.close()
        super().shutdown()

    # ── one step ───────────────────────────────────────────────────────────────────────────────

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Order, preempt where it pays, let vLLM form the batch, and note who runs."""
        self._read_inbox()
        now_s = self.clock.now_s()
        self.waiting.begin_step()
        self.kv_holding_waiting.begin_step()
        for call in self.autellix.promote(now_s):
            self.waiting.moved(self.requests[call.call_id])
            self.kv_holding_waiting.moved(self.requests[call.call_id])
            if call.promoted:
                self.accounts.promoted(call)
            self._window_open = True
        self._make_free()
        if self.preempts:
            self._order_running()
            self._preempt(now_s)
            self._hold_blocks()
        output = super().schedule(throttle_prefills)
        self._end_hold()
        self.waiting.end_step()
        self.kv_holding_waiting.end_step()
        self._note_admitted(output, now_s)
        self._worst = None
        self._steps_scheduled += 1
        self._in_flight.append(_Step(output, now_s))
        self.accounts.step_began(now_s)
        return output

    def _make_free(self) -> None:
        """Save the KV of programs that lost their place, then let go what nobody is to want."""
        if self.swap is not None:
            self.autellix.note_fetch(self.swap.fetch_token_s())
        for program_id, hashes, call_ids in self.autellix.displaced():
            # A call that was preempted has saved the same blocks, and would never come for these.
            if self.swap is not None and not any(map(self.swap.holds, call_ids)):
                self.swap.shelve(program_id, hashes, compat.cached_blocks(self, hashes))
                for call_id in call_ids:
                    self.swap.fetch(program_id, self.requests[call_id])
        for chain in self.autellix.evictable():
            compat.evict_first(self, chain)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Charge the step to the calls that had tokens in it; everything else is vLLM's."""
        step = self._in_flight.popleft()
        assert step.output is scheduler_output, "outputs come back in the order of their steps"
        now_s = self.clock.now_s()
        seconds = max(0.0, now_s - max(self._last_output_s, step.scheduled_s))
        self._last_output_s = now_s
        self._steps_done += 1
        if scheduler_output.num_scheduled_tokens:
            self._charge(scheduler_output, seconds)
            self._worst = None
        self.accounts.step_done(seconds, scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], *args: Any) -> Any:
        """As vLLM's: saved KV could not be loaded, and whoever has those blocks computes them.

        vLLM drops the step's tokens of all of these calls, siblings that found the blocks in the
        cache included, but an AsyncScheduler still counts them as under way and would wait for them
        for ever. It leaves the blocks in the prefix cache, where a program that loses its seat
        would have them saved before they are computed.
        """
        affected = super()._handle_invalid_blocks(invalid_block_ids, *args)
        wrong: set[int] = set()
        for call_id in affected:
            self.requests[call_id].num_output_placeholders = 0
            (blocks,) = self.kv_cache_manager.get_block_ids(call_id)
            first = (n for n, block in enumerate(blocks) if block in invalid_block_ids)
            wrong.update(blocks[next(first, len(blocks)) :])
        self.kv_cache_manager.evict_blocks(wrong)
        return affected

    def _charge(self, output: SchedulerOutput, seconds: float) -> None:
        calls = self.calls
        scheduled = output.num_scheduled_tokens
        if self.autellix.by_work:
            requests = self.requests
            self._unsorted |= self.autellix.charge_work(
                [
                    (calls[name], tokens, requests[name].num_computed_tokens)
                    for name, tokens in scheduled.items()
                    if name in calls
                ],
                seconds,
            )
        if self.config.charge == "batch":
            charged = [calls[name] for name in scheduled if name in calls]
            changed = self.autellix.charge(charged, seconds)
        else:
            second_a_token = seconds / output.total_num_scheduled_tokens
            changed = False
            for name, tokens in scheduled.items():
                if name in calls:
                    changed |= self.autellix.charge((calls[name],), tokens * second_a_token)
        if changed:
            self._unsorted = True
            self._requeue_demoted(scheduled)

    def _requeue_demoted(self, scheduled: Iterable[str]) -> None:
        """A victim whose last output came late may be demoted while it waits."""
        for name in scheduled:
            call = self.calls.get(name)
            if call is not None:
                self.accounts.moved(call, self._last_output_s)
                if call.waiting_since_s is not None:
                    self.waiting.moved(self.requests[name])

    def _note_admitted(self, output: SchedulerOutput, now_s: float) -> None:
        """Whoever was waiting and has tokens in this step runs now."""
        for data in output.scheduled_new_reqs:
            self._run(data.req_id, data.num_computed_tokens, now_s)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if name in cached.resumed_req_ids:
                    self._run(name, computed, now_s)

    def _run(self, request_id: str, hit_tokens: int, now_s: float) -> None:
        self._needs.pop(request_id, None)
        self._kept_for.pop(request_id, None)
        call = self.calls[request_id]
        self.autellix.run(call, now_s)
        self.accounts.admitted(call, hit_tokens, self._steps_scheduled, now_s)
        self._unsorted = True

"""An engine without a model: vLLM's scheduler and KV manager, fed fake outputs, in virtual time.

What is real: admission, block allocation, prefix hits, eviction, chunked prefill, preemption. What
is not: the seconds, which a cost model gives, and the tokens, which the trace's content gives.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .cost_model import Profile, Work
from .run_state import CallRun

if TYPE_CHECKING:
    from .virtual_link import HostLink

RETRY_S = 1e-3  # an engine with work that schedules nothing looks again after this long
STUCK_RETRIES_MAX = 100_000


class StuckError(RuntimeError):
    """The scheduler has work and schedules none of it, for good."""


class Seat(Protocol):
    """A scheduler to be driven, and how a call becomes a request of it."""

    scheduler: Any
    promotions: int  # calls that were moved up for having waited long

    def add(self, run: CallRun, now_s: float) -> None:
        """Make the request of a call, set ``run.request`` and hand it to the scheduler."""
        ...

    def tell(self, now_s: float) -> None:
        """Say what time it is, before the scheduler is asked or told anything."""
        ...

    def before_step(self, now_s: float) -> None:
        """Called before each ``schedule()``."""
        ...

    def after_finish(self, run: CallRun, now_s: float) -> None:
        """Called when a call is over."""
        ...


class Batch(NamedTuple):
    """A step under way."""

    output: Any
    runs: list[CallRun]
    samples: list[bool]
    start_s: float
    end_s: float


class EngineTotals:
    """What an engine has done, for the report."""

    __slots__ = (
        "busy_s", "calls_in_steps", "computed_tokens", "decision_wall_s", "hit_tokens",
        "kv_used_blocks", "preemptions", "promotions", "prompt_tokens", "recomputed_tokens",
        "steps", "swap_bytes", "waiting_calls",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps = 0
        self.busy_s = 0.0
        self.calls_in_steps = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.preemptions = 0
        self.promotions = 0
        self.swap_bytes = 0
        self.kv_used_blocks = 0
        self.waiting_calls = 0
        self.decision_wall_s = 0.0  # measured, hence not part of the deterministic output


class VirtualEngine:
    """One engine of the simulation.

    Args:
        seat: The scheduler.
        profile: What steps cost.
        index: Its place among the engines.
    """

    def __init__(self, seat: Seat, profile: Profile, index: int = 0) -> None:
        self.seat = seat
        self.index = index
        self.runs: dict[str, CallRun] = {}
        self.totals = EngineTotals()
        self._profile = profile
        self._scheduler = seat.scheduler
        self._in_flight: deque[Batch] = deque()
        self._last_end_s = 0.0
        self._retries = 0
        self._pool = seat.scheduler.kv_cache_manager.block_pool
        self._link: HostLink | None = None
        if seat.scheduler.connector is not None:
            from .virtual_link import HostLink

            self._link = HostLink(profile, seat.scheduler)
        self._preempt = seat.scheduler._preempt_request
        seat.scheduler._preempt_request = self._counted_preempt

    def _counted_preempt(self, *args: Any, **kwargs: Any) -> Any:
        """Count a victim when it is taken out: some calls never end, and count all the same."""
        self.totals.preemptions += 1
        return self._preempt(*args, **kwargs)

    @property
    def calls(self) -> int:
        """Calls in the engine, running and waiting."""
        return len(self.runs)

    @property
    def waiting(self) -> int:
        """Calls that hold no slot."""
        return len(self.runs) - len(self._scheduler.running)

    def add(self, run: CallRun, now_s: float) -> None:
        """Take a call."""
        self.runs[run.request_id] = run
        self.seat.add(run, now_s)
        self.totals.prompt_tokens += run.call.prompt_tokens

    @property
    def end_s(self) -> float:
        """When the oldest batch ends."""
        return self._in_flight[0].end_s

    def cut(self, now_s: float) -> float | None:  # noqa: ARG002
        """Return None: a step ends when it ends."""
        return None

    def launch(self, now_s: float) -> float | None:
        """Schedule a batch if there is work and room in the pipeline.

        Returns:
            When to call ``land`` (a batch was scheduled) or ``launch`` again (nothing was), None
            if there is nothing to do.

        Raises:
            StuckError: the scheduler keeps scheduling nothing.
        """
        if len(self._in_flight) >= self._profile.batches_in_flight or not self.runs:
            return None
        wall_s = time.perf_counter()
        self.seat.tell(now_s)
        self.seat.before_step(now_s)
        output = self._scheduler.schedule()
        self.totals.promotions = self.seat.promotions
        self.totals.decision_wall_s += time.perf_counter() - wall_s
        if not output.total_num_scheduled_tokens:
            return self._nothing(output, now_s)
        self._retries = 0
        batch = self._batch(output, now_s)
        self._in_flight.append(batch)
        self._last_end_s = batch.end_s
        return batch.end_s

    @property
    def has_batch(self) -> bool:
        """Whether a step is under way."""
        return bool(self._in_flight)

    def land(self, now_s: float) -> list[CallRun]:
        """Take the outputs of the oldest batch, which ends now, and return the finished calls."""
        batch = self._in_flight.popleft()
        assert abs(batch.end_s - now_s) < 1e-9
        step_s = now_s - batch.start_s
        sampled = []
        for run, samples in zip(batch.runs, batch.samples, strict=True):
            run.service_s += step_s
            if samples:
                sampled.append([run.prompt.output_token(run.request.num_output_tokens)])
                if run.first_token_s is None:
                    run.first_token_s = now_s
                elif now_s - run.last_token_s > run.longest_gap_s:
                    run.longest_gap_s = now_s - run.last_token_s
                run.last_token_s = now_s
            else:
                sampled.append([])
        wall_s = time.perf_counter()
        self.seat.tell(now_s)
        self._update(batch.output, [run.request_id for run in batch.runs], sampled)
        self.totals.decision_wall_s += time.perf_counter() - wall_s
        finished = [run for run in batch.runs if run.request.is_finished()]
        for run in finished:
            self._finish(run, now_s)
        return finished

    def _finish(self, run: CallRun, now_s: float) -> None:
        run.finished_s = now_s
        del self.runs[run.request_id]
        self.seat.after_finish(run, now_s)

    def _nothing(self, output: Any, now_s: float) -> float | None:
        self._retries += 1
        if self._retries > STUCK_RETRIES_MAX:
            raise StuckError(f"{len(self.runs)} calls, none scheduled for {self._retries} tries")
        if self._in_flight and self._in_flight[-1].runs:
            # As vLLM: an empty batch stands in the pipeline behind the full one.
            self._in_flight.append(Batch(output, [], [], self._last_end_s, self._last_end_s))
            return self._last_end_s
        self._update(output, [], [])
        # Behind an empty batch no second one: they would go round in one instant for ever.
        return None if self._in_flight else now_s + RETRY_S

    def _batch(self, output: Any, now_s: float) -> Batch:
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            run = self.runs[new.req_id]
            run.hit_tokens = new.num_computed_tokens
            run.started_s = now_s
            self.totals.hit_tokens += new.num_computed_tokens
        runs, samples = [], []
        context = pairs = recomputed = 0
        for request_id, count in counts.items():
            run = self.runs[request_id]
            request = run.request
            end = request.num_computed_tokens
            context += end
            pairs += count * (end - count // 2)
            if end > run.high_tokens:
                again = run.high_tokens - end + count
                run.high_tokens = end
            else:
                again = count
            if again > 0 and request.num_preemptions:
                run.recomputed_tokens += again
                recomputed += again
            runs.append(run)
            samples.append(not request.is_prefill_chunk)
        tokens = output.total_num_scheduled_tokens
        swapped = 0 if self._link is None else self._link.bytes_of(output)
        self.totals.swap_bytes += swapped
        start_s = max(now_s, self._last_end_s)
        end_s = start_s + self._profile.step_s(Work(tokens, context, pairs, len(runs), swapped))
        self._count(tokens, recomputed, len(runs), end_s - start_s)
        return Batch(output, runs, samples, start_s, end_s)

    def _count(self, tokens: int, recomputed: int, calls: int, step_s: float) -> None:
        totals = self.totals
        totals.steps += 1
        totals.busy_s += step_s
        totals.calls_in_steps += calls
        totals.computed_tokens += tokens
        totals.recomputed_tokens += recomputed
        totals.kv_used_blocks += self._profile.blocks - self._pool.get_num_free_blocks()
        totals.waiting_calls += len(self.runs) - calls

    def _update(self, output: Any, request_ids: list[str], sampled: list[list[int]]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        if self._link is not None:
            self._link.answer(output)
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: at for at, request_id in enumerate(request_ids)},
                sampled_token_ids=sampled,
            ),
        )

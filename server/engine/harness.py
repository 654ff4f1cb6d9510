"""The pipeline harness: a real scheduler, a fake runner that checks every token, virtual time.

The CPU platform never schedules asynchronously, so what must hold with several batches in flight is
shown here. The runner keeps, for every call, the tokens it was told of and the blocks it was given,
as vLLM's model runners do from ``SchedulerOutput`` alone, and fails on a wrong one:

* a *slot* is taken when a call begins and given back when it ends or is preempted;
* what a step computes must start where the call's computed tokens end, and every position must have
  a block that no other call writes;
* a computed token leaves its mark in its block; every later read of the context finds the mark of
  that very token there, whoever computed it. So a block that was freed too early, taken twice, or
  wrongly found in the prefix cache is seen.

The token that a call generates at a position is a function of its name and that position, so the
right answer is known without a second run.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ..clock import ManualClock
from .build import build_scheduler

VOCABULARY = 30_000


class WrongRun(AssertionError):
    """The scheduler told the runner something that a real one could not have done."""


def token_at(request_id: str, position: int) -> int:
    """Return the token that the fake model generates for a call at a position."""
    return 100 + zlib.crc32(f"{request_id}/{position}".encode()) % VOCABULARY


@dataclass(slots=True)
class _Row:
    """A call in the runner's batch."""

    tokens: list[int]  # prompt and what was generated, as far as known here
    blocks: list[int]
    computed: int
    prefixes: list[int] = field(default_factory=list)  # of the first tokens: a mark for each

    def mark(self, position: int) -> int:
        """Return the mark of the token at a position: it stands for all tokens up to there."""
        known = self.prefixes
        while len(known) <= position:
            token = self.tokens[len(known)]
            known.append(zlib.crc32(token.to_bytes(4, "big"), known[-1] if known else 0))
        return known[position]


@dataclass
class FakeRunner:
    """A model runner without a model.

    Attributes:
        v2: Whether it takes the scheduler's output in the form of vLLM's second model runner.
        slots: Calls it has room for.
        block_tokens: Tokens of a KV block.
        drafts: Tokens that a drafter proposes in each step; how many are accepted is pseudo-random.
        marks: What each slot of each block holds: the prefix that was computed there.
    """

    v2: bool
    slots: int
    block_tokens: int
    drafts: int = 0
    rows: dict[str, _Row] = field(default_factory=dict)
    marks: dict[tuple[int, int], int] = field(default_factory=dict)
    last_step: set[str] = field(default_factory=set)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one batch; return what it generated."""
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        if self.v2:
            for name in output.preempted_req_ids or ():
                self.rows.pop(name, None)
        for data in output.scheduled_new_reqs:
            self._begin(data)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            self._continue(output, name, cached.new_block_ids[i], cached.num_computed_tokens[i])
        if not self.v2:
            # vLLM's first runner takes calls that a step leaves out from its batch, keeps their
            # state, and puts them back when they are scheduled again.
            self.last_step = set(output.num_scheduled_tokens)
        if len(self.rows if self.v2 else self.last_step) > self.slots:
            raise WrongRun(f"no free slot: {len(self.rows)} calls for {self.slots}")
        self._check_owners(output)
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(output, name) for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def _begin(self, data: NewRequestData) -> None:
        name = data.req_id
        if self.v2 and name in self.rows:
            raise WrongRun(f"{name} begins and was never taken out")
        tokens = list(data.prefill_token_ids if self.v2 else data.prompt_token_ids or ())
        self.rows[name] = _Row(tokens, list(data.block_ids[0]), data.num_computed_tokens)

    def _continue(
        self,
        output: SchedulerOutput,
        name: str,
        blocks: tuple[list[int], ...] | None,
        computed: int,
    ) -> None:
        row = self.rows.get(name)
        if row is None:
            raise WrongRun(f"{name} goes on and never began, or was taken out")
        cached = output.scheduled_cached_reqs
        if name in cached.resumed_req_ids:
            if self.v2:
                raise WrongRun(f"{name} is resumed, which the second runner does not know")
            if blocks is None:
                raise WrongRun(f"{name} is resumed without blocks")
            row.blocks = list(blocks[0])
            if name not in cached.all_token_ids:
                # It was in the last step too: vLLM's runner would go on with stale tokens.
                raise WrongRun(f"{name} was preempted and is resumed in the same step")
        elif blocks is not None:
            row.blocks.extend(blocks[0])
        if name in cached.all_token_ids:
            told = list(cached.all_token_ids[name])
            if name in cached.resumed_req_ids or told != row.tokens[: len(told)]:
                row.tokens, row.prefixes = told, []
        elif not self.v2 and name not in self.last_step:
            raise WrongRun(f"{name} was not in the last step and comes without its tokens")
        if name in cached.resumed_req_ids:
            row.computed = computed
        elif computed < row.computed or (computed > row.computed and not self.drafts):
            # With drafts in flight the scheduler counts on all of them; the runner knows better.
            raise WrongRun(f"{name} has {row.computed} tokens computed, not {computed}")

    def _check_owners(self, output: SchedulerOutput) -> None:
        """No block that is written in this step may belong to two of its calls."""
        owner: dict[int, str] = {}
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            first = row.computed // self.block_tokens
            last = (row.computed + count - 1) // self.block_tokens
            if last >= len(row.blocks):
                raise WrongRun(f"{name} has {len(row.blocks)} blocks and writes into block {last}")
            for block in row.blocks[first : last + 1]:
                if owner.setdefault(block, name) != name:
                    raise WrongRun(f"block {block} is written by {owner[block]} and {name}")

    def _compute(self, output: SchedulerOutput, name: str) -> list[int]:
        """Compute the tokens of one call; return the generated ones."""
        row = self.rows[name]
        count = output.num_scheduled_tokens[name]
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        start = row.computed
        known = start + count - len(drafts)
        if len(row.tokens) < known:
            raise WrongRun(f"{name} computes up to {known} and only {len(row.tokens)} are known")
        self._check_context(name, row, start)
        for position in range(start, known):
            self.marks[self._place(row, position)] = row.mark(position)
        row.computed = known
        if known < len(row.tokens):
            return []  # a part of a prompt
        accepted = zlib.crc32(f"{name}:{known}".encode()) % (len(drafts) + 1)
        tokens = [token_at(name, known + i) for i in range(accepted + 1)]
        row.tokens.extend(tokens)
        for position in range(known, known + accepted):
            self.marks[self._place(row, position)] = row.mark(position)
        row.computed = known + accepted
        return tokens

    def _check_context(self, name: str, row: _Row, length: int) -> None:
        """Look at the ends of each block: whoever writes into one begins at its front."""
        size = self.block_tokens
        for first in range(0, length, size):
            for position in (first, min(first + size, length) - 1):
                if self.marks.get(self._place(row, position)) != row.mark(position):
                    block = row.blocks[position // size]
                    raise WrongRun(f"{name} reads position {position} in block {block}: not its")

    def _place(self, row: _Row, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.block_tokens)
        return row.blocks[block], offset


@dataclass(slots=True)
class Finished:
    """A call that is over."""

    request_id: str
    tokens: list[int]
    at_s: float
    reason: str


def _one_second(output: SchedulerOutput) -> float:  # noqa: ARG001
    return 1.0


@dataclass
class Pipeline:
    """A scheduler with up to ``depth`` batches in flight, driven in virtual time.

    Attributes:
        scheduler: The real one.
        depth: Batches in flight at most: 1 is synchronous, 2 is vLLM's async scheduling.
        step_s: Virtual seconds of a step with this many tokens.
        after_step: Called after each processed output, for invariants and late events.
    """

    scheduler: Scheduler
    depth: int
    clock: ManualClock
    runner: FakeRunner
    step_s: Callable[[SchedulerOutput], float] = _one_second
    after_step: Callable[[Pipeline], None] | None = None
    steps: int = 0
    finished: dict[str, Finished] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    _flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)

    def add(self, *requests: Request) -> None:
        """Hand calls to the scheduler."""
        for request in requests:
            self.tokens[request.request_id] = []
            self.scheduler.add_request(request)

    def abort(self, *request_ids: str, as_error: bool = False) -> None:
        """Abort calls, twice, as vLLM does; ``as_error``: as it ends those that it cannot serve."""
        status = RequestStatus.FINISHED_ERROR if as_error else RequestStatus.FINISHED_ABORTED
        for _ in range(2):
            self.scheduler.finish_requests(list(request_ids), status)
        for name in request_ids:
            if name not in self.finished:
                self._note_end(name, "error" if as_error else "abort")

    def step(self) -> bool:
        """Schedule if the pipeline has room, else process the oldest output; False: idle."""
        if len(self._flight) < self.depth and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            while output.pending_structured_output_tokens and self._flight:
                self._process()  # vLLM samples such a batch when the one before it is known
            # The device works on its batches in order; it sees this one when it is handed over.
            self._flight.append((output, self.runner.execute(output)))
            if output.total_num_scheduled_tokens and len(self._flight) < self.depth:
                return True
        if not self._flight:
            return False
        self._process()
        return True

    def _process(self) -> None:
        """Take the oldest output."""
        output, result = self._flight.popleft()
        self.clock.advance(self.step_s(output))
        self._note(self.scheduler.update_from_output(output, result))
        if self.runner.drafts and self.depth == 1 and output.num_scheduled_tokens:
            # In async scheduling the drafts stay in the runner, and placeholders are scheduled.
            names = list(output.num_scheduled_tokens)
            drafts = DraftTokenIds(names, [[0] * self.runner.drafts for _ in names])
            self.scheduler.update_draft_token_ids(drafts)
        self.steps += 1
        if self.after_step is not None:
            self.after_step(self)

    def run(self, steps_max: int = 100_000) -> None:
        """Step until nothing is left.

        Raises:
            WrongRun: it does not come to an end.
        """
        for _ in range(steps_max):
            if not self.scheduler.has_unfinished_requests() and not self._flight:
                break
            self.step()
        else:
            raise WrongRun(f"not done after {steps_max} steps: {sorted(self.scheduler.requests)}")
        while self.step() and self._flight:
            pass

    def check_tokens(self, requests: Iterable[tuple[str, int, int]]) -> None:
        """Check the answers of calls.

        Args:
            requests: (name, tokens of the prompt, tokens of the answer) of each.

        Raises:
            WrongRun: a token is wrong, missing or too many.
        """
        for name, prompt, answer in requests:
            right = [token_at(name, prompt + i) for i in range(answer)]
            if self.tokens[name] != right:
                raise WrongRun(f"{name}: got {self.tokens[name]}, not {right}")

    def order(self) -> Sequence[str]:
        """Return the names of the calls that are over, first come first."""
        return list(self.finished)

    def _note(self, outputs: dict[int, Any]) -> None:
        for batch in outputs.values():
            for output in batch.outputs:
                self.tokens[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self._note_end(output.request_id, str(output.finish_reason))

    def _note_end(self, name: str, reason: str) -> None:
        self.finished[name] = Finished(name, self.tokens[name], self.clock.now_s(), reason)


def build_pipeline(
    scheduler_cls: type[Scheduler],
    *,
    depth: int = 1,
    v2_runner: bool = False,
    slots: int = 2,
    kv_blocks: int = 64,
    block_tokens: int = 4,
    drafts: int = 0,
    **scheduler_args: Any,
) -> Pipeline:
    """Return a pipeline with a scheduler of this class.

    Args:
        scheduler_cls: A subclass is made of it that reads the pipeline's clock.
        depth: Batches in flight at most.
        v2_runner: In which form the scheduler writes for the runner.
        slots: Calls in a batch at most.
        kv_blocks: KV blocks, with vLLM's null block.
        block_tokens: Tokens of a block.
        drafts: Tokens proposed in each step by speculative decoding; 0: none.
        scheduler_args: More for :func:`.build.build_config`.
    """
    if drafts:
        scheduler_args["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
    clock = ManualClock()
    scheduler = build_scheduler(
        type(scheduler_cls.__name__, (scheduler_cls,), {"clock": clock}),
        v2_runner=v2_runner,
        slots=slots,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        async_scheduling=depth > 1,
        **scheduler_args,
    )
    runner = FakeRunner(v2=v2_runner, slots=slots, block_tokens=block_tokens, drafts=drafts)
    return Pipeline(scheduler, depth, clock, runner)

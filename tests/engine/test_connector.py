"""The connector inside vLLM's own scheduler: pipelines, failures, configuration, refusals."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from autellix.server.engine.build import build_config, make_request
from autellix.server.engine.connector import SwapConnector, find_swap, unsupported_reason
from autellix.server.engine.connector_config import swap_transfer_config
from autellix.server.engine.connector_messages import SwapMetadata, SwapWorkerMetadata
from autellix.server.engine.copier import Moved
from autellix.server.engine.harness import FakeRunner, Pipeline, build_pipeline, token_at
from autellix.server.engine.swap_worker import SwapWorker
from autellix.server.swap.choose import Speeds
from autellix.server.swap.host_pool import SlotRef
from tests.engine.forced_preemption import ForcedPreemption

BLOCK = 4
BLOCK_BYTES = 2 * BLOCK * 4  # of the stand-in model: one layer, one head of one float32


class MarkCopier:
    """Moves the fake runner's marks as a real copier moves bytes; may fail by chance."""

    slot_bytes, backend = BLOCK_BYTES, "marks"

    def __init__(self, marks: dict[tuple[int, int], int], fails: float = 0.0) -> None:
        self.marks = marks
        self.slots: dict[int, list[int | None]] = {}
        self.fails = fails
        self.random = random.Random(3)

    def swap_out(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        if self.random.random() < self.fails:
            raise RuntimeError("by chance")
        for block, slot in zip(block_ids, slot_ids, strict=True):
            self.slots[slot] = [self.marks.get((block, i)) for i in range(BLOCK)]
        return Moved(len(block_ids), None)

    def swap_in(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        if self.random.random() < self.fails:
            raise RuntimeError("by chance")
        for block, slot in zip(block_ids, slot_ids, strict=True):
            for i, mark in enumerate(self.slots[slot]):
                if mark is None:
                    self.marks.pop((block, i), None)
                else:
                    self.marks[block, i] = mark
        return Moved(len(block_ids), None)


@dataclass
class SwappingRunner(FakeRunner):
    """The fake runner with the worker's half of the connector, called as vLLM's runners do."""

    worker: Any = None
    failures: list[set[int]] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        meta = output.kv_connector_metadata
        assert isinstance(meta, SwapMetadata)
        self._forget_dropped_tokens(output)
        self.worker.swap_out(meta.out_blocks, meta.out_slots)
        self.worker.swap_in(meta.in_blocks, meta.in_slots)
        invalid = self.worker.take_invalid_blocks()
        if invalid:
            # The call reads blocks that were not loaded: vLLM drops what it computes there.
            self.failures.append(invalid)
            result = self._ignoring_context(output)
        else:
            result = super().execute(output)
        result.kv_connector_output = KVConnectorOutput(
            invalid_block_ids=invalid,
            kv_connector_worker_meta=SwapWorkerMetadata(meta.step, *self.worker.take_news()),
        )
        return result

    def _forget_dropped_tokens(self, output: SchedulerOutput) -> None:
        """Drop what a failed step computed and generated, as vLLM's runners do."""
        for data in output.scheduled_new_reqs:
            self.prompts[data.req_id] = len(data.prompt_token_ids or ())
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            row = self.rows.get(name)
            if self.failures and row is not None:
                del row.tokens[self.prompts[name] + cached.num_output_tokens[i] :]
                row.computed = cached.num_computed_tokens[i]

    def _ignoring_context(self, output: SchedulerOutput) -> ModelRunnerOutput:
        check, self._check_context = self._check_context, lambda *_: None  # type: ignore[method-assign]
        try:
            return super().execute(output)
        finally:
            self._check_context = check  # type: ignore[method-assign]


def swap_pipeline(
    *, depth: int, v2: bool = False, pool_blocks: int = 64, fails: float = 0.0, **args: Any
) -> Pipeline:
    """Return a pipeline whose victims are swapped, and preempted often."""
    transfer = swap_transfer_config(pool_blocks * BLOCK_BYTES, always=True)
    pipeline = build_pipeline(
        ForcedPreemption,
        depth=depth,
        v2_runner=v2,
        block_tokens=BLOCK,
        priority=False,
        kv_transfer_config=transfer,
        **args,
    )
    base = pipeline.runner
    runner = SwappingRunner(v2=base.v2, slots=base.slots, block_tokens=BLOCK)
    runner.worker = SwapWorker(MarkCopier(runner.marks, fails), pool_blocks)
    pipeline.runner = runner
    scheduler: Any = pipeline.scheduler
    scheduler.forced_max = 200
    return pipeline


def add_calls(pipeline: Pipeline, count: int, seed: int) -> list[tuple[str, int, int]]:
    """Add calls, half of them with a common prefix; return (name, prompt, answer) of each."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [5] * 8 * (i % 2) + [rng.randrange(10, 99) for _ in range(rng.randrange(1, 14))]
        answer = rng.randrange(4, 16)
        caching = pipeline.scheduler.cache_config.enable_prefix_caching
        pipeline.add(
            make_request(f"c{i}", prompt, answer, block_tokens=BLOCK, prefix_caching=bool(caching))
        )
        made.append((f"c{i}", len(prompt), answer))
    return made


def swap_of(pipeline: Pipeline) -> SwapConnector:
    """Return the scheduler's connector."""
    swap = find_swap(pipeline.scheduler.connector)
    assert swap is not None
    return swap


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("depth", "v2"), [(1, False), (2, False), (2, True), (3, True)])
def test_forced_preemptions_with_batches_in_flight_keep_every_token(depth, v2, prefix_caching):
    """Every context that is read after a swap is the call's own; every answer is right."""
    swap_outs = swap_ins = 0
    for seed in range(4):
        pipeline = swap_pipeline(
            depth=depth, v2=v2, slots=4, kv_blocks=28, prefix_caching=prefix_caching
        )
        scheduler: Any = pipeline.scheduler
        scheduler.every_steps = 2 if depth == 1 else 3
        calls = add_calls(pipeline, 12, seed)
        pipeline.run(5000)
        pipeline.check_tokens(calls)
        counts = swap_of(pipeline).counts
        swap_outs += counts.swap_outs
        swap_ins += counts.swap_ins
        assert counts.failed == 0
        assert_nothing_held(pipeline)
    assert swap_outs >= 40
    assert swap_ins >= (10 if prefix_caching else 20)


def assert_nothing_held(pipeline: Pipeline) -> None:
    """Assert that the pool and the device are empty."""
    ledger = swap_of(pipeline).ledger
    assert ledger is not None
    ledger.pool.check_integrity()
    assert ledger.pool.free_count == ledger.pool.slot_count
    assert ledger.saved_count == 0
    pool = pipeline.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pipeline.scheduler.cache_config.num_gpu_blocks - 1


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_in_any_state_free_the_slots(depth):
    """Running, swapped out, about to be loaded: nothing stays behind."""
    pipeline = swap_pipeline(depth=depth, slots=4, kv_blocks=28)
    scheduler: Any = pipeline.scheduler
    scheduler.every_steps = 2
    calls = add_calls(pipeline, 24, 9)
    rng = random.Random(5)
    aborted: set[str] = set()
    saved_when_aborted = 0
    for _ in range(2000):
        if not pipeline.step() and not pipeline.scheduler.has_unfinished_requests():
            break
        if rng.random() < 0.2 and pipeline.scheduler.requests:
            name = rng.choice(sorted(pipeline.scheduler.requests))
            ledger = swap_of(pipeline).ledger
            assert ledger is not None
            saved_when_aborted += ledger.is_saved(name)
            aborted.add(name)
            pipeline.abort(name)
    pipeline.run(2000)
    assert saved_when_aborted > 0
    pipeline.check_tokens([call for call in calls if call[0] not in aborted])
    assert_nothing_held(pipeline)


@pytest.mark.parametrize("pool_blocks", [1, 2, 5])
def test_a_tiny_pool_recomputes_what_does_not_fit(pool_blocks):
    """A full pool is normal: no deadlock, no leak, right answers."""
    pipeline = swap_pipeline(depth=1, pool_blocks=pool_blocks, slots=4, kv_blocks=24)
    scheduler: Any = pipeline.scheduler
    scheduler.every_steps = 2
    calls = add_calls(pipeline, 16, 1)
    pipeline.run(5000)
    pipeline.check_tokens(calls)
    assert swap_of(pipeline).counts.pool_full > 0
    assert_nothing_held(pipeline)


def test_failed_copies_are_recomputed_not_errors():
    """A third of all copies fail, either way: every answer is right all the same."""
    pipeline = swap_pipeline(depth=1, fails=0.33, slots=4, kv_blocks=28, prefix_caching=False)
    scheduler: Any = pipeline.scheduler
    scheduler.every_steps = 2
    calls = add_calls(pipeline, 12, 2)
    pipeline.run(5000)
    pipeline.check_tokens(calls)
    assert swap_of(pipeline).counts.failed > 0
    assert isinstance(pipeline.runner, SwappingRunner)
    assert pipeline.runner.failures, "no load failed: the test shows nothing"
    assert_nothing_held(pipeline)


def test_a_reset_of_the_connector_forgets_what_was_saved():
    """After new weights the old KV is recomputed."""
    pipeline = swap_pipeline(depth=1, slots=2, kv_blocks=20)
    scheduler: Any = pipeline.scheduler
    calls = add_calls(pipeline, 2, 4)
    for _ in range(3):
        pipeline.step()
    victim = scheduler.running.pop()
    scheduler._preempt_request(victim, 0.0)
    scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
    assert swap_of(pipeline).ledger.is_saved(victim.request_id)
    assert scheduler.reset_connector_cache()
    assert not swap_of(pipeline).ledger.is_saved(victim.request_id)
    pipeline.run(500)
    pipeline.check_tokens(calls)
    assert swap_of(pipeline).counts.swap_ins == 0


def test_the_same_token_comes_after_a_swap_and_without_one():
    """The harness knows the right answer: it is the one without any preemption."""
    pipeline = swap_pipeline(depth=1, slots=2, kv_blocks=20)
    ((name, prompt, answer),) = add_calls(pipeline, 1, 7)
    pipeline.run(500)
    assert pipeline.tokens[name] == [token_at(name, prompt + i) for i in range(answer)]


def make_connector(spec: Any, groups: int = 1, **extra: Any) -> SwapConnector:
    """Return a scheduler's connector for a model with this kind of KV."""
    transfer = {**swap_transfer_config(1 << 20)}
    transfer["kv_connector_extra_config"] = {"pool_bytes": 1 << 20, **extra}
    config = build_config(kv_blocks=8, block_tokens=16, kv_transfer_config=transfer)
    kv = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i in range(groups)],
    )
    return SwapConnector(config, KVConnectorRole.SCHEDULER, kv)


FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)


@pytest.mark.parametrize(
    ("spec", "groups", "named"),
    [
        (MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16), 1,
         "MLAAttentionSpec"),
        (SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16,
                           sliding_window=64), 1, "SlidingWindowSpec"),
        (FULL, 2, "2 groups of KV layers"),
    ],
)  # fmt: skip
def test_kv_that_is_not_swapped_is_named_and_served(spec, groups, named):
    """The engine starts and recomputes; the reason is there to be logged."""
    connector = make_connector(spec, groups)
    assert connector.refusal is not None
    assert named in connector.refusal
    call = make_request("a", [1] * 40, 4)
    assert connector.swap_out(call, [[1, 2, 3]] * groups, 40) is False
    assert connector.get_num_new_matched_tokens(call, 0) == (0, False)
    assert connector.request_finished_all_groups(call, ([1],) * groups) == (False, None)
    assert connector.counts.swap_outs == 0


def test_a_pool_smaller_than_a_block_is_refused_by_its_size():
    """The figures are in the message."""
    connector = make_connector(FULL, pool_bytes=100)
    assert connector.refusal == "a pool of 100 bytes holds no block of 512"


def test_pipeline_parallelism_is_named():
    """Stages have other layers: the scheduler's figures would be wrong."""
    parallel = SimpleNamespace(pipeline_parallel_size=2, decode_context_parallel_size=1)
    kv = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], FULL)])
    config = SimpleNamespace(parallel_config=parallel)
    assert unsupported_reason(config, kv) == "pipeline parallelism: each stage has other layers"
    parallel.pipeline_parallel_size = 1
    assert unsupported_reason(config, kv) is None
    kv.hash_block_size = 8
    assert unsupported_reason(config, kv) is not None


def test_it_is_found_alone_first_in_a_multi_connector_and_nowhere_else():
    """A MultiConnector loads from its first child with tokens: ours must be that."""
    ours = make_connector(FULL)
    other = SimpleNamespace()
    assert find_swap(None) is None
    assert find_swap(ours) is ours
    assert find_swap(SimpleNamespace(sub_connectors=[ours, other])) is ours
    assert find_swap(SimpleNamespace(sub_connectors=[other])) is None
    with pytest.raises(ValueError, match="must come first"):
        find_swap(SimpleNamespace(sub_connectors=[other, ours]))


def test_in_vllms_own_multi_connector_it_swaps():
    """The real MultiConnector, with vLLM's own example beside ours."""
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                swap_transfer_config(64 * BLOCK_BYTES, always=True),
                {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                 "kv_connector_extra_config": {"shared_storage_path": "unused-storage"}},
            ]
        },
    }  # fmt: skip
    pipeline = build_pipeline(
        ForcedPreemption, slots=2, kv_blocks=20, priority=False, kv_transfer_config=multi
    )
    swap = swap_of(pipeline)
    scheduler: Any = pipeline.scheduler
    pipeline.add(make_request("a", [7] * 9, 8, block_tokens=BLOCK))
    pipeline.step()
    assert swap.refusal is None
    victim = scheduler.running.pop()
    scheduler._preempt_request(victim, 0.0)
    assert swap.ledger is not None
    assert swap.ledger.is_saved("a")
    output = scheduler.schedule()
    meta = output.kv_connector_metadata
    assert isinstance(meta.metadata[0], SwapMetadata)
    assert len(meta.metadata[0].out_blocks) == 3
    answer = MultiKVConnectorWorkerMetadata((SwapWorkerMetadata(meta.metadata[0].step), None))
    scheduler.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=answer))
    request = scheduler.requests["a"]
    assert scheduler.connector.get_num_new_matched_tokens(request, 0) == (9, False)


@pytest.mark.parametrize(("field", "value"), [("pool_bytes", 0), ("threads", 65)])
def test_wrong_settings_are_refused(field, value):
    """The launcher learns it at once."""
    with pytest.raises(ValueError, match=str(value)):
        swap_transfer_config(**{"pool_bytes": 1, field: value})


def test_workers_news_are_joined():
    """Every failed slot counts, and the slowest worker is the speed."""
    one = SwapWorkerMetadata(7, [SlotRef(1, 2)], Speeds(5.0, None, 3.0))
    two = SwapWorkerMetadata(7, [SlotRef(3, 4)], Speeds(4.0, 2.0, None))
    assert one.aggregate(two) == SwapWorkerMetadata(
        7, [SlotRef(1, 2), SlotRef(3, 4)], Speeds(4.0, 2.0, 3.0)
    )


def test_without_a_copier_the_worker_reports_its_loads_as_lost(monkeypatch):
    """A worker that cannot copy (no native module) makes vLLM recompute, not read garbage."""
    from autellix.server.engine import connector as module
    from autellix.server.engine.copier import CopierError

    def refuse(*args: Any) -> None:
        raise CopierError("no native module")

    monkeypatch.setattr(module, "open_copier", refuse)
    transfer = swap_transfer_config(1 << 20)
    config = build_config(kv_blocks=8, block_tokens=16, kv_transfer_config=transfer)
    kv = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], FULL)])
    worker = SwapConnector(config, KVConnectorRole.WORKER, kv)
    worker.register_kv_caches({})
    meta = SwapMetadata(5, [1], [SlotRef(0, 1)], [4], [SlotRef(0, 1)], 3)
    worker.handle_preemptions(meta)
    worker.bind_connector_metadata(meta)
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_block_ids_with_load_errors() == {4}
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() == SwapWorkerMetadata(5, [SlotRef(0, 1)])

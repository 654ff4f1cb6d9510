"""The program-aware scheduler with the swap: its victims come back without being recomputed."""

from __future__ import annotations

from typing import Any

import pytest

from autellix.server.engine.build import make_request
from autellix.server.engine.connector_config import swap_transfer_config
from autellix.server.engine.harness import build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.engine.swap_worker import SwapWorker
from tests.engine.test_connector import (
    BLOCK,
    BLOCK_BYTES,
    MarkCopier,
    SwappingRunner,
    assert_nothing_held,
    swap_of,
)


@pytest.mark.parametrize(("depth", "v2"), [(1, False), (2, False), (2, True)])
def test_victims_of_short_programs_are_swapped_and_finish_rightly(depth, v2):
    """Two long calls lose their slots to short ones, and no token of theirs is computed twice."""
    pipeline = build_pipeline(
        AutellixScheduler,
        depth=depth,
        v2_runner=v2,
        slots=2,
        kv_blocks=48,
        block_tokens=BLOCK,
        prefix_caching=False,
        policy_config={"policy": "plas", "window_steps": 1},
        kv_transfer_config=swap_transfer_config(64 * BLOCK_BYTES, always=True),
    )
    runner = SwappingRunner(v2=v2, slots=2, block_tokens=BLOCK)
    runner.worker = SwapWorker(MarkCopier(runner.marks), 64)
    pipeline.runner = runner
    calls = [("long0", 9, 40), ("long1", 10, 40)]
    for name, prompt, answer in calls:
        pipeline.add(make_request(name, [7] * prompt, answer, prefix_caching=False))
    for _ in range(30):
        pipeline.step()
    for i in range(3):
        calls.append((f"short{i}", 5, 3))
        pipeline.add(make_request(f"short{i}", [8] * 5, 3, prefix_caching=False))
    pipeline.run(3000)
    pipeline.check_tokens(calls)
    scheduler: Any = pipeline.scheduler
    counts = swap_of(pipeline).counts
    assert scheduler.accounts.preemptions > 0
    assert counts.swap_outs == scheduler.accounts.preemptions
    assert counts.swap_ins == counts.swap_outs
    assert scheduler.accounts.recomputed_tokens <= counts.swap_ins
    assert_nothing_held(pipeline)

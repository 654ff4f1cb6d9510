"""An hour of virtual time with a pool of two slots: no leak, no deadlock, no ownerless slot."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autellix.server.engine.build import make_request
from tests.engine.test_connector import BLOCK, assert_nothing_held, swap_of, swap_pipeline

HOUR_STEPS = 3600  # a step of the pipeline is a virtual second


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "pool_blocks"), [(1, 2), (2, 2), (2, 12)])
def test_an_hour_of_arrivals_preemptions_and_aborts(depth, pool_blocks):
    """Calls come, are preempted, aborted and finish; the books are right after every step."""
    pipeline = swap_pipeline(depth=depth, pool_blocks=pool_blocks, slots=4, kv_blocks=24)
    scheduler: Any = pipeline.scheduler
    scheduler.every_steps, scheduler.forced_max = 3, 10**9
    rng = random.Random(depth)
    calls: list[tuple[str, int, int]] = []
    aborted: set[str] = set()
    ledger = swap_of(pipeline).ledger
    assert ledger is not None
    while pipeline.steps < HOUR_STEPS:
        if rng.random() < 0.2 and len(scheduler.requests) < 30:
            name, prompt, answer = f"c{len(calls)}", rng.randrange(1, 8), rng.randrange(1, 12)
            calls.append((name, prompt, answer))
            pipeline.add(
                make_request(name, [rng.randrange(9)] * prompt, answer, block_tokens=BLOCK)
            )
        if rng.random() < 0.02 and scheduler.requests:
            name = rng.choice(sorted(scheduler.requests))
            aborted.add(name)
            pipeline.abort(name)
        if not pipeline.step():
            pipeline.steps += 1  # an idle second
        assert ledger.saved_count <= len(scheduler.requests)
        assert ledger.pool.owner_count >= ledger.saved_count
    pipeline.run(5000)
    pipeline.check_tokens([call for call in calls if call[0] not in aborted])
    assert_nothing_held(pipeline)
    assert len(calls) > 400
    counts = swap_of(pipeline).counts
    assert counts.swap_ins > 20
    assert counts.pool_full > 0 or pool_blocks > 2

"""Programs whose KV is fetched back after a tool: the adaptive policy, the swap and vLLM together.

The runner checks every context that is read: blocks that were not loaded, or another's, are found.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import SamplingParams

from autellix.server.engine import compat
from autellix.server.engine.build import make_request
from autellix.server.engine.connector_config import swap_transfer_config
from autellix.server.engine.harness import Pipeline, build_pipeline, token_at
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


def pipeline_of(
    *, depth: int = 1, v2: bool = False, kv_blocks: int = 24, pool: int = 64, fails: float = 0.0
) -> Pipeline:
    """Return an engine under the adaptive policy that swaps."""
    pipeline = build_pipeline(
        AutellixScheduler,
        depth=depth,
        v2_runner=v2,
        slots=8,
        kv_blocks=kv_blocks,
        block_tokens=BLOCK,
        policy_config={"policy": "adaptive"},
        kv_transfer_config=swap_transfer_config(pool * BLOCK_BYTES, always=True),
    )
    runner = SwappingRunner(v2=v2, slots=8, block_tokens=BLOCK)
    runner.worker = SwapWorker(MarkCopier(runner.marks, fails), pool)
    pipeline.runner = runner
    return pipeline


class Agent:
    """A program whose every call goes on from the last one and its answer."""

    def __init__(self, pipeline: Pipeline, name: str, prompt: list[int]) -> None:
        self.pipeline = pipeline
        self.name = name
        self.tokens = list(prompt)
        self.calls: list[tuple[str, int, int]] = []

    def call(self, answer: int, more: list[int] | None = None, **request_args: Any) -> str:
        """Send the next call and return its name."""
        self.tokens += more or []
        name = f"{self.name}-{len(self.calls)}"
        self.pipeline.add(
            make_request(name, self.tokens, answer, block_tokens=BLOCK, session_id=self.name,
                         **request_args)
        )  # fmt: skip
        self.calls.append((name, len(self.tokens), answer))
        length = len(self.tokens)
        self.tokens += [token_at(name, length + place) for place in range(answer)]
        return name


def run_until(pipeline: Pipeline, name: str) -> None:
    """Step until a call is over."""
    for _ in range(2000):
        if name in pipeline.finished:
            return
        pipeline.step()
    raise AssertionError(f"{name} never ends")


def displaced_agent(pipeline: Pipeline) -> Agent:
    """Return an agent whose KV went to host memory: others came while it waited for its tool."""
    agent = Agent(pipeline, "agent", [7] * 30)
    run_until(pipeline, agent.call(10))
    for number in range(6):  # each needs a third of the cache
        other = Agent(pipeline, f"other{number}", [20 + number] * 26)
        other.call(4)
    for _ in range(20):
        pipeline.step()
    pipeline.run(3000)
    return agent


@pytest.mark.parametrize(("depth", "v2"), [(1, False), (2, False), (2, True), (3, True)])
def test_a_program_comes_back_from_its_tool_and_computes_only_what_is_new(depth, v2):
    """Its 40 tokens come from host memory, but for the last, partial block."""
    pipeline = pipeline_of(depth=depth, v2=v2)
    agent = displaced_agent(pipeline)
    counts = swap_of(pipeline).counts
    assert counts.shelved > 0
    before = counts.in_blocks
    run_until(pipeline, agent.call(5, more=[9] * 6))
    assert counts.fetched == 1
    assert counts.in_blocks - before == 9  # of ten: the answer's last token has no KV yet
    pipeline.check_tokens(agent.calls)


def end_all(pipeline: Pipeline, *names: str) -> None:
    """Say that programs are over, as the gateway does."""
    scheduler: Any = pipeline.scheduler
    scheduler.forget(names)


def test_a_program_that_is_over_holds_no_slot():
    """The gateway says so; nothing else keeps a program's KV for good."""
    pipeline = pipeline_of()
    displaced_agent(pipeline)
    ledger = swap_of(pipeline).ledger
    assert ledger is not None
    assert ledger.pool.free_count < ledger.pool.slot_count
    end_all(pipeline, "agent", *(f"other{number}" for number in range(6)))
    assert len(ledger.shelf) == 0
    assert_nothing_held(pipeline)


def test_new_weights_take_nothing_from_the_shelf():
    """The prefix cache is reset when the weights change, and no connector is named."""
    pipeline = pipeline_of()
    agent = displaced_agent(pipeline)
    assert pipeline.scheduler.reset_prefix_cache()
    assert_nothing_held(pipeline)
    before = swap_of(pipeline).counts.in_blocks
    run_until(pipeline, agent.call(5))
    assert swap_of(pipeline).counts.in_blocks == before
    pipeline.check_tokens(agent.calls)


@pytest.mark.parametrize("v2", [False, True])
def test_siblings_of_a_load_that_fails_go_on(v2):
    """They found the blocks in the cache in that step; their tokens of it are dropped as well."""
    pipeline = pipeline_of(v2=v2, kv_blocks=34)
    agent = Agent(pipeline, "agent", [7] * 30)
    run_until(pipeline, agent.call(10))
    shelve_now(pipeline, "agent")
    run_until(pipeline, Agent(pipeline, "z", [50] * 3).call(2))
    assert pipeline.scheduler.kv_cache_manager.reset_prefix_cache()
    copier = pipeline.runner.worker._copier
    copier.fails = 1.0
    shared = list(agent.tokens)
    name = agent.call(5, more=[9] * 6)
    twin = make_request("twin-0", [*shared, 3, 4], 5, block_tokens=BLOCK, session_id="agent")
    pipeline.add(twin)
    pipeline.step()
    copier.fails = 0.0
    assert swap_of(pipeline).counts.failed > 0
    run_until(pipeline, name)
    run_until(pipeline, "twin-0")
    pipeline.check_tokens([*agent.calls, ("twin-0", len(shared) + 2, 5)])


def test_blocks_that_were_not_loaded_are_not_saved_for_another_program():
    """They are computed anew in steps to come; until then their hashes say what is not there."""
    pipeline = pipeline_of(kv_blocks=26)
    agent = displaced_agent(pipeline)
    scheduler = pipeline.scheduler
    scheduler.kv_cache_manager.reset_prefix_cache()
    copier = pipeline.runner.worker._copier
    copier.fails = 1.0
    name = agent.call(5, more=[9] * 6)
    pipeline.step()
    copier.fails = 0.0
    assert swap_of(pipeline).counts.failed == 1
    request = scheduler.requests[name]
    assert request.num_computed_tokens < 9 * BLOCK
    valid = request.num_computed_tokens // BLOCK
    assert len(compat.cached_blocks(scheduler, request.block_hashes)) <= valid
    run_until(pipeline, name)
    pipeline.check_tokens(agent.calls)


def test_a_preempted_call_is_not_saved_a_second_time_for_its_program():
    """It has the blocks, and would never come for those on the shelf."""
    pipeline = pipeline_of(kv_blocks=34)
    agent = Agent(pipeline, "agent", [7] * 30)
    run_until(pipeline, agent.call(10))
    name = agent.call(20, more=[9] * 6)
    pipeline.step()
    scheduler = pipeline.scheduler
    request = scheduler.requests[name]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert swap_of(pipeline).holds(name)
    member = scheduler.autellix.ledger.get("agent").member
    scheduler.autellix._displaced[member] = member.working_set.longest
    pipeline.step()
    assert "agent" not in swap_of(pipeline).ledger.shelf
    run_until(pipeline, name)
    pipeline.check_tokens(agent.calls)


def test_a_program_of_one_call_leaves_nothing_when_it_is_over():
    """Nobody says that it has ended: it has no session."""
    pipeline = pipeline_of(kv_blocks=34)
    pipeline.add(make_request("alone", [7] * 30, 10, block_tokens=BLOCK))
    for _ in range(4):
        pipeline.step()
    scheduler = pipeline.scheduler
    hashes = scheduler.requests["alone"].block_hashes
    swap_of(pipeline).shelve("alone", hashes, compat.cached_blocks(scheduler, hashes))
    assert len(swap_of(pipeline).ledger.shelf) == 1
    run_until(pipeline, "alone")
    assert len(swap_of(pipeline).ledger.shelf) == 0


def test_a_call_at_the_door_takes_what_its_program_saves():
    """Its program loses the seat while the call waits: it came before there was any to take."""
    pipeline = pipeline_of(kv_blocks=34)
    agent = Agent(pipeline, "agent", [7] * 30)
    run_until(pipeline, agent.call(10))
    name = agent.call(5, more=[9] * 6)
    scheduler = pipeline.scheduler
    member = scheduler.autellix.ledger.get("agent").member
    scheduler.autellix._displaced[member] = member.working_set.longest
    scheduler._make_free()
    assert swap_of(pipeline).holds(name)
    assert len(swap_of(pipeline).ledger.shelf) == 0
    run_until(pipeline, name)
    pipeline.check_tokens(agent.calls)


def test_the_policy_is_told_what_a_fetch_costs(monkeypatch):
    """Seats are kept and given up by it."""
    pipeline = pipeline_of()
    monkeypatch.setattr(swap_of(pipeline).ledger, "fetch_token_s", lambda: 0.125)
    run_until(pipeline, Agent(pipeline, "agent", [7] * 9).call(2))
    assert pipeline.scheduler.autellix._fetch_token_s == 0.125


def shelve_now(pipeline: Pipeline, program_id: str) -> None:
    """Save what the device has of a program, as if it had lost its seat."""
    scheduler: Any = pipeline.scheduler
    hashes = list(scheduler.autellix.ledger.get(program_id).member.working_set.longest)
    swap_of(pipeline).shelve(program_id, hashes, compat.cached_blocks(scheduler, hashes))


def test_a_call_that_reads_no_cache_fetches_nothing():
    """Log probabilities of the prompt are asked for: all of it is computed."""
    pipeline = pipeline_of()
    agent = displaced_agent(pipeline)
    counts = swap_of(pipeline).counts
    before = counts.in_blocks
    sampling = SamplingParams(
        max_tokens=5, ignore_eos=True, temperature=0.0, skip_reading_prefix_cache=True
    )
    run_until(pipeline, agent.call(5, sampling=sampling))
    assert (counts.fetched, counts.in_blocks) == (0, before)
    pipeline.check_tokens(agent.calls)


def test_a_call_that_is_aborted_at_the_door_gives_its_slots_back():
    """What it took from the shelf is its own."""
    pipeline = pipeline_of()
    agent = displaced_agent(pipeline)
    name = agent.call(5)
    assert swap_of(pipeline).counts.fetched == 1
    pipeline.abort(name)
    pipeline.run(3000)
    end_all(pipeline, "agent", *(f"other{number}" for number in range(6)))
    assert_nothing_held(pipeline)


@pytest.mark.parametrize(
    ("depth", "v2", "fails"),
    [(1, False, 0.0), (1, False, 0.3), (2, False, 0.0), (2, True, 0.0), (3, True, 0.0)],
)
def test_agents_with_tools_in_any_order_read_their_own_context(depth, v2, fails):
    """Twelve agents where four have room: tools of any length, aborts, ends, a full pool."""
    fetched = dropped = 0
    for seed in range(6):
        pipeline = pipeline_of(depth=depth, v2=v2, kv_blocks=40, pool=48, fails=fails)
        fetched_now, dropped_now = agents_at_random(pipeline, random.Random(seed))
        fetched += fetched_now
        dropped += dropped_now
    assert fetched >= 20
    assert dropped > 0


def agents_at_random(pipeline: Pipeline, rng: random.Random) -> tuple[int, int]:
    """Run agents to their end; return calls that fetched something and programs pushed out."""
    agents = [
        Agent(pipeline, f"a{number}", [5] * 8 * (number % 2) + [10 + number] * rng.randrange(4, 24))
        for number in range(12)
    ]
    ledger = swap_of(pipeline).ledger
    assert ledger is not None
    due: list[tuple[int, Agent]] = [(rng.randrange(60), agent) for agent in agents]
    open_calls: dict[str, Agent] = {}
    over: list[tuple[str, int, int]] = []
    step = 0
    while due or open_calls:
        step += 1
        assert step < 20_000
        for at, agent in [pair for pair in due if pair[0] <= step]:
            due.remove((at, agent))
            more = [rng.randrange(10, 99) for _ in range(rng.randrange(1, 6))]
            open_calls[agent.call(rng.randrange(2, 8), more=more)] = agent
        pipeline.step()
        ledger.pool.check_integrity()
        if open_calls and rng.random() < 0.01:
            pipeline.abort(rng.choice(sorted(open_calls)))
        for name in [name for name in open_calls if name in pipeline.finished]:
            agent = open_calls.pop(name)
            aborted = pipeline.finished[name].reason != "length"
            if not aborted:
                over.append(agent.calls[-1])
            if aborted or len(agent.calls) == 6:
                end_all(pipeline, agent.name)
            else:
                due.append((step + rng.choice((1, 4, 30, 200)), agent))
    pipeline.run(3000)
    pipeline.check_tokens(over)
    assert_nothing_held(pipeline)
    return swap_of(pipeline).counts.fetched, ledger.shelf.dropped

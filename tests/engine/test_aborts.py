"""A call that is aborted or fails, in every state that it can be in: nothing of it stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from autellix.server.engine.build import make_request
from autellix.server.engine.connector_config import swap_transfer_config
from autellix.server.engine.harness import Pipeline, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.engine.swap_worker import SwapWorker
from tests.engine.books import Books
from tests.engine.test_connector import (
    BLOCK,
    BLOCK_BYTES,
    MarkCopier,
    SwappingRunner,
    assert_nothing_held,
    swap_of,
)

MODES = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
POOL_BLOCKS = 64
STEP_TOKENS = 16
PROMPT = 100  # more than all batches in flight take, so that it is computed in parts
POLICIES: dict[str, dict[str, Any]] = {
    "plas": {"policy": "plas", "level_bounds_s": [4.0, 16.0, 64.0], "window_steps": 1},
    "adaptive": {"policy": "adaptive", "window_steps": 1},
}
modes = pytest.mark.parametrize(("depth", "v2"), MODES)
policies = pytest.mark.parametrize("policy", POLICIES)
ends = pytest.mark.parametrize("as_error", [False, True], ids=["abort", "error"])


class Rig:
    """Two long programs, of which ``long-0`` is to end; short ones take their slots.

    Attributes:
        books: What every report is compared with.
    """

    def __init__(self, depth: int, v2: bool, policy: str, *, swaps: bool = False) -> None:
        transfer = swap_transfer_config(POOL_BLOCKS * BLOCK_BYTES, always=True) if swaps else None
        if transfer is not None:
            transfer["kv_load_failure_policy"] = "fail"  # vLLM's own default, not ours
        self.pipeline: Pipeline = build_pipeline(
            AutellixScheduler,
            depth=depth,
            v2_runner=v2,
            slots=2,
            kv_blocks=512,
            block_tokens=BLOCK,
            step_tokens=STEP_TOKENS,
            prefix_caching=False,
            policy_config=POLICIES[policy],
            kv_transfer_config=transfer,
        )
        if swaps:
            runner = SwappingRunner(v2=v2, slots=2, block_tokens=BLOCK)
            self.copier = MarkCopier(runner.marks)
            runner.worker = SwapWorker(self.copier, POOL_BLOCKS)
            self.pipeline.runner = runner
        self.swaps = swaps
        self.scheduler: Any = self.pipeline.scheduler
        self.books = Books(self.pipeline)
        self.calls: list[tuple[str, int, int]] = []

    def add(self, name: str, prompt: int, answer: int) -> None:
        """Add a call of a program of its own."""
        request = make_request(
            name,
            [7] * prompt,
            answer,
            arrival_s=self.pipeline.clock.now_s(),
            session_id=f"program-{name}",
            prefix_caching=False,
        )
        self.pipeline.add(request)
        self.calls.append((name, prompt, answer))

    def until(self, seen: Callable[[], bool]) -> None:
        """Step until a state is seen."""
        for _ in range(300):
            if seen():
                return
            self.pipeline.step()
        raise AssertionError("the state never came")

    def request(self, name: str) -> Any:
        """Return vLLM's request, None once it is over."""
        return self.scheduler.requests.get(name)

    def is_running(self, name: str) -> bool:
        """Return whether a call is in the batch."""
        return self.request(name) in self.scheduler.running

    def push_out(self) -> None:
        """Have both long programs decode, and short ones come that they give way to."""
        self.add("long-1", PROMPT, 60)
        self.until(lambda: all(len(self.pipeline.tokens[f"long-{n}"]) > 6 for n in range(2)))
        for n in range(4):
            self.add(f"short-{n}", 5, 3)
        self.until(lambda: self.request("long-0").status == RequestStatus.PREEMPTED)

    def is_loadable(self) -> bool:
        """Return whether ``long-0`` is in the host pool, copied and answered for."""
        ledger = swap_of(self.pipeline).ledger
        request = self.request("long-0")
        assert ledger is not None
        return ledger.is_saved("long-0") and ledger.loadable_tokens(request, 0) is not None

    def is_loading(self) -> bool:
        """Return whether the load of ``long-0`` is under way in a batch in flight."""
        ledger: Any = swap_of(self.pipeline).ledger
        return any(load.call.request_id == "long-0" for load in ledger._loads)


def queued(rig: Rig) -> None:
    """Both slots are taken by others, who came first."""
    for n in range(2):
        rig.add(f"other-{n}", 5, 30)
    rig.until(lambda: all(rig.pipeline.tokens[f"other-{n}"] for n in range(2)))
    rig.add("long-0", PROMPT, 60)
    request = rig.request("long-0")
    assert request.status == RequestStatus.WAITING
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 0)


def chunk(rig: Rig) -> None:
    """A part of its prompt is computed."""
    rig.add("long-0", PROMPT, 60)
    rig.until(lambda: rig.books.service_s.get("long-0", 0.0) > 0)
    request = rig.request("long-0")
    assert rig.is_running("long-0")
    assert request.is_prefill_chunk
    assert 0 < request.num_computed_tokens < PROMPT
    assert not rig.pipeline.tokens["long-0"]


def decoding(rig: Rig) -> None:
    """It has a part of its answer."""
    rig.add("long-0", PROMPT, 60)
    rig.until(lambda: len(rig.pipeline.tokens["long-0"]) > 3)
    assert rig.is_running("long-0")
    assert not rig.request("long-0").is_prefill_chunk


def preempted(rig: Rig) -> None:
    """It was taken out of the batch and waits, its blocks freed or about to be."""
    rig.add("long-0", PROMPT, 60)
    rig.push_out()
    request = rig.request("long-0")
    assert not rig.is_running("long-0")
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)


def swapped(rig: Rig) -> None:
    """It waits, and its blocks are in host memory."""
    preempted(rig)
    rig.until(rig.is_loadable)
    assert not rig.is_running("long-0")
    ledger = swap_of(rig.pipeline).ledger
    assert ledger.is_saved("long-0")
    assert ledger.pool.free_count < ledger.pool.slot_count


def loading(rig: Rig) -> None:
    """It runs again, and the batch that brings its blocks back is in flight."""
    swapped(rig)
    rig.until(rig.is_loading)
    assert rig.is_running("long-0")
    assert not swap_of(rig.pipeline).ledger.is_saved("long-0")


def failed(rig: Rig) -> set[str]:
    """Return the calls that were aborted or failed."""
    over = rig.pipeline.finished.values()
    return {one.request_id for one in over if one.reason in ("abort", "error")}


def end_and_check(rig: Rig, *, as_error: bool) -> Any:
    """End ``long-0``, play on, and check that nothing stays; return its report."""
    _end_and_look(rig, as_error=as_error)
    report = play_on_and_check(rig)
    assert failed(rig) == {"long-0"}
    return report


def _end_and_look(rig: Rig, *, as_error: bool) -> None:
    ended_saved = swap_of(rig.pipeline).counts.ended_while_saved if rig.swaps else 0
    was_saved = rig.swaps and swap_of(rig.pipeline).ledger.is_saved("long-0")
    service_s = rig.books.service_s.get("long-0", 0.0)
    rig.pipeline.abort("long-0", as_error=as_error)
    rig.books.check([name for name, *_ in rig.calls if rig.request(name) is None])
    (report,) = [one for one in rig.books.reports if one.request_id == "long-0"]
    assert report.reason == ("error" if as_error else "abort")
    assert report.service_s == service_s
    assert rig.scheduler.autellix.ledger.get("program-long-0").sum_s == report.service_s
    assert not rig.scheduler.autellix.ledger.get("program-long-0").calls
    assert rig.request("long-0") is None
    assert len(rig.scheduler.accounts) == len(rig.scheduler.requests)
    if rig.swaps:
        assert swap_of(rig.pipeline).counts.ended_while_saved - ended_saved == was_saved
        assert not swap_of(rig.pipeline).ledger.is_saved("long-0")


def play_on_and_check(rig: Rig) -> Any:
    """Play to the end and check all reports and that nothing stays; return that of ``long-0``."""
    rig.pipeline.run()
    rig.pipeline.check_tokens(call for call in rig.calls if call[0] not in failed(rig))
    rig.books.check()
    for name, *_ in rig.calls:
        (of_it,) = [r for r in rig.books.reports if r.request_id == name]
        assert rig.scheduler.autellix.ledger.get(f"program-{name}").sum_s == of_it.service_s
        assert of_it.swaps == (of_it.preemptions if rig.swaps else 0)
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == rig.scheduler.cache_config.num_gpu_blocks - 1
    assert not rig.scheduler.calls
    assert not rig.scheduler._kept_for
    if rig.swaps:
        assert_nothing_held(rig.pipeline)
    (report,) = [one for one in rig.books.reports if one.request_id == "long-0"]
    return report


@ends
@policies
@modes
@pytest.mark.parametrize("state", [queued, chunk, decoding, preempted])
def test_in_every_state(state, depth: int, v2: bool, policy: str, as_error: bool):
    """The state is seen, the call ends: one report with the right figures, and all is free."""
    rig = Rig(depth, v2, policy)
    state(rig)
    report = end_and_check(rig, as_error=as_error)
    assert report.preemptions == (state is preempted)
    assert (report.service_s > 0) == (state is not queued)


@ends
@policies
@pytest.mark.parametrize(
    ("state", "depth", "v2"),
    # With one batch in flight a load is over when the step is.
    [
        (state, *mode)
        for state in (swapped, loading)
        for mode in MODES
        if state is swapped or mode[0] > 1
    ],
)
def test_with_blocks_in_host_memory(state, depth: int, v2: bool, policy: str, as_error: bool):
    """Swapped out, or just being loaded: the host's slots are free too."""
    rig = Rig(depth, v2, policy, swaps=True)
    state(rig)
    report = end_and_check(rig, as_error=as_error)
    assert (report.preemptions, report.swaps) == (1, 1)


@policies
@pytest.mark.parametrize("v2", [False, True])
def test_an_error_that_vllm_finds_itself(v2: bool, policy: str):
    """Its blocks cannot be brought back, and vLLM is told to fail such calls."""
    # The fake runner knows of no second batch that reads what the first one failed to load.
    rig = Rig(1, v2, policy, swaps=True)
    swapped(rig)
    rig.copier.fails = 1.0
    rig.until(lambda: rig.request("long-0") is None)
    rig.copier.fails = 0.0
    assert rig.pipeline.finished["long-0"].reason == "error"
    assert failed(rig) <= {"long-0", "long-1"}
    report = play_on_and_check(rig)
    assert (report.reason, report.preemptions, report.swaps) == ("error", 1, 1)

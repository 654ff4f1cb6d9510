"""The scheduler's and the worker's half of the swap together, on real bytes, without vLLM."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.engine.copier import HostCopier, Moved, segments_of
from autellix.server.engine.swap_ledger import SwapLedger
from autellix.server.engine.swap_worker import SwapWorker
from autellix.server.swap.choose import Choice, Speeds
from autellix.server.swap.host_pool import HostPool, SlotRef

BLOCK = 4  # tokens


def make_call(name: str, tokens: list[int]) -> SimpleNamespace:
    """Return what the ledger reads of a request; a block's hash names all tokens up to it."""
    whole = len(tokens) // BLOCK
    return SimpleNamespace(
        request_id=name,
        all_token_ids=list(tokens),
        num_tokens=len(tokens),
        block_hashes=[repr(tokens[: (i + 1) * BLOCK]).encode() for i in range(whole)],
    )


class Device:
    """A cache whose bytes say which tokens they were computed from, and a step loop over it."""

    def __init__(self, blocks: int, slots: int, *, shares: bool = True) -> None:
        self.cache = torch.zeros(blocks, 2, BLOCK, dtype=torch.int64)
        copier = HostCopier(segments_of({"layer": self.cache}, blocks), blocks, slots, 2)
        self.ledger = SwapLedger(
            HostPool(slots), BLOCK, copier.slot_bytes, shares=shares, always=True
        )
        self.worker = SwapWorker(copier, slots)
        self.free = list(range(blocks))

    def compute(self, call: SimpleNamespace, blocks: list[int], start: int, end: int) -> None:
        """Write the KV of tokens start to end: a function of all tokens so far."""
        for position in range(start, end):
            mark = hash(tuple(call.all_token_ids[: position + 1]))
            self.cache[blocks[position // BLOCK], :, position % BLOCK] = mark

    def is_right(self, call: SimpleNamespace, blocks: list[int], tokens: int) -> bool:
        """Return whether the blocks hold the KV of the call's first tokens."""
        return all(
            bool(
                (
                    self.cache[blocks[p // BLOCK], :, p % BLOCK]
                    == hash(tuple(call.all_token_ids[: p + 1]))
                ).all()
            )
            for p in range(tokens)
        )

    def step(self) -> set[int]:
        """Send the step's message: gathers, then loads. Return the blocks that failed."""
        copies = self.ledger.take_copies()
        self.worker.swap_out(copies.out_blocks, copies.out_slots)
        self.worker.swap_in(copies.in_blocks, copies.in_slots)
        invalid = self.worker.take_invalid_blocks()
        self.ledger.lost_loads(copies.step, invalid)
        self.ledger.learn(copies.step, *self.worker.take_news())
        self.ledger.pool.check_integrity()
        return invalid

    def scribble(self, blocks: list[int]) -> None:
        """Give blocks away: somebody writes over them."""
        self.cache[blocks] = -1


def test_a_victim_gets_back_what_the_device_lost():
    """Two of its three blocks are still on the device: only the third is loaded."""
    device = Device(12, 8)
    call = make_call("a", list(range(11)))
    device.compute(call, [0, 1, 2], 0, 10)
    assert device.ledger.save(call, [0, 1, 2], 10).choice is Choice.SWAP
    device.step()
    device.scribble([2])
    assert device.ledger.loadable_tokens(call, 8) == 2
    device.ledger.resume(call, [0, 1, 7], 2)
    assert device.step() == set()
    assert device.is_right(call, [0, 1, 7], 10)
    assert device.ledger.counts.in_blocks == 1
    assert device.ledger.pool.free_count == 8


def test_the_figures_for_the_gateway_are_those_of_the_copies():
    """Bytes both ways, calls, and the bandwidth that was measured."""
    device = Device(12, 8)
    call = make_call("a", list(range(11)))
    device.ledger.save(call, [0, 1, 2], 10)
    device.step()
    device.ledger.resume(call, [0, 1, 7], 2)
    device.step()
    device.ledger.learn(99, [], Speeds(out_bytes_s=2e9))
    figures = device.ledger.figures()
    block_bytes = 2 * BLOCK * 8
    assert (figures.swap_outs, figures.swap_ins) == (1, 1)
    assert (figures.out_bytes, figures.in_bytes) == (3 * block_bytes, block_bytes)
    assert figures.out_bytes_s == 2e9
    assert (figures.pool_full, figures.swap_failed) == (0, 0)


def test_a_call_is_not_loaded_before_its_gather_is_answered():
    """Nobody builds on a copy that may yet fail; one step later it is there."""
    device = Device(12, 8)
    call = make_call("a", list(range(9)))
    device.compute(call, [0, 1], 0, 8)
    device.ledger.save(call, [0, 1], 8)
    assert device.ledger.loadable_tokens(call, 0) is None
    device.ledger.take_copies()
    assert device.ledger.loadable_tokens(call, 0) is None
    device.ledger.learn(1, [], Speeds())
    assert device.ledger.loadable_tokens(call, 0) == 8


def test_a_call_that_resumes_at_once_without_a_load_is_forgotten():
    """Its gather is skipped, for nobody holds the slots."""
    device = Device(12, 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.ledger.resume(call, [0, 1, 2], 0)
    device.step()
    assert device.ledger.pool.free_count == 8


def test_everything_still_on_the_device_loads_nothing():
    """A full prefix hit gives the slots back without a copy."""
    device = Device(12, 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.step()
    assert device.ledger.loadable_tokens(call, 8) == 0
    device.ledger.resume(call, [0, 1, 2], 0)
    device.step()
    assert device.ledger.counts.hits_only == 1
    assert device.ledger.pool.free_count == 8


def test_a_full_pool_recomputes_and_is_counted():
    """Nothing is lost: the call is simply not saved."""
    device = Device(12, 1)
    call = make_call("a", list(range(9)))
    assert device.ledger.save(call, [0, 1], 8).choice is Choice.RECOMPUTE
    assert device.ledger.counts.pool_full == 1
    assert device.ledger.loadable_tokens(call, 0) == 0


def test_a_changed_prompt_recomputes_and_is_counted():
    """The saved KV is of other tokens: it is not loaded, and its slots are free."""
    device = Device(12, 8)
    device.ledger.save(make_call("a", list(range(9))), [0, 1], 8)
    device.step()
    for other in (make_call("a", [99, *range(1, 9)]), make_call("a", [1, 2])):
        assert device.ledger.loadable_tokens(other, 0) == 0
    assert device.ledger.counts.changed == 1
    assert device.ledger.pool.free_count == 8


@pytest.mark.parametrize("sent", [False, True])
def test_an_abort_frees_the_slots_in_any_state(sent):
    """Before or after the gather is on its way."""
    device = Device(12, 8)
    device.ledger.save(make_call("a", list(range(9))), [0, 1], 8)
    if sent:
        device.step()
    device.ledger.end("a")
    assert device.ledger.pool.free_count == 8
    copies = device.ledger.take_copies()
    assert not copies.out_slots
    assert device.ledger.counts.ended_while_saved == 1
    device.ledger.end("a")


def test_a_call_that_ends_before_its_load_is_sent_loads_nothing():
    """The load would write into blocks that are somebody else's by then."""
    device = Device(12, 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.step()
    device.ledger.resume(call, [4, 5], 8)
    device.ledger.end("a")
    copies = device.ledger.take_copies()
    assert not copies.in_blocks
    assert device.ledger.pool.free_count == 8


def test_a_shared_slot_is_filled_although_its_first_owner_ends_at_once():
    """The second owner of a prefix needs the gather that the first one queued."""
    device = Device(12, 8)
    first, second = make_call("a", list(range(9))), make_call("b", [*range(8), 77])
    device.compute(first, [0, 1], 0, 8)
    device.ledger.save(first, [0, 1], 8)
    device.ledger.save(second, [0, 1], 8)
    assert device.ledger.counts.shared_blocks == 2
    device.ledger.end("a")
    device.step()
    device.ledger.resume(second, [8, 9], device.ledger.loadable_tokens(second, 0))
    assert device.step() == set()
    assert device.is_right(second, [8, 9], 8)


def test_two_calls_share_a_load_in_one_step():
    """One of them ends before the message: the other is still loaded."""
    device = Device(12, 8)
    calls = [make_call("a", list(range(9))), make_call("b", [*range(8), 77])]
    device.compute(calls[0], [0, 1], 0, 8)
    for call in calls:
        device.ledger.save(call, [0, 1], 8)
    device.step()
    device.ledger.resume(calls[0], [4, 5], 8)
    device.ledger.resume(calls[1], [6, 7], 8)
    device.ledger.end("a")
    assert device.step() == set()
    assert device.is_right(calls[1], [6, 7], 8)


class BrokenCopier:
    """Copies nothing, one way or the other."""

    slot_bytes, backend = 64, "broken"

    def __init__(self, way: str) -> None:
        self.way = way

    def swap_out(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        if self.way == "out":
            raise RuntimeError("the link is down")
        return Moved(64, 0.1)

    def swap_in(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        raise RuntimeError("the link is down")


def test_a_failed_swap_out_is_recomputed():
    """The scheduler hears of it before the call resumes."""
    device = Device(12, 8)
    device.worker = SwapWorker(BrokenCopier("out"), 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.step()
    assert device.ledger.loadable_tokens(call, 0) == 0
    assert device.ledger.counts.failed == 1
    assert device.ledger.pool.free_count == 8


def test_a_failed_swap_in_names_the_blocks():
    """VLLM recomputes from the first of them on."""
    device = Device(12, 8)
    device.worker = SwapWorker(BrokenCopier("in"), 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.step()
    device.ledger.resume(call, [4, 5], 8)
    assert device.step() == {4, 5}
    assert device.ledger.counts.failed == 1


def test_a_slot_that_was_reused_is_never_read_as_the_old_one():
    """A load under an old stamp is refused by the worker."""
    device = Device(12, 1, shares=False)
    device.ledger.save(make_call("a", list(range(5))), [0], 4)
    device.step()
    device.worker.swap_in([3], [SlotRef(0, 10**6)])
    assert device.worker.take_invalid_blocks() == {3}


def test_tokens_the_scheduler_does_not_know_yet_are_not_saved():
    """Steps under way and rejected drafts: only known tokens count."""
    device = Device(12, 8)
    call = make_call("a", list(range(6)))
    device.ledger.save(call, [0, 1, 2], 9)
    device.step()
    assert device.ledger.loadable_tokens(call, 0) == 5  # one is left to compute


def test_new_weights_empty_the_pool():
    """A reset forgets saved calls and copies under way."""
    device = Device(12, 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.ledger.clear()
    assert device.ledger.loadable_tokens(call, 0) == 0
    assert device.ledger.pool.free_count == 8
    assert not device.ledger.take_copies().out_slots


def test_what_is_on_the_shelf_makes_room_for_a_victim():
    """A program between two calls costs some prefill, a preempted call its own time as well."""
    device = Device(12, 4)
    call = make_call("a", list(range(13)))
    shelved = make_call("b", list(range(20, 37)))
    device.ledger.shelve("program", shelved.block_hashes, [4, 5, 6, 7])
    assert "program" in device.ledger.shelf
    assert device.ledger.save(call, [0, 1, 2, 3], 13).choice is Choice.SWAP
    assert "program" not in device.ledger.shelf


def test_measured_costs_decide():
    """With a link slower than prefill the ledger stops swapping."""
    ledger = SwapLedger(HostPool(8), BLOCK, 1 << 20)
    call = make_call("a", list(range(9)))
    assert ledger.save(call, [0, 1], 8).choice is Choice.SWAP
    ledger.learn(0, [], Speeds(1e3, 1e3, 1e4))
    assert ledger.save(call, [0, 1], 8).choice is Choice.RECOMPUTE
    assert ledger.counts.recompute_chosen == 1
    assert not ledger.is_saved("a")
    assert ledger.pool.free_count == 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 14), st.booleans())
def test_any_order_of_preemptions_resumes_and_aborts_keeps_every_byte(seed, slots, shares):
    """Calls with common prefixes grow, are preempted, resume elsewhere and end, in any order."""
    rng = random.Random(seed)
    device = Device(24, slots, shares=shares)
    running: dict[str, tuple[SimpleNamespace, list[int], int]] = {}
    away: dict[str, SimpleNamespace] = {}
    made = 0
    for _ in range(60):
        freed: list[int] = []
        for _ in range(rng.randrange(3)):
            kind = rng.random()
            if kind < 0.35 and len(device.free) >= 6:
                prefix = [rng.choice((1, 2))] * rng.choice((4, 8))
                tokens = prefix + [rng.randrange(9) for _ in range(rng.randrange(1, 12))]
                call = make_call(f"c{made}", tokens)
                made += 1
                blocks = [device.free.pop(0) for _ in range(-(-len(tokens) // BLOCK))]
                device.compute(call, blocks, 0, len(tokens) - 1)
                running[call.request_id] = (call, blocks, len(tokens) - 1)
            elif kind < 0.6 and any(computed > 0 for _, _, computed in running.values()):
                victims = sorted(name for name, state in running.items() if state[2] > 0)
                call, blocks, computed = running.pop(rng.choice(victims))
                device.ledger.save(call, blocks, computed)
                freed += blocks
                away[call.request_id] = call
            elif kind < 0.75 and (running or away):
                name = rng.choice(sorted(running | away))
                device.ledger.end(name)
                away.pop(name, None)
                freed += running.pop(name, (None, [], 0))[1]
            elif away and len(device.free) >= 6:
                call = away.pop(rng.choice(sorted(away)))
                tokens = device.ledger.loadable_tokens(call, 0)
                if tokens is None:  # preempted in this very step
                    away[call.request_id] = call
                    continue
                blocks = [device.free.pop(0) for _ in range(-(-call.num_tokens // BLOCK))]
                device.ledger.resume(call, blocks, tokens)
                running[call.request_id] = (call, blocks, -tokens)
        assert device.step() == set()
        device.free += freed
        device.scribble(freed)
        rng.shuffle(device.free)
        for name, (call, blocks, computed) in running.items():
            if computed <= 0:  # it resumed in this step
                assert device.is_right(call, blocks, -computed)
                device.compute(call, blocks, -computed, call.num_tokens - 1)
                computed = call.num_tokens - 1
                running[name] = (call, blocks, computed)
            assert device.is_right(call, blocks, computed)
    for name in [*running, *away]:
        device.ledger.end(name)
    device.step()
    assert device.ledger.pool.free_count == slots


def test_a_programs_next_call_gets_what_it_begins_with():
    """Three blocks are on the shelf; it goes on from two of them, and the bytes are theirs."""
    device = Device(12, 8)
    first = make_call("a", list(range(13)))
    device.compute(first, [0, 1, 2], 0, 12)
    ledger = device.ledger
    assert ledger.shelve("p", first.block_hashes, [0, 1, 2]).choice is Choice.SWAP
    device.step()
    device.scribble([0, 1, 2])
    call = make_call("b", [*range(8), 70, 71, 72])
    assert not ledger.fetch("q", call)
    assert ledger.fetch("p", call)
    assert ledger.loadable_tokens(call, 0) == 8
    ledger.resume(call, [5, 6, 7], 8)
    assert device.step() == set()
    assert device.is_right(call, [5, 6], 8)
    assert ledger.pool.free_count == 8
    assert (ledger.counts.shelved, ledger.counts.fetched, ledger.counts.in_blocks) == (1, 1, 2)


def test_a_call_that_is_saved_already_fetches_nothing():
    """What it had computed itself is more."""
    device = Device(12, 8)
    call = make_call("a", list(range(13)))
    device.ledger.shelve("p", call.block_hashes[:1], [0])
    device.ledger.save(call, [0, 1, 2], 12)
    assert not device.ledger.fetch("p", call)
    device.step()
    assert device.ledger.loadable_tokens(call, 0) == 12


def test_blocks_that_a_load_is_writing_are_not_saved_from():
    """The load may fail, which is known one step later; what stands before them may be saved."""
    device = Device(12, 8)
    call = make_call("a", list(range(9)))
    device.ledger.save(call, [0, 1], 8)
    device.step()
    device.ledger.resume(call, [4, 5, 6], 4)  # the first block is still on the device
    other = make_call("b", list(range(13)))
    device.ledger.shelve("p", other.block_hashes, [4, 5, 6])
    assert device.ledger.counts.out_blocks + device.ledger.counts.shared_blocks == 2 + 1
    device.step()
    device.ledger.shelve("p", other.block_hashes, [4, 5, 6])
    assert device.ledger.counts.out_blocks + device.ledger.counts.shared_blocks == 2 + 1 + 3


def test_a_gather_for_the_shelf_that_failed_is_no_ones():
    """Neither the program's nor that of the call that took it before the answer came."""
    device = Device(12, 8)
    device.worker = SwapWorker(BrokenCopier("out"), 8)
    call = make_call("a", list(range(9)))
    device.ledger.shelve("p", call.block_hashes, [0, 1])
    device.ledger.shelve("q", [b"other"], [3])
    assert device.ledger.fetch("p", call)
    device.step()
    assert device.ledger.loadable_tokens(call, 0) == 0
    assert len(device.ledger.shelf) == 0
    assert device.ledger.counts.failed == 2
    assert device.ledger.pool.free_count == 8


def test_without_block_hashes_nothing_is_shelved():
    """There is no name by which the next call could find it."""
    device = Device(12, 8, shares=False)
    call = make_call("a", list(range(9)))
    assert device.ledger.shelve("p", call.block_hashes, [0, 1]).choice is Choice.RECOMPUTE
    assert device.ledger.fetch_token_s() == float("inf")


def test_what_fetching_costs_is_measured():
    """Out and back, for each token of a block of 4 tokens and 64 bytes."""
    device = Device(12, 8)
    assert device.ledger.fetch_token_s() == float("inf")
    device.ledger.learn(1, [], Speeds(out_bytes_s=64.0, in_bytes_s=32.0))
    assert device.ledger.fetch_token_s() == pytest.approx((1 + 2) / 4)

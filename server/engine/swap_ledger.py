"""The scheduler's half of the swap: which calls' KV is in the host pool, and what to move.

Theory of operation. A call is *saved* from its preemption until it runs again, is aborted, or its
blocks turn out to be lost. Saving queues a gather for this step's message; the worker runs all
gathers of a message before anything of the step touches the cache, so the blocks may be freed and
given away at once. Once all workers have answered that message the call is *loadable*: a gather
that failed is known before anyone builds on it. When the call is admitted again, a load of the
blocks that the device no longer has is queued in the same way, and its slots become free once the
message is on its way: messages are carried out in order, so a later gather into the same slots
comes later. Slots carry stamps (see host_pool), so whatever else goes wrong is noticed where the
bytes are, and ends in recomputation.

A program between two calls has its blocks on the *shelf*, gathered in the same way; its next call
takes those it begins with and is saved from then on.

Nothing here imports vLLM: a call is any object with its request's attributes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..channel import SwapFigures
from ..swap.choose import Choice, Decision, Speeds, Victim, choose
from ..swap.host_pool import HostPool, Reservation, SlotRef
from ..swap.plan import blocks_for, missing_blocks
from ..swap.shelf import Shelf


@dataclass
class SwapCounts:
    """What happened since the engine started; calls, but for the tokens, blocks and bytes."""

    swap_outs: int = 0
    swap_ins: int = 0
    hits_only: int = 0  # resumed with everything still on the device
    out_blocks: int = 0
    shared_blocks: int = 0  # not copied, for they were stored already
    in_blocks: int = 0
    in_tokens: int = 0
    kept: int = 0
    recompute_chosen: int = 0
    dropped: int = 0
    pool_full: int = 0
    changed: int = 0  # the prompt is another than what was saved
    failed: int = 0  # a copy failed
    ended_while_saved: int = 0
    shelved: int = 0  # programs put on the shelf
    fetched: int = 0  # calls that took something from there

    def as_dict(self) -> dict[str, int]:
        """Return the figures by name."""
        return asdict(self)


class _Saved(NamedTuple):
    generation: int
    tokens: int
    content: bytes  # names the tokens
    step: int  # whose message carries the gather


class _Load(NamedTuple):
    call: Any
    step: int
    blocks: frozenset[int]


class Copies(NamedTuple):
    """The copies to be told to the workers in one step."""

    step: int
    out_blocks: list[int]
    out_slots: list[SlotRef]
    in_blocks: list[int]
    in_slots: list[SlotRef]


class SwapLedger:
    """Decides, counts and remembers. Only the scheduler's thread calls it.

    Args:
        pool: The slots.
        block_tokens: Tokens of a block.
        block_bytes: Bytes of a block of all layers.
        shares: Whether a call's ``block_hashes`` name its blocks one to one.
        always: Swap every victim, whatever it costs (for tests and comparisons).
    """

    def __init__(
        self,
        pool: HostPool,
        block_tokens: int,
        block_bytes: int,
        *,
        shares: bool = True,
        always: bool = False,
    ) -> None:
        self.pool = pool
        self.shelf = Shelf(pool)
        self.counts = SwapCounts()
        self.speeds = Speeds()
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._shares = shares
        self._always = always
        self._saved: dict[str, _Saved] = {}
        self._outs: list[tuple[SlotRef, int]] = []
        self._ins: list[tuple[str, SlotRef, int]] = []
        self._to_release: list[tuple[str, int]] = []
        self._loads: list[_Load] = []  # sent, not yet answered
        self._step = 1  # of the next message
        self._answered = 0

    def save(
        self,
        call: Any,
        block_ids: Sequence[int],
        computed_tokens: int,
        *,
        free_device_blocks: int = 0,
        prefix_cache: bool = True,
    ) -> Decision:
        """Decide about a victim and queue the gather if it is to be swapped.

        Args:
            call: The request, with its state from before the preemption.
            block_ids: Its blocks, first to last.
            computed_tokens: Tokens whose KV is in them or being written by steps under way.
            free_device_blocks: Blocks nobody uses, the victim's own not counted.
            prefix_cache: Whether freed blocks can be found again on the device.
        """
        call_id = call.request_id
        # A step under way may have computed tokens that the scheduler does not know yet, or
        # drafts that will be rejected; what is known is right.
        tokens = min(computed_tokens, call.num_tokens)
        count = blocks_for(tokens, self._block_tokens)
        count = min(count, len(block_ids))
        tokens = min(tokens, count * self._block_tokens)
        keys = self._keys(call, tokens, count)
        self._forget(call_id)
        decision = self._decide(tokens, keys, free_device_blocks, prefix_cache)
        if decision.choice is not Choice.SWAP:
            self._count(decision.choice)
            return decision
        self.shelf.make_room(keys)
        reservation = self.pool.reserve(call_id, keys)
        if reservation is None:
            self.counts.pool_full += 1
            return Decision(Choice.RECOMPUTE, "the pool is full")
        self._saved[call_id] = _Saved(
            reservation.generation, tokens, self._content(call, tokens), self._step
        )
        self._gather(reservation, block_ids)
        self.counts.swap_outs += 1
        return decision

    def shelve(self, program_id: str, hashes: Sequence[Any], block_ids: Sequence[int]) -> Decision:
        """Decide about the KV of a program between two calls, and queue the gather.

        Args:
            program_id: Its next call may take them back.
            hashes: Of its whole blocks, first to last: as many as the device has.
            block_ids: Those blocks, computed by this step's predecessors.
        """
        under_way = frozenset[int]().union(*(load.blocks for load in self._loads))
        count = next((n for n, block in enumerate(block_ids) if block in under_way), len(block_ids))
        keys = [bytes(block_hash) for block_hash in hashes[:count]]
        if not self._shares or not keys:
            return Decision(Choice.RECOMPUTE, "nothing that can be found again")
        decision = self._decide(count * self._block_tokens, keys, 0, prefix_cache=False)
        if decision.choice is not Choice.SWAP:
            self._count(decision.choice)
            return decision
        reservation = self.shelf.put(program_id, keys, self._step)
        if reservation is None:
            self.counts.pool_full += 1
            return Decision(Choice.RECOMPUTE, "the pool is full")
        self._gather(reservation, block_ids)
        self.counts.shelved += 1
        return decision

    def fetch(self, program_id: str, call: Any) -> bool:
        """Give a call that comes in what its program has on the shelf; return whether it does.

        It is loaded when the call is admitted, like everything that is saved.
        """
        call_id = call.request_id
        if self.pool.find(call_id) is not None:
            return False
        taken = self.shelf.take(program_id, call.block_hashes, call_id)
        if taken is None:
            return False
        reservation = taken.reservation
        tokens = len(reservation.slots) * self._block_tokens
        self._saved[call_id] = _Saved(
            reservation.generation, tokens, self._content(call, tokens), taken.step
        )
        self.counts.fetched += 1
        return True

    def fetch_token_s(self) -> float:
        """Return what it takes to save a token's KV and fetch it back; endless: not measured."""
        out_bytes_s, in_bytes_s = self.speeds.out_bytes_s, self.speeds.in_bytes_s
        if not (self._shares and out_bytes_s and in_bytes_s):
            return float("inf")
        return self._block_bytes / self._block_tokens * (1 / out_bytes_s + 1 / in_bytes_s)

    def forget(self, program_ids: Iterable[str]) -> None:
        """These programs are over: nothing of theirs stays on the shelf."""
        for program_id in program_ids:
            self.shelf.drop(program_id)

    def _gather(self, reservation: Reservation, block_ids: Sequence[int]) -> None:
        fresh = reservation.fresh
        self._outs.extend((reservation.slots[i], block_ids[i]) for i in fresh)
        self.counts.out_blocks += len(fresh)
        self.counts.shared_blocks += len(reservation.slots) - len(fresh)

    def is_saved(self, call_id: str) -> bool:
        """Return whether the call's blocks are in the host pool."""
        return call_id in self._saved

    @property
    def saved_count(self) -> int:
        """Calls in the host pool."""
        return len(self._saved)

    def loadable_tokens(self, call: Any, hit_tokens: int) -> int | None:
        """Return how many tokens beyond the device's own hit the pool can give back.

        None: the gather is under way, ask again in the next step.
        """
        saved = self._saved.get(call.request_id)
        if saved is None:
            return 0
        if saved.step > self._answered:
            return None
        known = min(saved.tokens, call.num_tokens)
        if known < saved.tokens or self._content(call, known) != saved.content:
            self.counts.changed += 1
            self._forget(call.request_id)
            return 0
        return missing_blocks(saved.tokens, call.num_tokens, hit_tokens, self._block_tokens).tokens

    def resume(self, call: Any, block_ids: Sequence[int], load_tokens: int) -> None:
        """Queue the load of a call that runs again, and give its slots back after it.

        Args:
            call: The request.
            block_ids: Its new blocks, first to last, those with device hits among them.
            load_tokens: As ``loadable_tokens`` said, or 0 if nothing is to be loaded.
        """
        saved = self._saved.pop(call.request_id, None)
        if saved is None:
            assert load_tokens == 0, f"{call.request_id} is to load what was never saved"
            return
        reservation = self.pool.find(call.request_id)
        assert reservation is not None, f"{call.request_id} is saved without slots"
        if load_tokens == 0:
            self.counts.hits_only += 1
        else:
            usable = min(saved.tokens, call.num_tokens - 1)
            missing = missing_blocks(
                saved.tokens, call.num_tokens, usable - load_tokens, self._block_tokens
            )
            indices = range(missing.first, missing.last)
            for index in indices:
                self._ins.append((call.request_id, reservation.slots[index], block_ids[index]))
            self._loads.append(_Load(call, self._step, frozenset(block_ids[i] for i in indices)))
            self.counts.swap_ins += 1
            self.counts.in_blocks += missing.last - missing.first
            self.counts.in_tokens += load_tokens
        self._to_release.append((call.request_id, saved.generation))

    def end(self, call_id: str) -> None:
        """The call finished or was aborted: its slots are free."""
        if call_id in self._saved:
            self.counts.ended_while_saved += 1
        self._forget(call_id)

    def take_copies(self) -> Copies:
        """Return the copies queued since the last time; slots of loads become free."""
        outs = [(ref, block) for ref, block in self._outs if self.pool.holds(ref)]
        copies = Copies(
            self._step,
            [block for _, block in outs],
            [ref for ref, _ in outs],
            [block for _, _, block in self._ins],
            [ref for _, ref, _ in self._ins],
        )
        self._step += 1
        self._outs, self._ins = [], []
        for call_id, generation in self._to_release:
            self.pool.release(call_id, generation)
        self._to_release = []
        return copies

    def figures(self) -> SwapFigures:
        """Return what was moved; single figures, so any thread may ask."""
        counts, size = self.counts, self._block_bytes
        return SwapFigures(
            swap_outs=counts.swap_outs,
            swap_ins=counts.swap_ins,
            out_bytes=counts.out_blocks * size,
            in_bytes=counts.in_blocks * size,
            out_bytes_s=self.speeds.out_bytes_s,
            in_bytes_s=self.speeds.in_bytes_s,
            pool_full=counts.pool_full,
            swap_failed=counts.failed,
            shelved=counts.shelved,
            fetched=counts.fetched,
        )

    def learn(self, step: int, failed_slots: Sequence[SlotRef], speeds: Speeds) -> None:
        """All workers answered the message of this step; messages are answered in order."""
        assert step >= self._answered, "answers come in order"
        self.speeds = self.speeds.blend(speeds)
        for owner in self.pool.fail(failed_slots):
            lost = self.shelf.lost(owner) or self._saved.pop(str(owner), None) is not None
            self.counts.failed += lost
        self._answered = step
        self._loads = [load for load in self._loads if load.step > step]

    def lost_loads(self, step: int, invalid_blocks: set[int]) -> list[Any]:
        """Return the calls whose load in this step failed; ask before ``learn``."""
        lost = [
            load.call
            for load in self._loads
            if load.step == step and not load.blocks.isdisjoint(invalid_blocks)
        ]
        self.counts.failed += len(lost)
        return lost

    def clear(self) -> None:
        """Forget everything: the saved KV is of other weights."""
        self._saved.clear()
        self.shelf.clear()
        self._outs, self._ins, self._to_release = [], [], []
        self.pool.clear()

    def _decide(
        self, tokens: int, keys: Sequence[bytes | None], free_blocks: int, prefix_cache: bool
    ) -> Decision:
        if self._always and tokens > 0:
            return Decision(Choice.SWAP, "always")
        return choose(
            Victim(
                tokens=tokens,
                block_tokens=self._block_tokens,
                block_bytes=self._block_bytes,
                stored_blocks=self.pool.stored_count(keys),
                free_device_blocks=free_blocks,
                prefix_cache=prefix_cache,
            ),
            self.speeds,
        )

    def _count(self, choice: Choice) -> None:
        if choice is Choice.KEEP:
            self.counts.kept += 1
        elif choice is Choice.DROP:
            self.counts.dropped += 1
        else:
            self.counts.recompute_chosen += 1

    def _keys(self, call: Any, tokens: int, count: int) -> list[bytes | None]:
        """Name the whole blocks by their hashes; the last, partial one is the call's own."""
        if not self._shares:
            return [None] * count
        whole = min(tokens // self._block_tokens, len(call.block_hashes))
        return [bytes(h) for h in call.block_hashes[:whole]] + [None] * (count - whole)

    def _forget(self, call_id: str) -> None:
        # A call that is loaded in this very step keeps its slots until the message is built.
        saved = self._saved.pop(call_id, None)
        if saved is not None:
            self.pool.release(call_id, saved.generation)
            return
        if any(owner == call_id for owner, _ in self._to_release):
            self._drop_load(call_id)

    def _drop_load(self, call_id: str) -> None:
        """The call ended or was preempted before its load was sent: there is nothing to load."""
        self._ins = [copy for copy in self._ins if copy[0] != call_id]
        self._loads = [load for load in self._loads if load.call.request_id != call_id]
        self._to_release = [pair for pair in self._to_release if pair[0] != call_id]
        self.pool.release(call_id)

    def _content(self, call: Any, tokens: int) -> bytes:
        """Return a name of the call's first tokens: a resumed call must still have them.

        A block's hash names all before it too, so that only the tail is to be read.
        """
        whole = min(tokens // self._block_tokens, len(call.block_hashes)) if self._shares else 0
        named = bytes(call.block_hashes[whole - 1]) if whole else b""
        tail = array("q", call.all_token_ids[whole * self._block_tokens : tokens])
        return hashlib.blake2b(named + tail.tobytes(), digest_size=16).digest()

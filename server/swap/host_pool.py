"""The host pool's books: which slot holds which block, for whom.

Theory of operation. The pool has a fixed number of slots, each the size of one KV block of all
layers. A slot is free or held; a held slot has at least one owner: a call, or a program between two
calls (shelf.py). Blocks that several owners share (the same prefix, known by block hash) are stored
once. `reserve` is all or nothing, and a full pool is a normal state: the caller recomputes instead.

Every time a slot is handed out it gets a new *stamp*, never used before. Whoever moves the bytes
remembers the stamp under which a slot was filled and refuses to read it under another: a copy
that failed, was skipped or was overtaken can so never be read as somebody's KV. Every reservation
of a call has its own generation, so a late message about an earlier one changes nothing.

The pool knows no memory, no engine and no clock. One thread, the scheduler's, calls it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

Owner = Hashable  # a call by its name; whoever else keeps blocks, by anything that is no string


class SlotRef(NamedTuple):
    """A slot as it was handed out; after it is free again the same slot has another stamp."""

    slot_id: int
    stamp: int


class Reservation(NamedTuple):
    """The slots of one owner, one a block, in the order of its blocks.

    ``fresh`` are the indices of blocks whose slot must be filled; the others are already stored
    for another owner.
    """

    generation: int
    slots: tuple[SlotRef, ...]
    fresh: tuple[int, ...]


class _Held:
    """A slot in use."""

    __slots__ = ("key", "owner_count", "stamp")

    def __init__(self, stamp: int, key: bytes | None) -> None:
        self.stamp = stamp
        self.key = key
        self.owner_count = 1


class HostPool:
    """A fixed number of host-memory slots, each the size of one KV block.

    Args:
        slot_count: How many there are; at least 1.
    """

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 1, f"a pool has slots, not {slot_count}"
        self._slot_count = slot_count
        self._free = list(range(slot_count))  # a heap: low ids first keeps neighbours together
        self._held: dict[int, _Held] = {}
        self._by_key: dict[bytes, int] = {}
        self._owned: dict[Owner, Reservation] = {}
        self._stamp = 0
        self._generation = 0

    @property
    def slot_count(self) -> int:
        """All slots."""
        return self._slot_count

    @property
    def free_count(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    @property
    def owner_count(self) -> int:
        """Calls and programs that hold slots."""
        return len(self._owned)

    def stored_count(self, keys: Iterable[bytes | None]) -> int:
        """Return how many of these blocks are stored already, for whichever owner."""
        return sum(1 for key in keys if key is not None and key in self._by_key)

    def need(self, keys: Iterable[bytes | None]) -> int:
        """Return how many free slots ``reserve`` would take for these blocks."""
        known = self._by_key
        named = {key for key in keys if key is not None and key not in known}
        return len(named) + sum(1 for key in keys if key is None)

    def reserve(self, owner: Owner, keys: Sequence[bytes | None]) -> Reservation | None:
        """Hand out a slot for each block, or return None if they do not all fit.

        Args:
            owner: It holds no slots yet.
            keys: For each block the hash that names its content, or None for a block that no
                other call can have. A hash given twice is stored once.
        """
        assert owner not in self._owned, f"{owner} holds slots already"
        if not keys or self.need(keys) > len(self._free):
            return None
        slots: list[SlotRef] = []
        fresh: list[int] = []
        for index, key in enumerate(keys):
            slot_id = self._by_key.get(key) if key is not None else None
            if slot_id is None:
                slot_id = heapq.heappop(self._free)
                self._stamp += 1
                self._held[slot_id] = _Held(self._stamp, key)
                if key is not None:
                    self._by_key[key] = slot_id
                fresh.append(index)
            else:
                self._held[slot_id].owner_count += 1
            slots.append(SlotRef(slot_id, self._held[slot_id].stamp))
        self._generation += 1
        reservation = Reservation(self._generation, tuple(slots), tuple(fresh))
        self._owned[owner] = reservation
        return reservation

    def move(self, owner: Owner, new_owner: Owner, count: int) -> Reservation:
        """Give the first slots of an owner to another one, and take back the rest.

        Args:
            owner: Holds slots; none afterwards.
            new_owner: Holds none yet.
            count: How many, from the first block on; at least 1.
        """
        assert new_owner not in self._owned, f"{new_owner} holds slots already"
        whole = self._owned[owner]
        assert 1 <= count <= len(whole.slots), f"{count} of {len(whole.slots)} slots"
        kept = whole.slots[:count]
        for slot_id, _ in kept:
            self._held[slot_id].owner_count += 1
        self.release(owner)
        self._generation += 1
        reservation = Reservation(self._generation, kept, ())
        self._owned[new_owner] = reservation
        return reservation

    def find(self, owner: Owner) -> Reservation | None:
        """Return what an owner holds."""
        return self._owned.get(owner)

    def holds(self, ref: SlotRef) -> bool:
        """Return whether the slot is still in use as it was handed out."""
        held = self._held.get(ref.slot_id)
        return held is not None and held.stamp == ref.stamp

    def release(self, owner: Owner, generation: int | None = None) -> int:
        """Take back all slots of an owner; return how many became free.

        Nothing happens if it holds none, or holds those of another generation.
        """
        reservation = self._owned.get(owner)
        if reservation is None or generation not in (None, reservation.generation):
            return 0
        del self._owned[owner]
        freed = 0
        for slot_id, _ in reservation.slots:
            held = self._held[slot_id]
            held.owner_count -= 1
            if held.owner_count == 0:
                del self._held[slot_id]
                if held.key is not None and self._by_key.get(held.key) == slot_id:
                    del self._by_key[held.key]
                heapq.heappush(self._free, slot_id)
                freed += 1
        return freed

    def fail(self, refs: Iterable[SlotRef]) -> tuple[Owner, ...]:
        """Learn that these slots were never filled; return the owners that lost their blocks.

        They hold nothing afterwards. Slots that were handed out anew since are left alone.
        """
        bad = {ref for ref in refs if self.holds(ref)}
        if not bad:
            return ()
        losers = tuple(o for o, r in self._owned.items() if not bad.isdisjoint(r.slots))
        for owner in losers:
            self.release(owner)
        return losers

    def clear(self) -> None:
        """Take back everything, as after a change of the model's weights."""
        for owner in tuple(self._owned):
            self.release(owner)

    def check_integrity(self) -> None:
        """Assert that every slot is free or has owners, and no slot is counted twice."""
        counts: dict[int, int] = {}
        for reservation in self._owned.values():
            for ref in reservation.slots:
                assert self.holds(ref), f"{ref} has an owner and is not in use"
                counts[ref.slot_id] = counts.get(ref.slot_id, 0) + 1
        assert counts == {slot: held.owner_count for slot, held in self._held.items()}
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert set(self._free).isdisjoint(self._held), "a slot is free and in use"
        assert len(self._free) + len(self._held) == self._slot_count, "a slot is lost"
        for key, slot_id in self._by_key.items():
            assert self._held[slot_id].key == key, "a key names another block's slot"

"""KV of programs between two calls, in the host pool: whoever comes back takes it along.

A program that waits for a tool or a human and loses its place on the device has its blocks put on
the shelf. Its next call takes as many of them as it begins with, and is from then on like any other
call whose blocks were saved. What lies here is only ever worth some prefill, while a preempted call
is waited for: when the pool is full, the oldest of the shelf goes.

Pure; one thread, the scheduler's, calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..policy.working_set import common_blocks
from .host_pool import HostPool, Owner, Reservation

PROGRAMS_MAX: Final = 4096


class Entry(NamedTuple):
    """What a program has here."""

    keys: tuple[bytes, ...]  # of its blocks, first to last; a key names all before it too
    step: int  # whose message carries the gather


class Taken(NamedTuple):
    """What a call took from the shelf."""

    reservation: Reservation
    step: int


class _Place(NamedTuple):
    """The owner of a program's slots: no call has a name like this."""

    program_id: str


class Shelf:
    """See the module.

    Args:
        pool: The slots, shared with saved calls.

    Attributes:
        dropped: Programs whose blocks went because the pool or the shelf was full.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the oldest first
        self._slots = 0  # of all entries; what several share counts for each
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, program_id: str) -> bool:
        return program_id in self._entries

    def put(self, program_id: str, keys: Sequence[bytes], step: int) -> Reservation | None:
        """Reserve slots for a program in place of what it had here; None: there is no room.

        Args:
            program_id: Whose.
            keys: Hashes of its blocks, first to last.
            step: Whose message will fill the slots.
        """
        if not self._may_fit(keys, self._pool.need(keys)):
            return None  # and what it has here is still worth as much
        self.drop(program_id)
        if not self.make_room(keys):
            return None
        reservation = self._pool.reserve(_Place(program_id), keys)
        if reservation is None:
            return None
        self._entries[program_id] = Entry(tuple(keys), step)
        self._slots += len(keys)
        if len(self._entries) > PROGRAMS_MAX:
            self._drop_oldest()
        return reservation

    def take(self, program_id: str, hashes: Sequence[bytes], call_id: str) -> Taken | None:
        """Give a call of the program the blocks that it begins with; the others are gone.

        Args:
            program_id: Whose.
            hashes: Of the call's whole blocks.
            call_id: Owns them from now on; it holds no slots yet.

        Returns:
            None: nothing here is the call's. Another call of the program may still come for it.
        """
        entry = self._entries.get(program_id)
        if entry is None:
            return None
        count = common_blocks(entry.keys, hashes)
        if not count:
            return None
        self._forget(program_id)
        return Taken(self._pool.move(_Place(program_id), call_id, count), entry.step)

    def make_room(self, keys: Sequence[bytes | None]) -> bool:
        """Let the oldest go until these blocks fit; nobody goes if they cannot fit at all."""
        need = self._pool.need(keys)
        if not self._may_fit(keys, need):
            return False
        wanted = frozenset(keys)
        while need > self._pool.free_count and self._entries:
            # What went may be of these blocks. Counting anew for each that goes would take seconds.
            gone = wanted.intersection(self._drop_oldest())
            need += len(gone) - self._pool.stored_count(gone)
        return need <= self._pool.free_count

    def drop(self, program_id: str) -> None:
        """The program is over, or has newer blocks. Harmless if it has nothing here."""
        if program_id in self._entries:
            self._forget(program_id)
            self._pool.release(_Place(program_id))

    def lost(self, owner: Owner) -> bool:
        """Note that the pool took an owner's slots, for they were never filled; was it one here?"""
        if not isinstance(owner, _Place):
            return False
        self._forget(owner.program_id)
        return True

    def clear(self) -> None:
        """Forget everything. The pool's slots are the caller's to take back."""
        self._entries.clear()
        self._slots = 0

    def _may_fit(self, keys: Sequence[bytes | None], need: int) -> bool:
        """Whether these blocks fit when nothing lies here, as far as that is known beforehand."""
        # Slots that several share count for each of them in ``_slots``: what is more than all the
        # pool has would empty the shelf in vain.
        room = min(self._pool.free_count + self._slots, self._pool.slot_count)
        return len(keys) <= self._pool.slot_count and need <= room

    def _drop_oldest(self) -> tuple[bytes, ...]:
        """Let the oldest go; return its keys."""
        program_id, entry = next(iter(self._entries.items()))
        self.drop(program_id)
        self.dropped += 1
        return entry.keys

    def _forget(self, program_id: str) -> None:
        self._slots -= len(self._entries.pop(program_id).keys)

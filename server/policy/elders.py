"""Programs that newcomers have gone before for long enough: a share of the room is theirs.

An order by what programs have left lets the largest of a long tail wait as long as smaller ones
come, and at a load that the engine bears that is needless: they would fit beside the others. So of
those at the door that have more left than a newcomer of their kind, who would go before them, some
become *elders* once they have been here as long as they have left to run ÷ their weight: those that
came first, as many as fit a share of the cache together. They are due when they came.

Where what is left falls as a program goes on, there are none.

Pure.
"""

from __future__ import annotations

import heapq
from typing import Final

from .member import Member

Entry = tuple[float, int, int, Member]  # when, number of the program, of the entry
SPARE_ENTRIES: Final = 64


class Elders:
    """Who they are, and who is next.

    Args:
        limit_tokens: KV tokens that they may hold together, as they were when they became elders.

    Attributes:
        tokens: What they hold.
        ripe_tokens: What those hold that are here long enough to become one.
    """

    def __init__(self, limit_tokens: float) -> None:
        self.limit_tokens = limit_tokens
        self.tokens = self.ripe_tokens = 0.0
        self._chosen: dict[Member, float] = {}
        self._candidates: dict[Member, int] = {}  # with the number of their valid entry
        self._young: list[Entry] = []  # by when they are here long enough
        self._ripe: list[Entry] = []  # those that are, by when they came
        self._sizes: dict[Member, float] = {}  # of those
        self._entries = 0

    def __contains__(self, member: Member) -> bool:
        return member in self._chosen

    def __len__(self) -> int:
        """Return how many there are, those that may become one counted too."""
        return len(self._chosen) + len(self._candidates)

    def stand(self, member: Member) -> None:
        """A program stands at the door, or has another time left there."""
        if member in self._chosen or not self.limit_tokens:
            return
        self._leave(member)
        if not member.passed:
            return
        ripe_s = member.began_s + member.left_s / member.weight
        self._young = self._push(self._young, ripe_s, member)

    def sit(self, member: Member) -> None:
        """A program has a seat: it needs nothing, and an elder stays one."""
        self._leave(member)

    def drop(self, member: Member) -> None:
        """A program is over or away; harmless if it is nobody here."""
        self._leave(member)
        self.tokens -= self._chosen.pop(member, 0.0)

    def choose(self, now_s: float) -> list[Member]:
        """Return who becomes one now: of those here long enough who came first, as they fit.

        Who does not fit beside the others is passed by nobody: it would be the largest again. Who
        is larger than all of the share never becomes one.
        """
        while self._young and self._young[0][0] <= now_s:
            _, _, entry, member = heapq.heappop(self._young)
            if self._candidates.get(member) == entry:
                self._ripen(member)
        found: list[Member] = []
        while self._ripe:
            _, _, entry, member = self._ripe[0]
            if self._candidates.get(member) == entry:
                size = self._sizes[member]
                if self.tokens + size > self._room_tokens:
                    break
                self._leave(member)
                self._chosen[member] = size
                self.tokens += size
                found.append(member)
            heapq.heappop(self._ripe)
        return found

    @property
    def _room_tokens(self) -> float:
        """The share, smaller by as much as those that want it are more than fit."""
        return self.limit_tokens * min(1.0, self.limit_tokens / max(self.ripe_tokens, 1.0))

    def _ripen(self, member: Member) -> None:
        size = member.room_tokens()
        if size > self.limit_tokens:
            del self._candidates[member]
            return
        self._ripe = self._push(self._ripe, member.began_s, member)
        self._sizes[member] = size
        self.ripe_tokens += size

    def _leave(self, member: Member) -> None:
        """A program is no candidate any more. Harmless if it is none."""
        self._candidates.pop(member, None)
        self.ripe_tokens -= self._sizes.pop(member, 0.0)

    def _push(self, heap: list[Entry], at_s: float, member: Member) -> list[Entry]:
        """Put a program into a heap, out of the other one; return the heap, without old entries."""
        self._entries += 1
        self._candidates[member] = self._entries
        heapq.heappush(heap, (at_s, member.number, self._entries, member))
        if len(heap) > 2 * len(self._candidates) + SPARE_ENTRIES:
            heap = [entry for entry in heap if self._candidates.get(entry[3]) == entry[2]]
            heapq.heapify(heap)
        return heap

"""Programs that came first of those at the door: a share of the room is theirs.

An order by what programs have left lets the largest of a long tail wait as long as smaller ones
come, and at a load that the engine bears that is needless: they would fit beside the others. So of
those behind whom a newcomer of their kind would not stand, since they have more left than it has,
the first become *elders* once they have been here as long as they have left to run ÷ their weight,
as many as fit a share of the cache together. They are due when they came.

Where what is left falls as a program goes on, there are none.

Pure.
"""

from __future__ import annotations

import heapq
from typing import Final

from .member import Member

SPARE_ENTRIES: Final = 64


class Elders:
    """Who they are, and who is next.

    Args:
        limit_tokens: KV tokens that they may hold together, as they were when they became elders.
    """

    def __init__(self, limit_tokens: float) -> None:
        self.limit_tokens = limit_tokens
        self.tokens = 0.0
        self._chosen: dict[Member, float] = {}
        self._next: list[tuple[float, int, Member]] = []
        self._candidates: dict[Member, None] = {}

    def __contains__(self, member: Member) -> bool:
        return member in self._chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def stand(self, member: Member) -> None:
        """A program stands at the door; harmless if it is known."""
        if member in self._chosen or member in self._candidates or not self.limit_tokens:
            return
        self._candidates[member] = None
        heapq.heappush(self._next, (member.began_s, member.number, member))
        if len(self._next) > 2 * len(self._candidates) + SPARE_ENTRIES:
            self._next = [entry for entry in self._next if entry[2] in self._candidates]
            heapq.heapify(self._next)

    def drop(self, member: Member) -> None:
        """A program is over or away; harmless if it is nobody here."""
        self._candidates.pop(member, None)
        self.tokens -= self._chosen.pop(member, 0.0)

    def choose(self, now_s: float) -> list[Member]:
        """Return who becomes one now: of those at the door who came first, as long as they fit.

        Who does not fit beside the others is passed by nobody: it would be the largest again.
        """
        found: list[Member] = []
        while self._next:
            _, _, member = self._next[0]
            tokens = member.room_tokens()
            # Who has a seat needs nothing; who is larger than all of it waits for its due time.
            never = member.seated or tokens > self.limit_tokens or not member.passed
            if member not in self._candidates or never:
                heapq.heappop(self._next)
                self._candidates.pop(member, None)
                continue
            young = now_s - member.began_s < member.left_s / member.weight
            if young or self.tokens + tokens > self.limit_tokens:
                break
            heapq.heappop(self._next)
            del self._candidates[member]
            self._chosen[member] = tokens
            self.tokens += tokens
            found.append(member)
        return found

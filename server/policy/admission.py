"""Which programs run: as many as their KV fits, the earliest due first, and who makes room.

A program has a *seat* or stands at the *door*. Seats are given away as room in tokens: a program's
own working set, and what a kind of programs shares once. While the sum fits, no program's KV is
thrown out by another's. The order at the door and the order of giving way is one: by *due* time.

* A seat is taken back at a boundary only, between two calls of a program, and wholly.
* The last of those who have a seat gives way to the first at the door if it is due later by more
  than a margin, which is what giving way costs. Nobody else enters on the room that becomes free.
* Programs grow. When those inside need more than there is, the last ones give way until they fit;
  between that and what the door lets in nothing happens.
* A program that waits for a tool keeps its seat for a bounded time, if somebody is at the door.
* If nobody inside has a call, the first at the door enters whatever its size.

Pure.
"""

from __future__ import annotations

import heapq
from typing import Final

from .member import Kind, Member

Entry = tuple[float, int, int, Member]  # due or minus due, number of the program, of the entry
SPARE_ENTRIES: Final = 64
ASKED_MAX: Final = 64  # programs that are asked to give way to one


class RunningSet:
    """Seats and the door.

    Args:
        limit_tokens: KV tokens up to which programs are let in.
        most_tokens: KV tokens from which on they are asked to give way.

    Attributes:
        taken_tokens: Kept for those inside.
        coming_tokens: Those of them that are held by who gives way at its next boundary.
        seated: Who is inside, with calls or between two of them.
        active: How many of them have calls.
        door_tokens: What the programs at the door would hold.
        pauses: How often a seat was taken back from a program that was not away for too long.
    """

    def __init__(self, limit_tokens: float, most_tokens: float) -> None:
        assert 0 < limit_tokens <= most_tokens
        self.limit_tokens = limit_tokens
        self.most_tokens = most_tokens
        self.taken_tokens = 0.0
        self.seated: dict[Member, None] = {}
        self.active = 0
        self.pauses = 0
        self.door_tokens = 0.0
        self.coming_tokens = 0.0
        self._door: list[Entry] = []
        self._at_door: dict[Member, float] = {}
        self._last: list[Entry] = []  # the seated, those due last in front
        self._gaps: list[tuple[float, int, Member]] = []
        self._entries = 0

    def __len__(self) -> int:
        return len(self._at_door)

    def at_door(self, member: Member) -> bool:
        """Return whether a program stands at the door."""
        return member in self._at_door

    def waiting(self) -> list[Member]:
        """Return the programs at the door, the first one first. For reports: O(n log n)."""
        return sorted(self._at_door, key=lambda member: (member.due_s, member.number))

    def knock(self, member: Member) -> None:
        """Put a program at the door, or into its new place there."""
        assert not member.seated
        self.door_tokens -= self._at_door.get(member, 0.0)
        self._at_door[member] = member.room_tokens()
        self.door_tokens += self._at_door[member]
        member.entry = self._push(self._door, member.due_s, member)
        if len(self._door) > 2 * len(self._at_door) + SPARE_ENTRIES:
            self._door = [e for e in self._door if e[3] in self._at_door and e[3].entry == e[2]]
            heapq.heapify(self._door)

    def withdraw(self, member: Member) -> None:
        """The program is gone, from wherever it was. Harmless if it was nowhere."""
        self.door_tokens -= self._at_door.pop(member, 0.0)
        if member.seated:
            self._unseat(member)

    def moved(self, member: Member) -> None:
        """A seated program's due time has changed."""
        member.entry = self._push(self._last, -member.due_s, member)
        if len(self._last) > 2 * len(self.seated) + SPARE_ENTRIES:
            self._last = [e for e in self._last if e[3].seated and e[3].entry == e[2]]
            heapq.heapify(self._last)

    def resized(self, member: Member) -> None:
        """A program may hold more or less than before."""
        if member.seated:
            self.taken_tokens -= member.taken_tokens
            if member.yields:
                self.coming_tokens -= member.taken_tokens
            member.taken_tokens = member.room_tokens()
            self.taken_tokens += member.taken_tokens
            if member.yields:
                self.coming_tokens += member.taken_tokens

    def begin_gap(self, member: Member, keep_until_s: float) -> bool:
        """A seated program has no calls any more; return whether it keeps its seat."""
        self.active -= 1
        if member.yields:
            self.pauses += 1
            self._unseat(member)
            return False
        self.keep_seat(member, keep_until_s)
        return True

    def keep_seat(self, member: Member, until_s: float) -> None:
        """Set until when a seated program without calls keeps its seat from those at the door."""
        member.gap_entry = self._entries = self._entries + 1
        heapq.heappush(self._gaps, (until_s, member.gap_entry, member))
        if len(self._gaps) > 2 * len(self.seated) + SPARE_ENTRIES:
            self._gaps = [entry for entry in self._gaps if entry[2].gap_entry == entry[1]]
            heapq.heapify(self._gaps)

    def end_gap(self, member: Member) -> None:
        """A seated program has calls again."""
        member.gap_entry = 0
        self.active += 1

    def fill(self, now_s: float) -> tuple[list[Member], list[Member]]:
        """Let in whoever may enter; return who did, and who lost the seat.

        Those who lost it and have calls stand at the door; the others are nowhere.
        """
        inside: list[Member] = []
        out: list[Member] = []
        if self.taken_tokens - self.coming_tokens > self.most_tokens and self.active > 1:
            self._shrink(out)
        while self._at_door:
            first = self._first()
            need = self._need(first)
            if self.active == 0:
                self._clear(need, out)
            if self._fits(need) or self.active == 0:
                self._seat(first)
                inside.append(first)
            elif not (self._gaps and self._end_gaps(now_s, out)):
                self._make_room(first, need, out)
                if self.active and not self._fits(need):
                    break
        return inside, out

    # ── seats ──────────────────────────────────────────────────────────────────────────────────

    def _seat(self, member: Member) -> None:
        self.door_tokens -= self._at_door.pop(member)
        member.seated = True
        member.yields = False
        self.seated[member] = None
        self.active += bool(member.calls)
        member.taken_tokens = member.room_tokens()
        self.taken_tokens += member.taken_tokens + self._share(member.kind, 1)
        self.moved(member)

    def take_seat(self, member: Member) -> None:
        """Seat a program at once: its call runs already."""
        self._at_door.setdefault(member, 0.0)
        self._seat(member)

    def _unseat(self, member: Member) -> None:
        member.seated = False
        del self.seated[member]
        self.taken_tokens -= member.taken_tokens + self._share(member.kind, -1)
        if member.yields:
            self.coming_tokens -= member.taken_tokens
            member.yields = False
        member.gap_entry = 0

    @staticmethod
    def _share(kind: Kind, change: int) -> int:
        """Count a seat of a kind; return its shared tokens if it is the first or the last one."""
        kind.seated += change
        if kind.seated == (1 if change > 0 else 0):
            if change > 0:
                kind.counted_tokens = kind.shared_tokens
            return kind.counted_tokens
        return 0

    def _need(self, member: Member) -> float:
        kind = member.kind
        return member.room_tokens() + (0 if kind.seated else kind.shared_tokens)

    def _fits(self, need: float) -> bool:
        """Return whether so much is free, or will be, and for the time being there is room."""
        after = self.taken_tokens + need
        return after - self.coming_tokens <= self.limit_tokens and after <= self.most_tokens

    def _make_room(self, first: Member, need: float, out: list[Member]) -> None:
        """Ask the last ones inside to give way to the first at the door; nobody does in vain."""
        short = self.taken_tokens - self.coming_tokens + need - self.limit_tokens
        asked: list[Member] = []
        while short > 0 and len(asked) < ASKED_MAX:
            last = self._last_seated()
            if last is None or last.due_s - first.due_s <= first.margin_s + last.reload_s:
                break
            heapq.heappop(self._last)
            asked.append(last)
            short -= last.taken_tokens
        for member in asked:
            if short <= 0:
                self._give_way(member, out)
            if member.seated and not member.yields:
                self.moved(member)

    def _clear(self, need: float, out: list[Member]) -> None:
        """All inside wait for tools: nobody keeps the engine idle."""
        while self.seated and not self._fits(need):
            last = self._last_seated()
            assert last is not None, "who has no calls does not give way at a boundary to come"
            self._give_way(last, out)

    def _shrink(self, out: list[Member]) -> None:
        """Down to what there is and no further: whoever gives way has its KV computed anew."""
        while self.taken_tokens - self.coming_tokens > self.most_tokens:
            last = self._last_seated()
            if last is None or len(self.seated) < 2:
                return
            self._give_way(last, out)

    def _give_way(self, member: Member, out: list[Member]) -> None:
        """Take the seat back now if the program is between two calls, else at its next boundary."""
        if member.running:
            member.yields = True
            self.coming_tokens += member.taken_tokens
            return
        self.pauses += 1
        if member.calls:
            self.active -= 1
        self._unseat(member)
        out.append(member)
        if member.calls:
            self.knock(member)

    def pause(self, member: Member) -> None:
        """Take a seat back: running calls of others need the blocks of its call."""
        self.pauses += 1
        self.active -= 1
        self._unseat(member)
        self.knock(member)

    def _end_gaps(self, now_s: float, out: list[Member]) -> bool:
        gone = False
        while self._gaps:
            until_s, entry, member = self._gaps[0]
            if member.gap_entry == entry:
                if until_s > now_s:
                    break
                self._unseat(member)
                out.append(member)
                gone = True
            heapq.heappop(self._gaps)
        return gone

    # ── heaps ──────────────────────────────────────────────────────────────────────────────────

    def _push(self, heap: list[Entry], key: float, member: Member) -> int:
        self._entries += 1
        heapq.heappush(heap, (key, member.number, self._entries, member))
        return self._entries

    def _first(self) -> Member:
        while True:
            _, _, entry, member = self._door[0]
            if member in self._at_door and member.entry == entry:
                return member
            heapq.heappop(self._door)

    def _last_seated(self) -> Member | None:
        """Return the seated program due last that is not asked yet; it stays in the heap."""
        while self._last:
            _, _, entry, member = self._last[0]
            if member.seated and member.entry == entry and not member.yields:
                return member
            heapq.heappop(self._last)
        return None

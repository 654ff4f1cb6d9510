"""The KV tokens that a program holds: its calls' own ones, and what they share once.

Two calls share what their block hashes have in common from the start; a hash stands for all tokens
before it, so the last common one is found by bisection. What a program shares with others of its
kind (a system prompt) is not its own: it is counted once for the kind.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Final

REMEMBERED: Final = 3  # calls of a program whose hashes are kept: its trunk, and roles beside it

Hashes = Sequence[Hashable]


def common_blocks(first: Hashes, second: Hashes) -> int:
    """Return how many blocks two calls have in common from the start.

    >>> common_blocks("abcd", "abxy"), common_blocks("ab", "abc"), common_blocks("", "a")
    (2, 2, 0)
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class WorkingSet:
    """What one program holds, in tokens.

    Calls that left stay in the cache, but what comes next goes on from one of them at most: the
    largest of them counts.

    Attributes:
        kind_tokens: What its calls share with other programs.
        trunk_tokens: What was there before the calls of now, ``kind_tokens`` included.
        live_tokens: What its calls of now hold beyond what was counted before them.
        left_tokens: The most that one of those held which are over since.
        calls: Those of now.
    """

    __slots__ = (
        "_first_blocks",
        "_recent",
        "calls",
        "kind_tokens",
        "left_tokens",
        "live_tokens",
        "trunk_tokens",
    )

    def __init__(self) -> None:
        self._recent: deque[Hashes] = deque(maxlen=REMEMBERED)
        self._first_blocks = 0  # of its first prompt
        self.kind_tokens = 0
        self.trunk_tokens = 0
        self.live_tokens = 0
        self.left_tokens = 0
        self.calls = 0

    def beside(self, counted_tokens: int) -> int:
        """Return what the program holds beside what is counted for its kind.

        Args:
            counted_tokens: For the kind. Programs of a kind may share more with one of them than
                with all, and then only this much is counted elsewhere.
        """
        shared = min(self.kind_tokens, counted_tokens)
        return max(0, self.trunk_tokens - shared) + self.live_tokens + self.left_tokens

    @property
    def recent(self) -> Hashes:
        """The blocks of the latest call, those of its answer as far as they were known."""
        return self._recent[-1] if self._recent else ()

    @property
    def longest(self) -> Hashes:
        """The blocks of the longest of the latest calls: what the next one most likely goes on."""
        return max(self._recent, key=len, default=())

    def enter(
        self, hashes: Hashes, tokens: int, answer_tokens: int, block_tokens: int, kind: Hashes
    ) -> int:
        """Count a call that comes in; return its own tokens, to be kept with it.

        Args:
            hashes: Of its blocks; the list may grow with the answer.
            tokens: Its prompt.
            answer_tokens: What it is expected to generate.
            block_tokens: Size of a block.
            kind: Hashes of a call of another program of the same kind.
        """
        with_kind = common_blocks(hashes, kind) * block_tokens
        shared = with_kind
        for other in self._recent:
            shared = max(shared, common_blocks(hashes, other) * block_tokens)
        if not self._recent:
            self._first_blocks = len(hashes)
        self._recent.append(hashes)
        if self.calls == 0:
            self.left_tokens = 0
            self.trunk_tokens = shared
        self.kind_tokens = max(self.kind_tokens, with_kind)
        own = max(0, tokens - shared) + answer_tokens
        self.live_tokens += own
        self.calls += 1
        return own

    def grow(self, tokens: int) -> None:
        """A call of the program holds so many more tokens than was expected."""
        self.live_tokens += tokens

    def leave(self, own_tokens: int, spare_tokens: int) -> None:
        """A call is over.

        Args:
            own_tokens: As ``enter`` returned them, and ``grow`` added.
            spare_tokens: How many fewer it has than was expected.
        """
        self.calls -= 1
        self.live_tokens -= own_tokens
        assert self.calls >= 0, "more calls have left a working set than entered it"
        assert self.live_tokens >= 0, "more tokens have left a working set than entered it"
        self.left_tokens = max(self.left_tokens, own_tokens - spare_tokens)

    def forget(self) -> None:
        """Forget the blocks of its calls."""
        self._recent.clear()

    def own_chains(self, kind: Hashes | None) -> list[Hashes]:
        """Return the blocks that only this program has.

        Args:
            kind: Blocks of a call of the same kind; None: no other program of its kind is known,
                so that its first prompt may be what the next one begins with.
        """
        chains: list[Hashes] = []
        before: Hashes = ()
        for hashes in self._recent:
            start = common_blocks(hashes, before)
            if kind is None:
                start = max(start, min(self._first_blocks, len(hashes)))
            else:
                start = max(start, common_blocks(hashes, kind))
            if start < len(hashes):
                chains.append(hashes[start:])
            before = hashes
        return chains

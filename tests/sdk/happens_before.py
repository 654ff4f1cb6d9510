"""What a server can infer from tags and completions: which calls happened before which.

`dag_of` reads it off a fake server's records.

The reference rule, pure. A call comes after the last call of its thread, and after every completed
call of the threads below that one. The first call of a thread, and one whose fork point has moved,
also comes after what its parent knew at the fork: the parent's last call before it, every completed
call below the parent, and, if the parent had made no call, what the parent knew at its own fork.
The same holds for every other point that the tag names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from autellix.testing import FakeServer, RecordedCall


class CallKey(NamedTuple):
    """A call: its thread and its number there."""

    thread: int
    seq: int


class Inference:
    """The calls of one session, in the order of their arrivals and completions."""

    def __init__(self) -> None:
        self.parent: dict[int, tuple[tuple[int, int], ...]] = {0: ()}
        self.direct: dict[CallKey, frozenset[CallKey]] = {}
        self.last: dict[int, CallKey] = {}
        self.done: list[CallKey] = []
        self.before: dict[CallKey, frozenset[CallKey]] = {}

    def arrive(self, key: CallKey, forks: Sequence[tuple[int, int]]) -> frozenset[CallKey]:
        """Note an arrival; returns every call that happened before it, near and far."""
        for (thread, seq), above in pairwise(forks):
            if seq == 0 and thread not in (0, key.thread):
                self.parent.setdefault(thread, (above,))
        direct = self._below(key.thread)
        if key.thread in self.last:
            direct.add(self.last[key.thread])
        if key.thread not in self.last or self.parent.get(key.thread) != tuple(forks):
            for fork in forks:
                direct |= self._at_fork(fork, {key.thread})
        self.parent[key.thread] = tuple(forks)
        self.last[key.thread] = key
        far = frozenset(direct).union(*(self.before[k] for k in direct)) - {key}
        self.before[key] = far
        covered = frozenset[CallKey]().union(*(self.before[k] for k in direct))
        self.direct[key] = frozenset(direct) - covered - {key}
        return far

    def complete(self, key: CallKey) -> None:
        """Note that a call was answered."""
        self.done.append(key)

    def _at_fork(self, fork: tuple[int, int], seen: set[int]) -> set[CallKey]:
        parent, seq = fork
        if parent in seen:
            return set()
        known = self._below(parent)
        if seq > 0:
            known.add(CallKey(parent, seq - 1))
        else:
            for above in self.parent.get(parent, ())[:1]:
                known |= self._at_fork(above, seen | {parent})
        return {k for k in known if k in self.before}

    def _below(self, thread: int) -> set[CallKey]:
        return {k for k in self.done if k.thread != thread and self._is_below(k.thread, thread)}

    def _is_below(self, thread: int, ancestor: int) -> bool:
        forks, seen = self.parent.get(thread), {thread}
        while forks and forks[0][0] not in seen:
            if forks[0][0] == ancestor:
                return True
            seen.add(forks[0][0])
            forks = self.parent.get(forks[0][0])
        return False


def dag_of(
    server: FakeServer, name: Callable[[RecordedCall], str] = lambda call: call.text
) -> dict[str, set[str]]:
    """Return the direct parents of each call of one session, by what was said or another name."""
    inference, names = Inference(), dict[CallKey, str]()
    for what, call in server.history:
        assert call.thread is not None
        assert call.seq is not None
        key = CallKey(call.thread, call.seq)
        if what == "begin":
            assert names.setdefault(key, name(call)) == name(call), f"two calls are {key}"
            inference.arrive(key, call.parents)
        else:
            inference.complete(key)
    return {names[k]: {names[p] for p in direct} for k, direct in inference.direct.items()}


def is_one_fork_and_join(server: FakeServer, first: str, *middle: str) -> bool:
    """Return whether calls are exactly: one, some side by side, and one more after all of them."""
    found = dag_of(server)
    (last,) = set(found) - {first, *middle}
    return found == {first: set(), **{m: {first} for m in middle}, last: set(middle)}

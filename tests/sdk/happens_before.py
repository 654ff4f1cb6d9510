"""What a server can infer from tags and completions: which calls happened before which.

The reference rule, pure. A call comes after the last call of its thread, and after every completed
call of the threads below that one. The first call of a thread, and one whose fork point has moved,
also comes after what its parent knew at the fork: the parent's last call before it, every completed
call below the parent, and, if the parent had made no call, what the parent knew at its own fork.
"""

from __future__ import annotations

from typing import NamedTuple


class CallKey(NamedTuple):
    """A call: its thread and its number there."""

    thread: int
    seq: int


class Inference:
    """The calls of one session, in the order of their arrivals and completions."""

    def __init__(self) -> None:
        self.parent: dict[int, tuple[int, int] | None] = {0: None}
        self.last: dict[int, CallKey] = {}
        self.done: list[CallKey] = []
        self.before: dict[CallKey, frozenset[CallKey]] = {}

    def arrive(self, key: CallKey, fork: tuple[int, int] | None) -> frozenset[CallKey]:
        """Note an arrival; returns every call that happened before it, near and far."""
        direct = self._below(key.thread)
        if key.thread in self.last:
            direct.add(self.last[key.thread])
        if key.thread not in self.last or self.parent.get(key.thread) != fork:
            direct |= self._at_fork(fork)
        self.parent[key.thread] = fork
        self.last[key.thread] = key
        far = frozenset(direct).union(*(self.before[k] for k in direct)) - {key}
        self.before[key] = far
        return far

    def complete(self, key: CallKey) -> None:
        """Note that a call was answered."""
        self.done.append(key)

    def _at_fork(self, fork: tuple[int, int] | None) -> set[CallKey]:
        if fork is None:
            return set()
        parent, seq = fork
        known = self._below(parent)
        if seq > 0:
            known.add(CallKey(parent, seq - 1))
        else:
            known |= self._at_fork(self.parent.get(parent))
        return {k for k in known if k in self.before}

    def _below(self, thread: int) -> set[CallKey]:
        return {k for k in self.done if k.thread != thread and self._is_below(k.thread, thread)}

    def _is_below(self, thread: int, ancestor: int) -> bool:
        fork = self.parent.get(thread)
        while fork is not None:
            if fork[0] == ancestor:
                return True
            fork = self.parent.get(fork[0])
        return False

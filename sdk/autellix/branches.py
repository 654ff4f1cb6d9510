"""Logical threads: chains of calls inside a program, found from who is running.

Theory of operation. The *owner* of a chain is what runs it: an asyncio task, a job of a thread
pool, or an operating-system thread. A call by the owner of the branch in its context continues that
thread; a call by a new owner under an inherited branch is a fork, and starts a child thread. The
root task of an event loop (the one that ``asyncio.run`` waits for) stands for the thread that runs
the loop, since that thread does nothing else meanwhile.

Owners are compared by weak reference, never by ``id()``: ids of dead tasks are used again. A child
is looked up among its parent's children before a new one is made, because some frameworks run each
step in a fresh copy of the context and so lose the branch that an earlier step set.

A child that was alone under its parent and has ended may be continued by the next lone child, so
that a chat of a thousand turns, each in its own task, is one thread and not a thousand.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Final

from . import wire

CALLS_MAX: Final = 64  # calls of a thread that are known again; now and then half of them
_ROOT_SEARCHES_MAX: Final = 16
_FOREIGN_FROM: Final = 10_000_000
_FOREIGN_SPAN: Final = 900_000_000  # leaves room to count; the wire takes nine digits


class Job:
    """One job of a thread pool; done when the function has returned."""

    __slots__ = ("__weakref__", "_done")

    def __init__(self) -> None:
        self._done = False

    def finish(self) -> None:
        """Say that the job is over."""
        self._done = True

    def done(self) -> bool:
        """Return whether the job is over."""
        return self._done


class _Running(threading.local):
    job: Job | None = None
    in_submit: bool = False
    starter: weakref.ref[object] | None = None  # who handed over what this thread is doing


running = _Running()


class Branch:
    """One logical thread. Owned by its session; not safe to advance from two owners at once."""

    __slots__ = (
        "__weakref__", "alone", "calls", "children", "follows", "fork_seq", "is_explicit",
        "known_seq", "last_child", "name", "number", "owner", "parent", "parent_number",
        "pid", "seq", "tag",
    )  # fmt: skip

    def __init__(self, number: int, owner: object, parent: Branch | None, name: str | None) -> None:
        self.seq: int = 0
        self.number = number
        self.tag = wire.make_tag(wire.THREAD, str(number))  # of its calls
        self.name = name
        self.parent = parent
        self.parent_number = parent.number if parent is not None else None
        self.fork_seq = parent.seq if parent is not None else 0
        self.known_seq = 0  # calls that it had made when it was last forked
        self.follows: tuple[tuple[int, int], ...] = ()  # other threads it comes after
        self.pid = os.getpid()
        self.owner: weakref.ref[object] = weakref.ref(owner)
        self.children: dict[int, Branch] = {}
        self.last_child: Branch | None = None
        self.alone = True
        self.is_explicit = False
        self.calls: list[str] = []  # the ids of the latest ones

    def next_seq(self, call_id: str) -> int:
        """Return the number of this call; the latest one's, if it has the same id."""
        calls = self.calls
        if calls:
            if calls[-1] == call_id:
                return self.seq - 1
            if len(calls) >= CALLS_MAX:
                del calls[: CALLS_MAX // 2]
        calls.append(call_id)
        seq = self.seq
        self.seq = seq + 1
        return seq

    def retried(self, call_id: str) -> tuple[str, int]:
        """Return the id and the number of the first attempt of a call that is tried again."""
        for back, known in enumerate(reversed(self.calls), 1):
            if known == call_id:
                return call_id, self.seq - back
        if self.calls:  # older clients give each attempt an id of its own
            return self.calls[-1], self.seq - 1
        return call_id, self.next_seq(call_id)

    def is_here(self) -> bool:
        """Return whether the running code is its owner; the usual case, told with little work."""
        owner = self.owner()
        if owner is None or self.pid != os.getpid():
            return False
        asyncio: Any = sys.modules.get("asyncio")
        try:
            loop = asyncio._get_running_loop() if asyncio is not None else None
            if loop is not None:
                task = asyncio.current_task(loop)
                if owner is task or not _is_known_root(loop, task):
                    return owner is task
        except (AttributeError, TypeError):  # half imported; a loop without weak references
            return False
        return owner is (running.job or threading.current_thread())

    def here(self) -> list[tuple[int, int]]:
        """Return this point of the thread; without a call since its fork also where that was."""
        return [(self.number, self.seq), *(self.forks() if self.seq == self.known_seq else ())]

    def refork(self, seq: int) -> None:
        """Take it as forked anew, when its parent had made ``seq`` calls."""
        self.fork_seq, self.known_seq = seq, self.seq

    def forks(self) -> list[tuple[int, int]]:
        """Return where the thread was forked; if no call was made there yet, also what is above."""
        points: list[tuple[int, int]] = []
        branch: Branch | None = self
        while branch is not None and branch.parent_number is not None:
            points.append((branch.parent_number, branch.fork_seq))
            if not branch.is_far():
                break
            branch = branch.parent
        return points

    def is_far(self) -> bool:
        """Return whether its parent had made no call since its own fork when this was forked."""
        parent = self.parent
        return parent is None or self.fork_seq <= parent.known_seq

    def child_of(self, owner: object) -> Branch | None:
        """Return the child that ``owner`` already runs in this process, or None."""
        child = self.children.get(id(owner))
        if child is not None and child.owner() is owner and child.pid == os.getpid():
            return child
        return None

    def adopt(self, owner: object) -> None:
        """Let ``owner`` continue this thread; for generators that are stepped from anywhere."""
        if self.owner() is not owner:
            self.owner = weakref.ref(owner)

    def is_at_or_below(self, ancestor: Branch) -> bool:
        """Return whether this is ``ancestor`` or in its subtree."""
        branch: Branch | None = self
        while branch is not None:
            if branch is ancestor:
                return True
            branch = branch.parent
        return False

    def has_ended(self) -> bool:
        """Return whether nobody can make a call on this thread or below it any more."""
        return not is_alive(self.owner()) and not self.has_live_child()

    def has_live_child(self) -> bool:
        """Return whether a child still runs; forgets the newest ones that do not."""
        while self.children:
            try:
                key, child = next(reversed(self.children.items()))
            except (StopIteration, RuntimeError):  # the collector removed one meanwhile
                continue
            if not child.has_ended():
                return True
            self.children.pop(key, None)
        return False

    def keep(self, owner: object, child: Branch) -> None:
        """Remember ``child`` as run by ``owner`` for as long as ``owner`` exists."""
        key, children, me = id(owner), self.children, weakref.ref(child)

        def forget(_: object) -> None:
            if children.get(key) is me():
                children.pop(key, None)

        child.owner = weakref.ref(owner, forget)
        children[key] = child
        self.last_child = child

    def reuse(self, owner: object) -> Branch | None:
        """Return the last child for ``owner`` to continue, if it was alone and has ended."""
        if self.has_live_child():
            if self.last_child is not None:
                self.last_child.alone = False
            return None
        last = self.last_child
        if last is None or not last.alone or last.is_explicit or last.pid != os.getpid():
            return None
        if not last.has_ended():
            last.alone = False
            return None
        last.refork(self.seq)
        self.keep(owner, last)
        return last


def current_starter(owner: object) -> object | None:
    """Return who handed to this thread what ``owner``, a job or the thread itself, is."""
    starter = running.starter
    if starter is None or owner is not (running.job or threading.current_thread()):
        return None
    return starter()


def is_alive(owner: Any) -> bool:
    """Return whether a task, job or thread can still make a call."""
    if owner is None:
        return False
    alive = getattr(owner, "is_alive", None)
    if alive is not None:
        return bool(alive())
    return not owner.done()


_foreign: tuple[int, Iterator[int]] = (0, iter(()))


def foreign_number() -> int:
    """Return a new thread number for a session that this process did not open.

    Two processes count threads of one session without talking, so each begins at random (process
    ids are the same in many containers); within a process all such sessions share one counter,
    since the same session may be picked up many times.
    """
    global _foreign
    pid, numbers = _foreign
    if pid != os.getpid():
        first = _FOREIGN_FROM + int.from_bytes(os.urandom(8), "big") % _FOREIGN_SPAN
        numbers = itertools.count(first)
        _foreign = (os.getpid(), numbers)
    return next(numbers)


_root_tasks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def current_owner() -> tuple[object, object | None]:
    """Return who is running: (the task, job or thread; what a root task stands for, or None)."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        try:
            loop = asyncio._get_running_loop()
            task = asyncio.current_task(loop) if loop is not None else None
        except (AttributeError, RuntimeError):  # half imported, or the loop is closing
            task = None
        if task is not None:
            if _is_root(asyncio, loop, task):
                return task, running.job or threading.current_thread()
            return task, None
    return running.job or threading.current_thread(), None


def _is_known_root(loop: Any, task: Any) -> bool:
    """Return whether ``task`` was found to be the root of ``loop`` before."""
    known = _root_tasks.get(loop)
    return known is not None and known[0] is not None and known[0]() is task


def _is_root(asyncio: Any, loop: Any, task: Any) -> bool:
    """Return whether ``task`` is the oldest of its loop by its default name."""
    try:
        known = _root_tasks.get(loop)
    except TypeError:  # a loop without weak references has no root task
        return False
    if known is None:
        known = _root_tasks[loop] = [None, 0]
    root = known[0]() if known[0] is not None else None
    if root is task:
        return True
    if (root is None or root.done()) and known[1] < _ROOT_SEARCHES_MAX:
        known[1] += 1
        oldest = min(asyncio.all_tasks(loop), key=_birth, default=None)
        if oldest is not None and _birth(oldest) < sys.maxsize:
            known[0] = weakref.ref(oldest)
            return oldest is task
    return False


def _birth(task: Any) -> int:
    name = task.get_name()
    number = name[5:] if name.startswith("Task-") else ""
    return int(number) if number.isdigit() else sys.maxsize

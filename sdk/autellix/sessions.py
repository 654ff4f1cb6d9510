"""A session: one run of an agent, which the server calls a program."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import wire
from .branches import Branch, current_owner, foreign_base
from .context import Scope, scope_var

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import ParamSpec

    from .config import Origin
    from .runtime import Runtime

    P = ParamSpec("P")

T = TypeVar("T")
PEERS_MAX: Final = 8
NAMED_THREADS_MAX: Final = 1024
METADATA_BYTES_MAX: Final = 2048
NAME_CHARS_MAX: Final = 128


def new_id() -> str:
    """Return a UUID version 7 as 32 hex digits: sorts by time, unguessable, cheap."""
    milliseconds = time.time_ns() // 1_000_000 & 0xFFFF_FFFF_FFFF
    random = int.from_bytes(os.urandom(10), "big")
    value = milliseconds << 80 | 0x7 << 76 | (random >> 68 & 0xFFF) << 64
    value |= 0x2 << 62 | random & 0x3FFF_FFFF_FFFF_FFFF
    return f"{value:032x}"


class Session:
    """One run of an agent. A value that any thread may use; made by ``session`` and its kin.

    A session opens on the server with its first call and ends when its opener says so; a call that
    comes later is still served, and counted as late.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str | None = None,
        *,
        id: str | None = None,
        parent: Session | None = None,
        conversation: str | None = None,
        ttl: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        is_implicit: bool = False,
        is_adopted: bool = False,
        anchor: object | None = None,
    ) -> None:
        self._runtime = runtime
        self._id = id or new_id()
        self._name = name
        self._parent = parent
        self.conversation = conversation
        self.ttl_s = ttl
        self.metadata = dict(metadata) if metadata else {}
        self.is_implicit = is_implicit
        self._is_adopted = is_adopted
        self._pid = os.getpid()
        self._state = "open"
        self._lock = threading.Lock()
        self._numbers_pid = 0 if is_adopted else self._pid
        self._next_number = 0
        self._peers: dict[Origin, str | None] = {}
        self._named: dict[str, Branch] = {}
        self._branches: weakref.WeakValueDictionary[int, Branch] = weakref.WeakValueDictionary()
        if anchor is None:
            owner, stand_in = current_owner()
            anchor = stand_in or owner
        self.root = self._new_branch(anchor, None, None)
        self.parent_call: wire.ParentCall | None = None
        if parent is not None:
            here = parent.branch_here(scope_var.get())
            self.parent_call = wire.ParentCall(here.number, here.seq)

    @property
    def id(self) -> str:
        """The id on the wire; made by the client."""
        return self._id

    @property
    def name(self) -> str | None:
        """The label that the user gave."""
        return self._name

    @property
    def parent(self) -> Session | None:
        """The session in which this one was opened with ``nested="new"``."""
        return self._parent

    @property
    def state(self) -> str:
        """``open`` or ``ended``."""
        return self._state

    @property
    def runtime(self) -> Runtime:
        """The runtime that made it; a session of an earlier one is not tagged any more."""
        return self._runtime

    @property
    def peers(self) -> Mapping[Origin, str | None]:
        """The servers it is open on, each with the authorization its calls carry."""
        return self._peers

    @property
    def is_own(self) -> bool:
        """Whether this process opened it, and so may end it."""
        return not self._is_adopted and self._pid == os.getpid()

    def __repr__(self) -> str:
        name = f" {self._name!r}" if self._name else ""
        return f"<Session{name} {self._id} {self._state}>"

    def end(self, reason: str | None = None) -> None:
        """End the session; a second time, or in a process that did not open it, nothing happens.

        Args:
            reason: ``ok`` (default), ``error``, ``cancelled`` or ``atexit``.
        """
        if not self.is_own:
            return
        with self._lock:
            if self._state == "ended":
                return
            self._state = "ended"
        self._runtime.note_end(self, reason or "ok")

    def headers(self) -> dict[str, str]:
        """Return headers for one call that is sent by hand, with any HTTP client."""
        scope = scope_var.get()
        if scope is None or scope.session is not self:
            scope = Scope(self, self.root)
        return dict(self._runtime.tags_of(self, scope, new_id(), self._runtime.source_of(self)))

    def env(self) -> dict[str, str]:
        """Return environment variables with which a child process joins this session."""
        return {"AUTELLIX_SESSION": self.carrier()}

    def carrier(self) -> str:
        """Return ``id;thread:seq``: this session and the point in it where the caller is."""
        here = self.branch_here(scope_var.get())
        return f"{self._id};{here.number}:{here.seq}"

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run in this session."""
        before = scope_var.get()
        scope_var.set(Scope(self, self.root, before))
        try:
            return fn(*args, **kwargs)
        finally:
            scope_var.set(before)

    def bind(self, fn: Callable[P, T]) -> Callable[P, T]:
        """Return ``fn`` so that each call of it runs in this session."""
        from functools import wraps

        @wraps(fn)
        def bound(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.run(fn, *args, **kwargs)

        return bound

    # -- what the hooks use -----------------------------------------------------------------------

    def touch(self, origin: Origin, authorization: str | None) -> None:
        """Open the session on the server at ``origin``, unless it is open there."""
        if origin in self._peers or len(self._peers) >= PEERS_MAX:
            return
        self._peers[origin] = authorization
        if self.is_own and self._state == "open":
            self._runtime.note_open(self, origin)

    def branch_here(self, scope: Scope | None) -> Branch:
        """Return the logical thread of the running code; forks one for a new owner."""
        mine = scope is not None and scope.session is self
        base = scope.branch if mine and scope is not None else self.root
        owner, stand_in = current_owner()
        pid = os.getpid()
        for candidate in (owner, stand_in):
            if candidate is None:
                continue
            if base.owner() is candidate and base.pid == pid:
                return base
            child = base.child_of(candidate)
            if child is not None:
                self._remember(scope if mine else None, child)
                return child
        child = self._fork(base, stand_in or owner)
        self._remember(scope if mine else None, child)
        return child

    def named_branch(self, name: str | None, parent: Branch) -> Branch:
        """Return the explicit thread ``name`` of this session, made under ``parent`` if new."""
        owner, stand_in = current_owner()
        with self._lock:
            branch = self._named.get(name) if name is not None else None
            if branch is None:
                branch = self._new_branch(stand_in or owner, parent, name)
                branch.is_explicit = True
                if name is not None and len(self._named) < NAMED_THREADS_MAX:
                    self._named[name] = branch
            branch.adopt(stand_in or owner)
        return branch

    def find_branch(self, number: int) -> Branch | None:
        """Return the live thread with this number, or None."""
        return self._branches.get(number)

    def _fork(self, base: Branch, owner: object) -> Branch:
        with self._lock:
            child = base.child_of(owner) or base.reuse(owner)
            if child is None:
                alone = not base.children
                child = self._new_branch(owner, base, None)
                child.alone = alone
                base.keep(owner, child)
            return child

    def _new_branch(self, owner: object, parent: Branch | None, name: str | None) -> Branch:
        pid = os.getpid()
        if self._numbers_pid != pid:  # a fork or an adopted session: count in a range of our own
            self._numbers_pid = pid
            self._next_number = foreign_base()
        branch = Branch(self._next_number, owner, parent, name)
        self._next_number += 1
        self._branches[branch.number] = branch
        return branch

    def _remember(self, scope: Scope | None, branch: Branch) -> None:
        """Let what this context starts later be seen as started by ``branch``."""
        if scope is None:
            if self.is_implicit:
                scope_var.set(Scope(self, branch))
        else:
            scope_var.set(scope._replace(branch=branch))

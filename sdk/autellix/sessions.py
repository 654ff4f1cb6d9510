"""A session: one run of an agent, which the server calls a program."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from . import wire
from .branches import Branch, current_owner, current_starter, foreign_number
from .context import Scope, scope_var
from .decorate import Within, decorate
from .node import place_here
from .spaces import Spaces
from .tags import fixed_tags, tags_of

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


class Counters(NamedTuple):
    """How far a session has counted: calls of its main thread, and threads."""

    seq: int
    next_number: int
    is_open: bool  # or of another process's range: a later one takes numbers of its own


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
        role: str | None = None,
        weight: float | None = None,
        deadline_s: float | None = None,
        kind: str | None = None,
        is_implicit: bool = False,
        is_adopted: bool = False,
        anchor: object | None = None,
        earlier: Counters | None = None,
    ) -> None:
        self._runtime = runtime
        self._id = id or new_id()
        self._name = None if name is None else str(name)
        self._parent = parent
        self._conversation = None if conversation is None else str(conversation)
        self.ttl_s = ttl
        self.metadata = dict(metadata) if metadata else {}
        self._role = role or (parent.role if parent is not None else runtime.config.role)
        self._weight, self._over_at_s = _wishes(self, weight, deadline_s, is_adopted)
        self._kind = kind
        self.last_request: tuple[str, str] | None = None  # for Dynamo: path and model of a call
        self.is_implicit = is_implicit
        self.is_top_level = False  # of `start_session` by the script or notebook itself
        self._is_adopted = is_adopted
        self.is_named_by_user = id is not None
        self._pid = os.getpid()
        self._state = "open"
        self._lock = threading.Lock()
        shares_id = earlier is not None and earlier.is_open
        self._numbers_pid = 0 if is_adopted or shares_id else self._pid
        self._next_number = 0
        self._peers: dict[Origin, str | None] = {}
        self._named: dict[str, Branch] = {}
        self._spaces = Spaces()
        self._owned: weakref.WeakKeyDictionary[object, Branch] = weakref.WeakKeyDictionary()
        self._branches: weakref.WeakValueDictionary[int, Branch] = weakref.WeakValueDictionary()
        if anchor is None:
            owner, stand_in = current_owner()
            anchor = stand_in or owner
        self.root = self.new_branch(anchor, None)
        if earlier is not None and not shares_id:
            self.root.seq, self._next_number = earlier.seq, earlier.next_number
        self.parent_calls: tuple[tuple[int, int], ...] = ()  # where it was started from
        if parent is not None:
            self.parent_calls = tuple(parent.branch_here(scope_var.get()).here())
        self.fixed_tags = fixed_tags(self)  # of all its calls

    @property
    def id(self) -> str:
        """The id on the wire; made by the client."""
        return self._id

    @property
    def name(self) -> str | None:
        """The label that the user gave."""
        return self._name

    @property
    def conversation(self) -> str | None:
        """The conversation that this run belongs to."""
        return self._conversation

    @property
    def role(self) -> str | None:
        """What it is for: ``interactive``, ``delegated`` or ``background``; or not said."""
        return self._role

    @property
    def weight(self) -> float | None:
        """How much it counts beside other programs; or not said, which is 1."""
        return self._weight

    @property
    def over_at_s(self) -> float | None:
        """When it should be over, on the monotonic clock; or not said."""
        return self._over_at_s

    @property
    def kind(self) -> str | None:
        """What the user calls programs like it; or not said."""
        return self._kind

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
    def counters(self) -> Counters:
        """Where a later session of this id goes on."""
        if self._numbers_pid != os.getpid():
            return Counters(0, 0, is_open=True)
        return Counters(self.root.seq, self._next_number, is_open=self._state == "open")

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
        if self._runtime.is_off:
            return {}
        scope = scope_var.get()
        if scope is None or scope.session is not self:
            scope = Scope(self, self.root)
        tags = tags_of(self, scope, new_id(), self._runtime.source_of(self))
        return {name.decode(): value.decode() for name, _, value in tags}

    def env(self) -> dict[str, str]:
        """Return environment variables with which a child process joins this session."""
        if self._runtime.is_off:
            return {}
        role = {} if self.role is None else {"AUTELLIX_ROLE": self.role}
        return {"AUTELLIX_SESSION": self.carrier(), **role}

    def carrier(self) -> str:
        """Return ``id;thread:seq``: this session and the point in it where the caller is.

        For a thread without calls a comma and the point where it was forked come after.
        """
        here = self.branch_here(scope_var.get())
        return f"{self._id};{wire.join_parents(here.here())}"

    def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``fn(*args, **kwargs)``, run in this session."""
        with Within(Scope(self, self.root)):
            return fn(*args, **kwargs)

    def bind(self, fn: Callable[P, T]) -> Callable[P, T]:
        """Return ``fn`` so that each call of it runs in this session."""
        return decorate(fn, lambda: Within(Scope(self, self.root)))

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
        place, starter = place_here(), current_starter(stand_in or owner)
        with self._lock:
            if starter is not None:  # a copy of the context may have dropped what it called on
                known = self._owned.get(starter)
                base = known if known is not None and known.is_at_or_below(base) else base
            if place is None:
                child = self.fork(base, stand_in or owner)
            else:
                child = self._spaces.branch_of(self, place, base, stand_in or owner)
        self._remember(scope if mine else None, child)
        return child

    def named_branch(
        self, name: str | None, parent: Branch, follows: Sequence[tuple[int, int]] = ()
    ) -> Branch:
        """Return the explicit thread ``name`` of this session, made under ``parent`` if new.

        Args:
            name: Its name, if it has one.
            parent: The thread that it is forked from, or the first that it follows.
            follows: The points of other threads that it comes after from now on.
        """
        owner, stand_in = current_owner()
        with self._lock:
            branch = self._named.get(name) if name is not None else None
            if branch is not None:
                # Entered again: it now also comes after what there was here, so its fork point
                # is new. If nothing else says so, its own calls so far make it differ.
                here = parent.here() if branch.parent is not parent else []
                points = [*follows, *here, (branch.number, branch.seq)]
                branch.follows = tuple(points)
            else:
                branch = self.new_branch(stand_in or owner, parent, name)
                branch.is_explicit = True
                if name is not None and len(self._named) < NAMED_THREADS_MAX:
                    self._named[name] = branch
                branch.follows = tuple(follows)
            if branch.parent is parent:
                branch.refork(parent.seq)
            parent.last_child = branch  # an ended child of before cannot just go on after this
            branch.adopt(stand_in or owner)
        return branch

    def find_branch(self, number: int) -> Branch | None:
        """Return the live thread with this number, or None."""
        return self._branches.get(number)

    def fork(self, base: Branch, owner: object) -> Branch:
        """Return the child of ``base`` that ``owner`` runs; the lock is held."""
        child = base.child_of(owner) or base.reuse(owner)
        if child is None:
            alone = not base.children
            child = self.new_branch(owner, base)
            child.alone = alone
            base.keep(owner, child)
        self.note_owner(owner, child)
        return child

    def note_owner(self, owner: object, branch: Branch) -> None:
        """Remember what ``owner`` calls on, for what it starts from a copy of an older context."""
        self._owned[owner] = branch

    def new_branch(self, owner: object, parent: Branch | None, name: str | None = None) -> Branch:
        """Return a new thread; the lock is held, or nobody else knows the session yet."""
        pid = os.getpid()
        if self._numbers_pid == pid:
            number = self._next_number
            self._next_number += 1
        else:  # a fork or an adopted session: count in a range of our own
            number = foreign_number()
        branch = Branch(number, owner, parent, name)
        self._branches[branch.number] = branch
        return branch

    def _remember(self, scope: Scope | None, branch: Branch) -> None:
        """Let what this context starts later be seen as started by ``branch``."""
        if scope is None:
            if self.is_implicit:
                scope_var.set(Scope(self, branch))
        else:
            scope_var.set(scope._replace(branch=branch))


def _wishes(
    session: Session, weight: float | None, deadline_s: float | None, is_adopted: bool
) -> tuple[float | None, float | None]:
    """Return a session's weight and when it should be over: as given, else as of its parent.

    A guest says neither: the server knows them of the session's owner.
    """
    if is_adopted:
        return None, None
    parent, config = session.parent, session.runtime.config
    if weight is None:
        weight = parent.weight if parent is not None else config.weight
    if deadline_s is None and parent is not None:
        return weight, parent.over_at_s
    if deadline_s is None:
        deadline_s = config.deadline_s
    return weight, None if deadline_s is None else time.monotonic() + deadline_s

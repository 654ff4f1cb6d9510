"""The blocks a user writes: ``session``, ``thread``, ``tool``; and handles, and ``propagate``."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

from . import wire
from .branches import Branch, current_owner
from .config import wrong_number
from .context import Scope, entry_here, leave, scope_var
from .decorate import Block, F, Within, decorate
from .runtime import get_runtime
from .sessions import Session, new_id

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    from .runtime import Runtime

    P = ParamSpec("P")

T = TypeVar("T")
NESTED: Final = ("join", "new")


def _reason(kind: type[BaseException] | None) -> str:
    if kind is None or kind is GeneratorExit:
        return "ok"
    name = kind.__name__
    return "cancelled" if name in ("CancelledError", "KeyboardInterrupt") else "error"


def _options(name: object, **given: Any) -> dict[str, Any]:
    """Return what was given; what no server would take is complained of and left out.

    Programs of one name are of one kind, if it was given and the user does not say otherwise.
    """
    role = given["role"]
    if role is not None and role not in wire.ROLES:
        allowed = ", ".join(wire.ROLES)
        get_runtime().warn("role", f"role={role!r} is ignored: allowed are {allowed}")
        given["role"] = None
    for field in ("weight", "deadline_s"):
        value = given[field]
        wrong = None if value is None else wrong_number(field, value)
        if wrong is not None:
            get_runtime().warn(field, f"{wrong}; it is ignored")
            given[field] = None
    kind = name if given["kind"] is None and not callable(name) else given["kind"]
    given["kind"] = str(kind) if kind else None
    return {key: value for key, value in given.items() if value is not None}


class Entries:
    """What a block has entered and not left yet; tasks and threads may share the block."""

    def __init__(self) -> None:
        self._held: dict[object, Session | None] = {}
        self._silent: list[None] = []

    def add(self, entry: object, session: Session | None = None) -> None:
        """Note an entry that is in the scope, with the session that it opened."""
        self._held[entry] = session

    def add_silent(self) -> None:
        """Note an entry that changed nothing."""
        self._silent.append(None)

    def is_around(self) -> bool:
        """Return whether this context is inside the block."""
        return entry_here(self._held) is not None

    def take(self) -> tuple[object, Session | None]:
        """Return the entry to undo, and its session: this context's own, if it holds one."""
        entry = entry_here(self._held)
        if entry is not None:
            return entry, self._held.pop(entry, None)
        try:
            if self._silent:
                self._silent.pop()
                return None, None
            return self._held.popitem()  # entered in a context that is gone
        except (IndexError, KeyError):  # another thread was quicker, or it was never entered
            return None, None


class SessionScope(Block[Session]):
    """A block that is one run of an agent: ``with``, ``async with``, or a decorator.

    As a decorator it opens a session of its own for each run of the function.
    """

    def __init__(self, name: str | None, nested: str, options: dict[str, Any]) -> None:
        self._name = name
        self._nested = nested
        self._options = options
        self._entries = Entries()

    def __call__(self, fn: F, /) -> F:
        """Return ``fn`` such that each run of it is a session."""
        name = self._name or getattr(fn, "__name__", None)
        return decorate(fn, lambda: SessionScope(name, self._nested, self._options))

    def __enter__(self) -> Session:
        runtime = get_runtime()
        outer = scope_var.get()
        inside = outer is not None and outer.session.runtime is runtime
        parent = outer.session if inside and outer is not None else None
        if parent is not None and (parent.is_implicit or parent.state == "ended"):
            parent = None
        if parent is not None and self._nested == "join":
            if outer is not None and self._entries.is_around():
                # Entered again inside itself: this exit must not be taken for the outer one's.
                entry = object()
                self._entries.add(entry)
                scope_var.set(outer._replace(outer=outer, entry=entry))
            else:
                self._entries.add_silent()
            return parent
        session = runtime.new_session(self._name, parent=parent, **self._options)
        entry = object()
        self._entries.add(entry, session)
        scope_var.set(Scope(session, session.root, outer, entry))
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entry, session = self._entries.take()
        if entry is not None:
            leave(entry)
        if session is not None:
            session.end(_reason(kind))


@overload
def session(name: F, /) -> F: ...
@overload
def session(
    name: str | None = None,
    *,
    id: str | None = None,
    nested: str = "join",
    conversation: str | None = None,
    ttl: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
    kind: str | None = None,
) -> SessionScope: ...
def session(
    name: Any = None,
    *,
    id: str | None = None,
    nested: str = "join",
    conversation: str | None = None,
    ttl: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
    kind: str | None = None,
) -> Any:
    """Make a block, or a function, one run of an agent.

    Args:
        name: A label for people. Or the function, as a bare decorator.
        id: The id on the wire; by default a new one.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.
        conversation: The conversation that this run belongs to, if there are many per user.
        ttl: Seconds without a call after which the server may forget it.
        metadata: Anything worth showing, at most 2 KiB as JSON.
        role: What it is for: ``interactive``, ``delegated`` (by another agent) or ``background``;
            the server serves the latter two later, never sooner. By default the outer session's.
        weight: How much it counts beside others, 0.01 to 100. By default the outer session's, or 1.
        deadline_s: Seconds from the opening of the session by which it should be over. By default
            it has the outer session's deadline, if there is one.
        kind: What programs like it are called: one is expected to take what others of its kind
            took. By default the name that is given; ``""``: the server finds out by itself.

    Weight, deadline and kind count under the server's policy ``adaptive`` only.
    """
    options = _options(
        name, id=id, conversation=conversation, ttl=ttl, metadata=metadata, role=role,
        weight=weight, deadline_s=deadline_s, kind=kind,
    )  # fmt: skip
    if nested not in NESTED:
        allowed = " and ".join(NESTED)
        get_runtime().warn("nested", f"nested={nested!r} is taken for join: allowed are {allowed}")
        nested = "join"
    if callable(name):
        return SessionScope(None, nested, options)(name)
    return SessionScope(name, nested, options)


def start_session(
    name: str | None = None,
    *,
    id: str | None = None,
    conversation: str | None = None,
    ttl: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
    kind: str | None = None,
) -> Session:
    """Open a session without a block: for notebooks, callbacks, servers.

    Until it ends, it is also where calls outside every context belong, as long as it is the only
    one of its kind. Starting again under the same id returns the one that is open; so does the same
    name in the same context, or in another cell of a notebook. Other requests get their own. The
    options are those of ``session``.
    """
    runtime = get_runtime()
    here, is_top_level = _handles_here(runtime), _is_top_level()
    for handle in list(runtime.handles.values()):
        if handle.state == "open" and handle.is_own:
            if id is not None and handle.id == str(id):
                return handle
            mine = handle in here or (is_top_level and handle.is_top_level)
            if id is None and mine and handle.name == (None if name is None else str(name)):
                return handle
    options = _options(
        name, id=id, conversation=conversation, ttl=ttl, metadata=metadata, role=role,
        weight=weight, deadline_s=deadline_s, kind=kind,
    )  # fmt: skip
    opened = runtime.new_session(name, **options)
    opened.is_top_level = is_top_level
    runtime.add_handle(opened)
    scope_var.set(Scope(opened, opened.root, scope_var.get(), opened))
    return opened


def end_session(session: Session | None = None, *, reason: str | None = None) -> None:
    """End ``session``, or the one that ``start_session`` opened here; never anybody else's.

    Outside every context it is the only one of ``start_session``, where lost calls belong too; if
    there are several, none.
    """
    runtime = get_runtime()
    if session is None:
        here, handles = _handles_here(runtime), list(runtime.handles.values())
        scope = scope_var.get()
        if here:
            session = here[0]
        elif len(handles) == 1 and (scope is None or scope.session.is_implicit):
            session = handles[0]
    if session is not None:
        session.end(reason)
        leave(session)


def _handles_here(runtime: Runtime) -> list[Session]:
    """Return the open handles that this context is in, the innermost first."""
    found, scope = [], scope_var.get()
    while scope is not None:
        if runtime.handles.get(scope.session.id) is scope.session:
            found.append(scope.session)
        scope = scope.outer
    return found


def _is_top_level() -> bool:
    """Return whether the main thread is here, in no task or job that others may be beside.

    A cell of a notebook counts, whose kernel may run each in a task and context of its own.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        return False
    return main in current_owner() or hasattr(builtins, "__IPYTHON__")


class ThreadInfo(NamedTuple):
    """A logical thread of a session, as it is now."""

    number: int
    name: str | None
    parent: int | None
    calls: int  # made so far


class ThreadScope(Block["ThreadInfo | None"]):
    """A block that is one logical thread of the session it runs in; also a decorator."""

    def __init__(self, name: str | None, parents: Sequence[ThreadInfo | int] | None) -> None:
        self._name = name
        self._parents = tuple(parents) if parents else ()
        self._entries = Entries()

    def __call__(self, fn: F, /) -> F:
        """Return ``fn`` such that each run of it is on this thread."""
        name = self._name or getattr(fn, "__name__", None)
        return decorate(fn, lambda: ThreadScope(name, self._parents))

    def __enter__(self) -> ThreadInfo | None:
        found = get_runtime().find()
        if found is None:
            self._entries.add_silent()
            return None
        session, outer = found.session, found.scope
        follows: list[tuple[int, int]] = []
        parent = None
        for given in self._parents:
            number, calls = (given, 0) if isinstance(given, int) else (given.number, given.calls)
            live = session.find_branch(number)
            follows += live.here() if live is not None else [(number, calls)] if calls else []
            parent = parent or live
        parent = parent or session.branch_here(outer)
        branch = session.named_branch(self._name, parent, follows)
        node = self._name or (outer.node if outer is not None else None)
        entry = object()
        self._entries.add(entry)
        scope_var.set(Scope(session, branch, scope_var.get(), entry, node))
        return _info(branch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entry, _ = self._entries.take()
        if entry is not None:
            leave(entry)


@overload
def thread(name: F, /) -> F: ...
@overload
def thread(
    name: str | None = None, *, parents: Sequence[ThreadInfo | int] | None = None
) -> ThreadScope: ...
def thread(name: Any = None, *, parents: Sequence[ThreadInfo | int] | None = None) -> Any:
    """Say that a block, or a function, is one logical thread; usually this is found by itself.

    Args:
        name: A label, also sent as the node of its calls. The same name is the same thread.
        parents: The threads it follows, at most 16; by default the one it is entered from.
    """
    if callable(name):
        return ThreadScope(None, parents)(name)
    return ThreadScope(name, parents)


class ToolScope(Block[None]):
    """A block in which the program waits for a tool; tells the server so, off the call path."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[tuple[Session, int, str, float]] = []

    def __call__(self, fn: F, /) -> F:
        """Return ``fn`` such that each run of it is a call of this tool."""
        return decorate(fn, lambda: ToolScope(self._name))

    def __enter__(self) -> None:
        runtime = get_runtime()
        found = None if runtime.is_off or not runtime.config.lifecycle else runtime.find()
        if found is None or runtime.is_dynamo:  # Dynamo knows no such message
            return
        number = found.session.branch_here(found.scope).number
        state = (found.session, number, new_id(), time.monotonic())
        self._open.append(state)
        self._send("start", state)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            self._send("end", self._open.pop(), ok=kind is None)

    def _send(
        self, event: str, state: tuple[Session, int, str, float], ok: bool | None = None
    ) -> None:
        session, number, id, began_s = state
        if not session.peers:
            return  # no call yet, so no server knows the session
        body: dict[str, Any] = {"event": event, "tool": self._name, "thread": number, "id": id}
        if event == "end":
            body["ok"] = ok
            body["duration_s"] = round(time.monotonic() - began_s, 6)
        session.runtime.lifecycle.tool(session, body)


def tool(name: str) -> ToolScope:
    """Say that a block, or a function, is a call of tool ``name``: the program waits meanwhile.

    >>> with tool("search"):
    ...     pass
    """
    return ToolScope(name)


def propagate(fn: Callable[P, T], /) -> Callable[P, T]:
    """Return ``fn`` bound to the session and thread of here: for queues, callbacks, other pools."""
    found = get_runtime().find()
    if found is None:
        return fn
    captured = Scope(found.session, found.session.branch_here(found.scope))
    return decorate(fn, lambda: Within(captured))


def current_session() -> Session | None:
    """Return the session that a call made here would belong to, or None; opens nothing."""
    return get_runtime().peek()


def current_thread() -> ThreadInfo | None:
    """Return the logical thread that a call made here would belong to, or None."""
    session = current_session()
    return None if session is None else _info(session.branch_here(scope_var.get()))


def headers(session: Session | None = None) -> dict[str, str]:
    """Return the headers of one call, for a client without a hook; empty without a session."""
    found_session, runtime = session, get_runtime()
    if found_session is None:
        found = None if runtime.is_off else runtime.find()
        found_session = found.session if found is not None else None
    return {} if found_session is None else found_session.headers()


def _info(branch: Branch) -> ThreadInfo:
    return ThreadInfo(branch.number, branch.name, branch.parent_number, branch.seq)

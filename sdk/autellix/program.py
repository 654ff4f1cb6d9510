"""The blocks a user writes: ``session``, ``thread``, ``tool``; and handles, and ``propagate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from .branches import Branch
from .context import Scope, leave, scope_var
from .decorate import F, decorate
from .runtime import get_runtime
from .sessions import Session, new_id

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")


def _reason(kind: type[BaseException] | None) -> str:
    if kind is None or kind is GeneratorExit:
        return "ok"
    name = kind.__name__
    return "cancelled" if name in ("CancelledError", "KeyboardInterrupt") else "error"


class SessionScope:
    """A block that is one run of an agent: ``with``, ``async with``, or a decorator.

    As a decorator it opens a session of its own for each run of the function.
    """

    def __init__(self, name: str | None, nested: str, options: dict[str, Any]) -> None:
        self._name = name
        self._nested = nested
        self._options = options
        self._opened: list[tuple[object, Session | None]] = []

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
            self._opened.append((object(), None))
            return parent
        session = runtime.new_session(self._name, parent=parent, **self._options)
        entry = object()
        self._opened.append((entry, session))
        scope_var.set(Scope(session, session.root, outer, entry))
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._opened:
            return
        entry, session = self._take()
        leave(entry)
        if session is not None:
            session.end(_reason(kind))

    async def __aenter__(self) -> Session:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    def _take(self) -> tuple[object, Session | None]:
        """Return the entry to undo: this context's own, if tasks share the block."""
        scope = scope_var.get()
        while scope is not None:
            for index, (entry, _) in enumerate(self._opened):
                if scope.entry is entry:
                    return self._opened.pop(index)
            scope = scope.outer
        return self._opened.pop()


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
) -> SessionScope: ...
def session(
    name: Any = None,
    *,
    id: str | None = None,
    nested: str = "join",
    conversation: str | None = None,
    ttl: float | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Make a block, or a function, one run of an agent.

    Args:
        name: A label for people. Or the function, as a bare decorator.
        id: The id on the wire; by default a new one.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.
        conversation: The conversation that this run belongs to, if there are many per user.
        ttl: Seconds without a call after which the server may forget it.
        metadata: Anything worth showing, at most 2 KiB as JSON.
    """
    options = {"id": id, "conversation": conversation, "ttl": ttl, "metadata": metadata}
    options = {key: value for key, value in options.items() if value is not None}
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
) -> Session:
    """Open a session without a block: for notebooks, callbacks, servers.

    Until it ends, it is also where calls outside every context belong, as long as it is the only
    one of its kind. Starting again under the same name or id returns the one that is open.
    """
    runtime = get_runtime()
    for handle in list(runtime.handles.values()):
        if handle.state == "open" and handle.is_own:
            if id is not None and handle.id == id:
                return handle
            if id is None and handle.name == name:
                return handle
    options = {"id": id, "conversation": conversation, "ttl": ttl, "metadata": metadata}
    options = {key: value for key, value in options.items() if value is not None}
    opened = runtime.new_session(name, **options)
    runtime.add_handle(opened)
    scope_var.set(Scope(opened, opened.root, scope_var.get(), opened))
    return opened


def end_session(session: Session | None = None, *, reason: str | None = None) -> None:
    """End ``session``, or the one that ``start_session`` opened here; never anybody else's."""
    runtime = get_runtime()
    if session is None:
        scope = scope_var.get()
        session = runtime.handles.get(scope.session.id) if scope is not None else None
        if session is None and runtime.handles:
            session = list(runtime.handles.values())[-1]
    if session is not None:
        session.end(reason)
        leave(session)


class ThreadInfo(NamedTuple):
    """A logical thread of a session, as it is now."""

    number: int
    name: str | None
    parent: int | None
    calls: int  # made so far


class ThreadScope:
    """A block that is one logical thread of the session it runs in; also a decorator."""

    def __init__(self, name: str | None, parents: Sequence[ThreadInfo | int] | None) -> None:
        self._name = name
        self._parents = tuple(parents) if parents else ()
        self._entries: list[object] = []

    def __call__(self, fn: F, /) -> F:
        """Return ``fn`` such that each run of it is on this thread."""
        name = self._name or getattr(fn, "__name__", None)
        return decorate(fn, lambda: ThreadScope(name, self._parents))

    def __enter__(self) -> ThreadInfo | None:
        found = get_runtime().find()
        entry = object()
        self._entries.append(entry)
        if found is None:
            return None
        session, outer = found.session, found.scope
        parent = session.branch_here(outer)
        for given in self._parents[:1]:
            number = given if isinstance(given, int) else given.number
            parent = session.find_branch(number) or parent
        branch = session.named_branch(self._name, parent)
        node = self._name or (outer.node if outer is not None else None)
        scope_var.set(Scope(session, branch, scope_var.get(), entry, node))
        return _info(branch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._entries:
            leave(self._entries.pop())

    async def __aenter__(self) -> ThreadInfo | None:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


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
        parents: The threads it follows; the first one is sent as its parent.
    """
    if callable(name):
        return ThreadScope(None, parents)(name)
    return ThreadScope(name, parents)


class ToolScope:
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
        if found is None:
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

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

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
    session = found.session
    captured = Scope(session, session.branch_here(found.scope))

    @wraps(fn)
    def carried(*args: P.args, **kwargs: P.kwargs) -> T:
        before = scope_var.get()
        scope_var.set(captured._replace(outer=before))
        try:
            return fn(*args, **kwargs)
        finally:
            scope_var.set(before)

    import inspect

    if not inspect.iscoroutinefunction(fn):
        return carried

    @wraps(fn)
    async def carried_async(*args: Any, **kwargs: Any) -> Any:
        before = scope_var.get()
        scope_var.set(captured._replace(outer=before))
        try:
            return await fn(*args, **kwargs)
        finally:
            scope_var.set(before)

    return carried_async  # type: ignore[return-value]  # a coroutine function, like fn


def current_session() -> Session | None:
    """Return the session that a call made here would belong to, or None; opens nothing."""
    return get_runtime().peek()


def current_thread() -> ThreadInfo | None:
    """Return the logical thread that a call made here would belong to, or None."""
    session = current_session()
    return None if session is None else _info(session.branch_here(scope_var.get()))


def headers(session: Session | None = None) -> dict[str, str]:
    """Return the headers of one call, for a client without a hook; empty without a session."""
    found_session = session
    if found_session is None:
        found = get_runtime().find()
        found_session = found.session if found is not None else None
    return {} if found_session is None else found_session.headers()


def _info(branch: Branch) -> ThreadInfo:
    return ThreadInfo(branch.number, branch.name, branch.parent_number, branch.seq)

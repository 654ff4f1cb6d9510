"""LangGraph: each run of a graph is one program.

Nothing is needed for tags: calls inside nodes are tagged as everywhere. What a graph object adds is
the *bounds* of a program, however it is run. `wrap` returns a graph of the same type in which each
run opens a session of its own, or joins the one it is run in. `Callback` does the same if one
can pass a callback but cannot wrap.

All ways of running a graph pass through ``stream`` and ``astream``; only these are overridden, in a
subclass made for the graph. It is still a ``Pregel``: it draws, has state, and can be a subgraph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import ensure_config, merge_configs
from langgraph.pregel import Pregel
from langgraph.types import Command

import autellix

G = TypeVar("G", bound="Pregel[Any, Any, Any, Any]")

OPEN_MAX: Final = 10_000
CONVERSATIONS_MAX: Final = 10_000

Nested = Literal["join", "new"]
Resume = Literal["same", "new"]
SessionPer = Literal["run", "conversation"]


class _Conversations:
    """The last session of each conversation, so that a resumed run can be the same program."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def id_for(self, conversation: str | None, is_resumed: bool) -> str:
        """Return the session id of the run that begins."""
        if conversation is None:
            return uuid4().hex
        with self._lock:
            id = self._ids.get(conversation) if is_resumed else None
            if id is None:
                id = uuid4().hex
            self._ids[conversation] = id
            self._ids.move_to_end(conversation)
            while len(self._ids) > CONVERSATIONS_MAX:
                self._ids.popitem(last=False)
            return id


class _ToolWatch(BaseCallbackHandler):
    """Tells autellix when a tool of one run begins and ends; runs where the tool runs."""

    run_inline = True

    def __init__(self) -> None:
        self._open: dict[UUID, Any] = {}
        self._is_over = False

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Begin the wait for a tool."""
        if len(self._open) < OPEN_MAX and not self._is_over:
            scope = autellix.tool(str((serialized or {}).get("name") or "tool")[:100])
            scope.__enter__()
            self._open[run_id] = scope

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """End it."""
        self._close(run_id, None)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End it; the tool has failed."""
        self._close(run_id, error)

    def close(self) -> None:
        """End the wait for tools that were cancelled and told nobody: the run is over."""
        self._is_over = True
        for run_id in list(self._open):
            self._close(run_id, RuntimeError())

    def _close(self, run_id: UUID, error: BaseException | None) -> None:
        scope = self._open.pop(run_id, None)
        if scope is not None:
            scope.__exit__(type(error) if error is not None else None, error, None)


def wrap(
    graph: G,
    *,
    name: str | None = None,
    nested: Nested = "join",
    resume: Resume = "same",
    session_per: SessionPer = "run",
    tools: bool = True,
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
) -> G:
    """Return ``graph`` such that each of its runs is one program.

    Args:
        graph: A compiled graph, an entrypoint of the functional API, or an agent made of one.
        name: The program's name; by default the graph's.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.
        resume: A run that goes on after an interrupt (``Command(resume=…)`` or no input, with a
            ``thread_id``) is the ``same`` program as before, or a ``new`` one. The same one's
            service goes on counting; the server sees its calls as coming after the first end.
        session_per: What a program is: a ``run``, or all runs of a ``conversation`` (a
            ``thread_id``) in this process.
        tools: Whether to tell the server when tools begin and end.
        role: What its runs are for: ``interactive``, ``delegated`` or ``background``.
        weight: How much each counts beside other programs, 0.01 to 100.
        deadline_s: Seconds from its begin by which each should be over.

    Wrapping a wrapped graph returns it unchanged.
    """
    if getattr(type(graph), "_autellix_is_wrapped", False):
        return graph
    kind = _subclass(type(graph), _Program(
        name or graph.get_name(), resume, session_per, tools,
        {"nested": nested, "role": role, "weight": weight, "deadline_s": deadline_s,
         "kind": name or ""},
    ))  # fmt: skip
    # This is how Pregel copies itself.
    fields = {key: value for key, value in graph.__dict__.items() if key != "__orig_class__"}
    wrapped: G = kind(**fields)
    return wrapped


wrap_graph = wrap


class _Program:
    """How the runs of one graph become programs."""

    def __init__(
        self,
        name: str,
        resume: Resume,
        session_per: SessionPer,
        tools: bool,
        options: dict[str, Any],
    ) -> None:
        self._name = name
        self._resume = resume
        self._is_per_conversation = session_per == "conversation"
        self._tools = tools
        self._options = options  # of the sessions of its runs
        self._conversations = _Conversations()

    def session_for(self, input: Any, config: Any, own_config: Any) -> Callable[[Any], Any]:
        """Return the session of a run, to be used as a decorator."""
        conversation = _conversation_of(config) or _conversation_of(own_config)
        goes_on = input is None or (isinstance(input, Command) and input.resume is not None)
        is_same = self._is_per_conversation or (goes_on and self._resume == "same")
        id = self._conversations.id_for(conversation, is_same)
        return autellix.session(self._name, id=id, conversation=conversation, **self._options)

    @contextmanager
    def watched(self, config: Any) -> Iterator[Any]:
        """Give the run's config with a tool watch in it: one, also in a graph inside another."""
        # With the callbacks of the run around this one, or ours would take their place.
        whole = ensure_config(config)
        handlers = _handlers(whole.get("callbacks"))
        if not self._tools or any(isinstance(handler, _ToolWatch) for handler in handlers):
            yield config
            return
        watch = _ToolWatch()
        try:
            yield merge_configs(whole, _callbacks(watch))
        finally:
            watch.close()


def _subclass(base: Any, program: _Program) -> Any:
    """Return a subclass of ``base`` whose runs are runs of ``program``."""

    class Wrapped(base):  # type: ignore[misc]  # the base is known at run time only
        _autellix_is_wrapped = True

        def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Iterator[Any]:
            begin = super().stream
            session = program.session_for(input, config, self.config)

            @session
            def run() -> Iterator[Any]:
                with program.watched(config) as whole:
                    yield from begin(input, whole, **kwargs)

            chunks: Iterator[Any] = run()
            return chunks

        def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
            begin = super().astream
            session = program.session_for(input, config, self.config)

            @session
            async def run() -> AsyncIterator[Any]:
                with program.watched(config) as whole:
                    chunks = begin(input, whole, **kwargs)
                    try:
                        async for chunk in chunks:
                            yield chunk
                    finally:
                        await chunks.aclose()

            chunks: AsyncIterator[Any] = run()
            return chunks

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Wrapped, attribute, getattr(base, attribute))
    return Wrapped


def _callbacks(handler: BaseCallbackHandler) -> Any:
    return {"callbacks": [handler]}


def _handlers(callbacks: Any) -> list[Any]:
    """Return the handlers in a config's callbacks: a list of them, a manager, or nothing."""
    found: list[Any] = getattr(callbacks, "handlers", callbacks) or []
    return found


def _conversation_of(config: Any) -> str | None:
    thread_id = ((config or {}).get("configurable") or {}).get("thread_id")
    return None if thread_id is None else str(thread_id)


class Callback(BaseCallbackHandler):
    """One program per run, for those who can pass a callback but cannot wrap the graph.

    Give a new one to each run: ``graph.invoke(input, {"callbacks": [Callback("planner")]})``. The
    session begins with the outermost chain and ends with it. In async code, run the graph in a task
    of its own: LangChain tells of the end from another context, so the caller's would keep the
    session that has ended.
    """

    run_inline = True  # so that the session is in the context of the run itself

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._root: UUID | None = None
        self._scope: Any = None

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Open the session at the start of the run."""
        if self._root is None:
            self._root = run_id
            self._scope = autellix.session(self._name or kwargs.get("name"), kind=self._name or "")
            self._scope.__enter__()

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """End it with the run."""
        self._close(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """End it; the run has failed."""
        self._close(run_id, error)

    def _close(self, run_id: UUID, error: BaseException | None) -> None:
        if run_id == self._root:
            self._root = None
            self._scope.__exit__(type(error) if error is not None else None, error, None)

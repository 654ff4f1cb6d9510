"""AutoGen 0.7 (autogen-core, autogen-agentchat): programs of teams, and a runtime to share.

A team or an agent on its own embedded runtime needs nothing: its run loop starts inside ``run()``
and so inherits the session. Two things are added here. `wrap` makes each run of a team or an agent
one program. `AutellixRuntime` is for a runtime that is started before the sessions and shared by
them: its run loop would keep the context in which it was started, so each message carries the
session of its sender, and the handler runs in it. Only public names of autogen-core are used.

``pyautogen`` 0.10 is an empty proxy for autogen-agentchat. AG2 and Microsoft's Agent Framework need
no adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, TypeVar
from uuid import uuid4

from autogen_core import (
    AgentId,
    AgentRuntime,
    DefaultInterventionHandler,
    InterventionHandler,
    MessageContext,
    SingleThreadedAgentRuntime,
)

import autellix
from autellix.context import Scope, scope_var
from autellix.program import SessionScope

T = TypeVar("T")
MESSAGES_MAX: Final = 100_000
TOOLS_MAX: Final = 64  # in one request
_MARK: Final = "_autellix_is_wrapped"

_running: ContextVar[object] = ContextVar("autellix_autogen_running", default=None)


class _Nothing:
    """What a handler that answers nothing is taken to have answered, on the way to its asker."""


_NOTHING: Final = _Nothing()


class _Senders(DefaultInterventionHandler):
    """Remembers who sent a message, and puts the run loop there before the message is handled.

    The run loop calls an intervention handler in its own context, just before it makes the task
    that handles the message; the task inherits what is set here. Every message sets it, also to
    nothing, so that no session leaks into a message of another.
    """

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, Scope | None] = OrderedDict()

    def note(self, message_id: str) -> None:
        """Remember the session and thread of the running code as the sender's."""
        self._scopes[message_id] = scope_var.get()
        while len(self._scopes) > MESSAGES_MAX:
            self._scopes.popitem(last=False)

    async def on_send(
        self, message: Any, *, message_context: MessageContext, recipient: AgentId
    ) -> Any:
        """Go where the sender of a direct message is."""
        scope_var.set(self._scopes.pop(message_context.message_id, None))
        return message

    async def on_publish(self, message: Any, *, message_context: MessageContext) -> Any:
        """Go where the publisher is."""
        scope_var.set(self._scopes.pop(message_context.message_id, None))
        return message

    async def on_response(self, message: Any, *, sender: AgentId, recipient: AgentId | None) -> Any:
        """Hand a response on. No answer is a normal one; autogen-core would warn of a lost one."""
        return _NOTHING if message is None else message


class AutellixRuntime(SingleThreadedAgentRuntime):
    """A runtime to share between programs: each message is handled in its sender's session."""

    def __init__(
        self,
        *,
        intervention_handlers: list[InterventionHandler] | None = None,
        **options: Any,
    ) -> None:
        self._senders = _Senders()
        handlers = [self._senders, *(intervention_handlers or ())]
        super().__init__(intervention_handlers=handlers, **options)

    async def send_message(
        self, message: Any, recipient: AgentId, *, message_id: str | None = None, **options: Any
    ) -> Any:
        """Send a message to one agent, with the sender's session."""
        message_id = message_id or str(uuid4())
        self._senders.note(message_id)
        answer = await super().send_message(message, recipient, message_id=message_id, **options)
        return None if answer is _NOTHING else answer

    async def publish_message(
        self, message: Any, topic_id: Any, *, message_id: str | None = None, **options: Any
    ) -> None:
        """Publish a message to a topic, with the publisher's session."""
        message_id = message_id or str(uuid4())
        self._senders.note(message_id)
        await super().publish_message(message, topic_id, message_id=message_id, **options)


class _ToolWatch:
    """Tells autellix when tools begin and end, as a run's own events say."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def note(self, item: Any) -> None:
        """Look at what the run has just said: which tools it asks for, which have answered."""
        kind, content = getattr(item, "type", None), getattr(item, "content", None)
        if not isinstance(content, list):
            return
        if kind == "ToolCallRequestEvent":
            for call in content[:TOOLS_MAX]:
                scope = self._open[call.id] = autellix.tool(str(call.name)[:100])
                scope.__enter__()
        elif kind == "ToolCallExecutionEvent":
            for result in content:
                failed = RuntimeError() if result.is_error else None
                self._end(self._open.pop(result.call_id, None), failed)

    def close(self) -> None:
        """End the wait for tools that never answered: the run is over."""
        while self._open:
            self._end(self._open.popitem()[1], RuntimeError())

    def _end(self, scope: Any, error: Exception | None) -> None:
        if scope is not None:
            scope.__exit__(type(error) if error is not None else None, error, None)


def _watched(plain: Any) -> Any:
    """Return ``run_stream`` such that the tools it tells of are told to the server."""

    @wraps(plain)
    async def run_stream(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        watch, items = _ToolWatch(), plain(*args, **kwargs)
        try:
            async for item in items:
                watch.note(item)
                yield item
        finally:
            watch.close()
            await items.aclose()

    return run_stream


def _run_of(obj: Any, program: SessionScope) -> Any:
    """Return ``run`` as a program; the ``run_stream`` that a team's ``run`` calls is part of it."""
    plain = obj.run

    @wraps(plain)
    async def run(*args: Any, **kwargs: Any) -> Any:
        token = _running.set(obj)
        try:
            return await plain(*args, **kwargs)
        finally:
            _running.reset(token)

    return program(run)


def _stream_of(obj: Any, program: SessionScope) -> Any:
    """Return ``run_stream`` as a program, or as part of the ``run`` of the same object."""
    watched = _watched(obj.run_stream)
    alone = program(watched)

    @wraps(watched)
    def run_stream(*args: Any, **kwargs: Any) -> Any:
        return (watched if _running.get() is obj else alone)(*args, **kwargs)

    return run_stream


def wrap(
    obj: T,
    *,
    name: str | None = None,
    nested: str = "join",
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
) -> T:
    """Make each run of a team or an agent one program; or return the runtime class that carries.

    Args:
        obj: A team or an agent of autogen-agentchat, changed in place; or the class
            ``SingleThreadedAgentRuntime``, for which `AutellixRuntime` is returned.
        name: The program's name; by default the team's or agent's.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.
        role: What its runs are for: ``interactive``, ``delegated`` or ``background``.
        weight: How much each counts beside other programs, 0.01 to 100.
        deadline_s: Seconds from its begin by which each should be over.

    A team that is paused and resumed goes on as the program it was; one that is run again, after
    its end or a stop, is a new program. Tools are told of by a team's runs and by ``run_stream``.

    Raises:
        TypeError: it is neither; a runtime that exists already cannot be changed.
    """
    if isinstance(obj, type) and issubclass(obj, AgentRuntime):
        if obj is SingleThreadedAgentRuntime or issubclass(obj, AutellixRuntime):
            carrier: Any = AutellixRuntime if obj is SingleThreadedAgentRuntime else obj
            return carrier  # type: ignore[no-any-return]
        raise TypeError(f"{obj.__name__}: derive it from AutellixRuntime")
    if isinstance(obj, AgentRuntime) or not hasattr(obj, "run_stream"):
        raise TypeError(f"{type(obj).__name__} is no team, agent or runtime class")
    if not getattr(obj, _MARK, False):
        label = name or str(getattr(obj, "name", None) or type(obj).__name__)
        program = autellix.session(
            label, nested=nested, role=role, weight=weight, deadline_s=deadline_s, kind=name or ""
        )
        run, run_stream = _run_of(obj, program), _stream_of(obj, program)
        for method, made in (("run", run), ("run_stream", run_stream), (_MARK, True)):
            setattr(obj, method, made)
    return obj


wrap_runtime = wrap

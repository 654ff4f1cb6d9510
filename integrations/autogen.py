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

import warnings
from collections import OrderedDict
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

T = TypeVar("T")
MESSAGES_MAX: Final = 100_000
_MARK: Final = "_autellix_is_wrapped"


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


class AutellixRuntime(SingleThreadedAgentRuntime):
    """A runtime to share between programs: each message is handled in its sender's session."""

    def __init__(
        self,
        *,
        intervention_handlers: list[InterventionHandler] | None = None,
        **options: Any,
    ) -> None:
        # A handler that answers nothing is normal; autogen-core suspects our handler, which hands
        # on every response as it is, of having lost it.
        warnings.filterwarnings(
            "ignore", r"Intervention handler on_response returned None", RuntimeWarning
        )
        self._senders = _Senders()
        handlers = [self._senders, *(intervention_handlers or ())]
        super().__init__(intervention_handlers=handlers, **options)

    async def send_message(
        self, message: Any, recipient: AgentId, *, message_id: str | None = None, **options: Any
    ) -> Any:
        """Send a message to one agent, with the sender's session."""
        message_id = message_id or str(uuid4())
        self._senders.note(message_id)
        return await super().send_message(message, recipient, message_id=message_id, **options)

    async def publish_message(
        self, message: Any, topic_id: Any, *, message_id: str | None = None, **options: Any
    ) -> None:
        """Publish a message to a topic, with the publisher's session."""
        message_id = message_id or str(uuid4())
        self._senders.note(message_id)
        await super().publish_message(message, topic_id, message_id=message_id, **options)


def wrap(obj: T, *, name: str | None = None, nested: str = "join") -> T:
    """Make each run of a team or an agent one program; or return the runtime class that carries.

    Args:
        obj: A team or an agent of autogen-agentchat, changed in place; or the class
            ``SingleThreadedAgentRuntime``, for which `AutellixRuntime` is returned.
        name: The program's name; by default the team's or agent's.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.

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
        for method in ("run", "run_stream"):
            plain = getattr(obj, method)
            setattr(obj, method, autellix.session(label, nested=nested)(plain))
        setattr(obj, _MARK, True)
    return obj


wrap_runtime = wrap

"""The headers of one call, in the form in which the HTTP clients keep them.

What is the same for all calls of a session or thread is made once, so that a call costs little.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from . import __version__, wire
from .dialects import dynamo_tags
from .node import LANGCHAIN, encode, node_here
from .wire import make_tag

if TYPE_CHECKING:
    from .branches import Branch
    from .context import Scope
    from .sessions import Session

_SEQ, _SEQ_KEY, _ = make_tag(wire.SEQ, "")
_CALL, _CALL_KEY, _ = make_tag(wire.CALL, "")
_DEADLINE, _DEADLINE_KEY, _ = make_tag(wire.DEADLINE, "")
_CLIENTS: Final = {
    source: make_tag(wire.CLIENT, f"python/{__version__};src={source}")
    for source in ("ctx", "process", "single", "late")
}


def fixed_tags(session: Session) -> tuple[wire.Tag, ...]:
    """Return the tags that all calls of ``session`` have, its id last: see ``hooks``."""
    tags = [make_tag(wire.VLLM_SESSION, session.id)]
    if session.parent is not None:
        tags.append(make_tag(wire.PARENT_SESSION, session.parent.id))
    if session.conversation is not None and wire.is_valid_id(session.conversation):
        tags.append(make_tag(wire.CONVERSATION, session.conversation))
    if session.role is not None:
        tags.append(make_tag(wire.ROLE, session.role))
    if session.weight is not None:
        tags.append(make_tag(wire.WEIGHT, f"{session.weight:.4f}".rstrip("0").rstrip(".")))
    if session.kind is not None:
        kind = encode(session.kind)
        if kind is not None:
            tags.append(make_tag(wire.KIND, kind))
    return (*tags, make_tag(wire.SESSION, session.id))


def tags_of(
    session: Session, scope: Scope | None, call_id: str, source: str, *, is_retry: bool = False
) -> list[wire.Tag]:
    """Return the tags of one call of ``session``, and count it in its thread.

    Args:
        session: The program.
        scope: Where the running code is: the thread, and the label of the call.
        call_id: Equal for all attempts of a call, if the client has such a thing.
        source: How the session was found: ``ctx``, ``process``, ``single`` or ``late``.
        is_retry: Whether it is a later attempt: of the call of this id, if its thread has made
            one lately, else of its latest.
    """
    if scope is not None and scope.session is session and scope.branch.is_here():
        branch = scope.branch
    else:
        branch = session.branch_here(scope)
    if session._runtime.is_dynamo:
        return [make_tag(name, value) for name, value in dynamo_tags(session, branch)]
    if is_retry:
        call_id, seq = branch.retried(call_id)
    else:
        seq = branch.next_seq(call_id)
    tags = [
        branch.tag,
        (_SEQ, _SEQ_KEY, b"%d" % seq),
        (_CALL, _CALL_KEY, call_id.encode("ascii")),
        _CLIENTS[source],
    ]
    if branch.parent_number is not None or branch.follows or session.parent_calls:
        parent = parent_of(session, branch)
        if parent is not None:
            tags.append(make_tag(wire.PARENT, parent))
    if session._over_at_s is not None:
        left_s = max(session._over_at_s - time.monotonic(), -wire.DEADLINE_S_MAX)
        tags.append((_DEADLINE, _DEADLINE_KEY, b"%.3f" % left_s))
    if LANGCHAIN in sys.modules or (scope is not None and scope.node is not None):
        node = node_here(scope)
        if node is not None:
            tags.append(make_tag(wire.NODE, node))
    otel = sys.modules.get("opentelemetry.trace")
    if otel is not None:
        from .otel import annotate

        annotate(otel, session, branch.number)
    tags += session.fixed_tags
    return tags


def parent_of(session: Session, branch: Branch) -> str | None:
    """Return the point where ``branch`` was forked and what else it follows, as sent; or None.

    The main thread has no such point, unless the session is a guest's or a child.
    """
    if not branch.follows and not branch.is_far():
        return f"{branch.parent_number}:{branch.fork_seq}"
    points = branch.forks()
    if session.parent_calls and (not points or not points[-1][1]):
        points += session.parent_calls
    points += branch.follows
    return wire.join_parents(points) or None

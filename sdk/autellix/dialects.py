"""Other servers' names for the same thing, sent instead of ours: NVIDIA Dynamo's.

Dynamo's *session* is one chain of calls, which is a thread here; its parent session is the thread
that this one was forked from. The main thread has the session's own id. A last minimal request
marked final lets Dynamo let go of the main thread's state at once; the others' runs out by itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from . import wire

if TYPE_CHECKING:
    from .branches import Branch
    from .sessions import Session

DYNAMO = "dynamo"
DIALECTS = ("autellix", DYNAMO)


def dynamo_tags(session: Session, branch: Branch) -> list[tuple[str, str]]:
    """Return Dynamo's headers of one call of ``session``.

    Args:
        session: The program.
        branch: The thread that makes the call.
    """
    tags = [(wire.DYNAMO_SESSION, _chain(session.id, session.root.number, branch.number))]
    if branch.parent_number is not None:
        parent = _chain(session.id, session.root.number, branch.parent_number)
    elif not session.parent_calls:
        return tags
    else:  # of the outer session, or of the same one in another process
        outer = session.parent
        id, main = (outer.id, outer.root.number) if outer is not None else (session.id, 0)
        parent = _chain(id, main, session.parent_calls[0][0])
    return [(wire.DYNAMO_PARENT, parent), *tags]


def _chain(id: str, main: int, number: int) -> str:
    return id if number == main and main == 0 else f"{id}.{number}"


def note_request(session: Session, request: Any) -> None:
    """Remember what a last request of ``session`` needs: where to, and for which model."""
    if session.last_request is None:
        body = json.loads(request.content)
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str):
            prefix = request.url.path.partition("/v1/")[0]
            session.last_request = (f"{prefix}/v1/chat/completions", model)


def final_request(session: Session) -> tuple[str, dict[str, Any], dict[str, str]] | None:
    """Return path, body and headers of the request that ends ``session``, if it made a call."""
    if session.last_request is None:
        return None
    path, model = session.last_request
    body = {"model": model, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    main = _chain(session.id, session.root.number, session.root.number)
    return path, body, {wire.DYNAMO_SESSION: main, wire.DYNAMO_FINAL: "true"}

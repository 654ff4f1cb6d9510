"""OpenTelemetry, if the application has it: attributes on the current span. Never baggage."""

from __future__ import annotations

from typing import Any

from .sessions import Session


def annotate(trace: Any, session: Session, thread: int) -> None:
    """Put the session and thread on the current span.

    Args:
        trace: The module ``opentelemetry.trace``; the application has imported it.
        session: The session of the call.
        thread: The number of its logical thread.
    """
    span = trace.get_current_span()
    if not span.is_recording():
        return
    span.set_attribute("autellix.session.id", session.id)
    span.set_attribute("autellix.thread.id", thread)
    present = getattr(span, "attributes", None) or {}
    if "gen_ai.conversation.id" not in present:
        span.set_attribute("gen_ai.conversation.id", session.conversation or session.id)

"""The label of a call: an explicit one, or the LangGraph node that makes it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import wire

if TYPE_CHECKING:
    from .context import Scope


def node_here(scope: Scope | None) -> str | None:
    """Return the percent-encoded label of the running code, or None if it has none."""
    if scope is not None and scope.node is not None:
        return encode(scope.node)
    config: Any = sys.modules.get("langchain_core.runnables.config")
    variable = getattr(config, "var_child_runnable_config", None)
    if variable is None:
        return None
    metadata = (variable.get() or {}).get("metadata")
    if not isinstance(metadata, dict):
        return None
    node = metadata.get("langgraph_node")
    if node is None:
        return None
    space = metadata.get("langgraph_checkpoint_ns") or node
    step = metadata.get("langgraph_step")
    return encode(f"{space}|{step}") or encode(f"{node}|{step}")


def encode(label: str) -> str | None:
    """Return ``label`` as a header value, or None if it is too long.

    >>> encode("plan the route")
    'plan%20the%20route'
    """
    from urllib.parse import quote

    value = quote(label, safe=":|/.-_~")
    return value if len(value) <= wire.VALUE_BYTES_MAX else None

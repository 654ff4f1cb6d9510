"""Where the running code is in a LangGraph: the label of a call, and its place in a subgraph."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import wire
from .spaces import Place

if TYPE_CHECKING:
    from .context import Scope


LANGCHAIN = "langchain_core.runnables.config"


def node_here(scope: Scope | None) -> str | None:
    """Return the percent-encoded label of the running code, or None if it has none."""
    if scope is not None and scope.node is not None:
        return encode(scope.node)
    metadata = _metadata_here()
    if metadata is None:
        return None
    node = metadata["langgraph_node"]
    space = metadata.get("langgraph_checkpoint_ns") or node
    step = metadata.get("langgraph_step")
    return encode(f"{space}|{step}") or encode(f"{node}|{step}")


def place_here() -> Place | None:
    """Return where in a subgraph the running code is, or None if it is in none."""
    metadata = _metadata_here()
    if metadata is None:
        return None
    space, _, _ = str(metadata.get("langgraph_checkpoint_ns") or "").rpartition("|")
    step = metadata.get("langgraph_step")
    return Place(space, step) if space and isinstance(step, int) else None


def _metadata_here() -> dict[str, Any] | None:
    """Return what LangGraph says of the node that runs here, if one does."""
    config: Any = sys.modules.get(LANGCHAIN)
    variable = getattr(config, "var_child_runnable_config", None)
    if variable is None:
        return None
    metadata = (variable.get() or {}).get("metadata")
    if not isinstance(metadata, dict) or metadata.get("langgraph_node") is None:
        return None
    return metadata


def encode(label: str) -> str | None:
    """Return ``label`` as a header value, or None if it is too long.

    >>> encode("plan the route")
    'plan%20the%20route'
    >>> encode("caf" + chr(0xDCE9))
    'caf%3F'
    """
    from urllib.parse import quote

    # a file's name, say, may have halves of characters, which have no bytes of their own
    value = quote(label, safe=":|/.-_~", errors="replace")
    return value if len(value) <= wire.VALUE_BYTES_MAX else None

"""The one context variable: which session and thread the running code belongs to."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container

    from .branches import Branch
    from .sessions import Session


class Scope(NamedTuple):
    """What a context belongs to; immutable, so that copies of a context share nothing."""

    session: Session
    branch: Branch
    outer: Scope | None = None  # what was in force outside the block that set this one
    entry: object | None = None  # the block that set this one, so that only it takes it away
    node: str | None = None  # a label for the calls made here


scope_var: ContextVar[Scope | None] = ContextVar("autellix_scope", default=None)


def entry_here(entries: Container[object]) -> object | None:
    """Return the innermost of ``entries`` that this context holds, or None."""
    scope = scope_var.get()
    while scope is not None:
        if scope.entry is not None and scope.entry in entries:
            return scope.entry
        scope = scope.outer
    return None


def leave(entry: object) -> bool:
    """Take away the scope that ``entry`` set, if this context holds it; else change nothing.

    No token is reset: a token raises when a generator or a framework closes a block in another
    context than the one that opened it.
    """
    scope = scope_var.get()
    while scope is not None:
        if scope.entry is entry:
            scope_var.set(scope.outer)
            return True
        scope = scope.outer
    return False

"""Carries a session to another process, queue or callback, and picks it up there."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, NamedTuple

from . import wire
from .branches import Branch
from .context import Scope, leave, scope_var
from .decorate import Block
from .errors import CarrierError
from .runtime import get_runtime
from .sessions import Session

if TYPE_CHECKING:
    from types import TracebackType

    from .runtime import Runtime

ENV = "AUTELLIX_SESSION"


class Point(NamedTuple):
    """What a carrier holds: a session, and where in it; nowhere if it does not say."""

    id: str
    parents: tuple[wire.ParentCall, ...] = ()
    role: str | None = None


def parse(text: str) -> Point | None:
    """Return what a carrier ``id[;thread[:seq]]`` holds, or None if it is none.

    >>> parse("run-7;3:12")
    Point(id='run-7', parents=(ParentCall(thread=3, seq=12),), role=None)
    >>> parse("run-7").parents, parse("run-7;3").parents, parse("no good")
    ((), (ParentCall(thread=3, seq=0),), None)
    """
    id, _, point = text.partition(";")
    if not wire.is_valid_id(id):
        return None
    if not point:
        return Point(id)
    parents = wire.parse_parents(point if ":" in point else f"{point}:0")
    return Point(id, parents) if parents else None


def adopt(runtime: Runtime, text: str) -> Session | None:
    """Return the session that ``text`` names, as a guest: this process will never end it."""
    point = parse(text)
    if point is None:
        runtime.warn("carrier", f"{ENV} is no carrier: {text[:80]!r}")
        return None
    return _guest(runtime, point, is_implicit=True)


def _guest(runtime: Runtime, point: Point, *, is_implicit: bool) -> Session:
    session = Session(
        runtime, id=point.id, role=point.role, is_implicit=is_implicit, is_adopted=True
    )
    session.parent_calls = point.parents
    return session


def inject(carrier: MutableMapping[str, str], *, baggage: bool = False) -> None:
    """Write the current session and thread into ``carrier``; nothing if there is none.

    Args:
        carrier: HTTP headers, an environment, or any mapping of texts. ``os.environ`` itself and
            copies of it get ``AUTELLIX_SESSION``; others get the headers of the wire protocol.
        baggage: Also write W3C baggage. It goes to *every* service downstream, so only if asked.
    """
    runtime = get_runtime()
    found = None if runtime.is_off else runtime.find()
    if found is None:
        return
    session = found.session
    here = session.branch_here(found.scope)
    if carrier is os.environ or "PATH" in carrier:
        carrier.update(session.env())
    else:
        if session.role is not None:
            carrier[wire.ROLE.lower()] = session.role
        carrier[wire.SESSION.lower()] = session.id
        carrier[wire.PARENT.lower()] = wire.join_parents(here.here())
    if baggage:
        item = f"autellix.session={session.id}"
        before = carrier.get("baggage")
        carrier["baggage"] = f"{before},{item}" if before else item


class attach(Block["Session | None"]):
    """Run a block in the session that a carrier holds; an empty carrier means no session.

    Args:
        carrier: What ``inject`` wrote, whatever the case of its keys.

    Raises:
        CarrierError: The carrier holds a session or thread that cannot be read.
    """

    def __init__(self, carrier: Mapping[str, str]) -> None:
        self._point = _read(carrier)

    def __enter__(self) -> Session | None:
        outer = scope_var.get()
        if self._point is None:
            scope_var.set(None)
            self._outer = outer
            return None
        runtime = get_runtime()
        session = runtime.live.get(self._point.id)
        branch: Branch | None = None
        if session is None:
            session = _guest(runtime, self._point, is_implicit=False)
        elif self._point.parents:
            branch = session.find_branch(self._point.parents[0].thread)
        scope_var.set(Scope(session, branch or session.root, outer, self))
        return session

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._point is not None:
            leave(self)
        elif scope_var.get() is None:
            scope_var.set(self._outer)


def _read(carrier: Mapping[str, str]) -> Point | None:
    lower = {str(key).lower(): value for key, value in carrier.items()}
    text = lower.get(ENV.lower())
    role = lower.get(wire.ROLE.lower()) or lower.get("autellix_role")
    role = role if role in wire.ROLES else None
    if text is not None:
        parsed = parse(text)
        if parsed is None:
            raise CarrierError(f"{ENV}={text[:80]!r}: expected id[;thread[:seq]]")
        return parsed._replace(role=role)
    id = lower.get(wire.SESSION.lower())
    if id is None:
        for item in lower.get("baggage", "").split(","):
            key, _, value = item.strip().partition("=")
            if key == "autellix.session":
                id = value.partition(";")[0]
    if id is None:
        return None
    if not wire.is_valid_id(id):
        raise CarrierError(f"session {id[:80]!r} has characters that no header may carry")
    parent = lower.get(wire.PARENT.lower())
    if parent is None:
        return Point(id, role=role)
    parents = wire.parse_parents(parent)
    if not parents:
        raise CarrierError(f"parent {parent[:80]!r}: expected thread:seq, or several with commas")
    return Point(id, parents, role)

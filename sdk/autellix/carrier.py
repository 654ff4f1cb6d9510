"""Carries a session to another process, queue or callback, and picks it up there."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from . import wire
from .branches import Branch
from .context import Scope, leave, scope_var
from .errors import CarrierError
from .runtime import get_runtime
from .sessions import Session

if TYPE_CHECKING:
    from types import TracebackType

    from .runtime import Runtime

ENV = "AUTELLIX_SESSION"


def parse(text: str) -> tuple[str, int | None, int] | None:
    """Return (id, thread or None, seq) of a carrier ``id[;thread[:seq]]``, or None.

    >>> parse("run-7;3:12"), parse("run-7"), parse("no good")
    (('run-7', 3, 12), ('run-7', None, 0), None)
    """
    id, _, point = text.partition(";")
    if not wire.is_valid_id(id):
        return None
    if not point:
        return id, None, 0
    thread, _, seq = point.partition(":")
    number = wire.parse_number(thread)
    count = wire.parse_number(seq) if seq else 0
    return None if number is None or count is None else (id, number, count)


def adopt(runtime: Runtime, text: str, *, is_implicit: bool = True) -> Session | None:
    """Return the session that ``text`` names, as a guest: this process will never end it."""
    parsed = parse(text)
    if parsed is None:
        runtime.warn("carrier", f"{ENV} is no carrier: {text[:80]!r}")
        return None
    id, thread, seq = parsed
    session = Session(runtime, id=id, is_implicit=is_implicit, is_adopted=True)
    if thread is not None:
        session.parent_call = wire.ParentCall(thread, seq)
    return session


def inject(carrier: MutableMapping[str, str], *, baggage: bool = False) -> None:
    """Write the current session and thread into ``carrier``; nothing if there is none.

    Args:
        carrier: HTTP headers, an environment, or any mapping of texts. ``os.environ`` itself and
            copies of it get ``AUTELLIX_SESSION``; others get the headers of the wire protocol.
        baggage: Also write W3C baggage. It goes to *every* service downstream, so only if asked.
    """
    found = get_runtime().find()
    if found is None:
        return
    session = found.session
    here = session.branch_here(found.scope)
    if carrier is os.environ or "PATH" in carrier:
        carrier[ENV] = f"{session.id};{here.number}:{here.seq}"
    else:
        carrier[wire.SESSION.lower()] = session.id
        carrier[wire.PARENT.lower()] = f"{here.number}:{here.seq}"
    if baggage:
        item = f"autellix.session={session.id}"
        before = carrier.get("baggage")
        carrier["baggage"] = f"{before},{item}" if before else item


class attach:
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
        id, thread, seq = self._point
        runtime = get_runtime()
        session = runtime.live.get(id)
        branch: Branch | None = None
        if session is None:
            text = id if thread is None else f"{id};{thread}:{seq}"
            session = adopt(runtime, text, is_implicit=False)
            assert session is not None, "a carrier that was read names a session"
        elif thread is not None:
            branch = session.find_branch(thread)
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

    async def __aenter__(self) -> Session | None:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


def _read(carrier: Mapping[str, str]) -> tuple[str, int | None, int] | None:
    lower = {str(key).lower(): value for key, value in carrier.items()}
    text = lower.get(ENV.lower())
    if text is not None:
        parsed = parse(text)
        if parsed is None:
            raise CarrierError(f"{ENV}={text[:80]!r}: expected id[;thread[:seq]]")
        return parsed
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
        return id, None, 0
    point = wire.parse_parent(parent)
    if point is None:
        raise CarrierError(f"parent {parent[:80]!r}: expected thread:seq")
    return id, point.thread, point.seq

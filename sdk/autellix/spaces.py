"""Where LangGraph says who runs after whom: a subgraph's run, and its super-steps.

A subgraph's nodes run in tasks that are started from a task which makes no call itself, so that the
context shows them as siblings of the nodes outside. What LangGraph tells each node of itself puts
that right: calls in the same *space* (one run of a subgraph) belong under one thread, and every
task of a super-step comes after all of the step before. The first that calls in a step goes on
with the space's thread; others in the same step are its children, forked where the step began.

Outside of a graph, at its top level, and where LangGraph says nothing (async nodes on Python 3.10),
the context alone decides.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from .branches import Branch, is_alive

if TYPE_CHECKING:
    from .sessions import Session

SPACES_MAX: Final = 1024  # per session; the oldest is forgotten, and found anew by its context


class Place(NamedTuple):
    """Where in a subgraph the running code is."""

    space: str
    step: int


class _Space:
    """One run of a subgraph."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.step: int | None = None
        self.step_seq = 0  # calls that the thread had made when the step began


class Spaces:
    """The subgraph runs of one session; the session's lock guards it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Space] = OrderedDict()

    def branch_of(self, session: Session, place: Place, base: Branch, owner: object) -> Branch:
        """Return the thread of ``owner``, whose context shows it under ``base``."""
        space = self._known.get(place.space)
        if space is not None and base.is_at_or_below(space.branch):
            return session.fork(base, owner)  # started by a call's own thread: nothing to put right
        if space is None or space.branch.parent is not base or space.branch.pid != os.getpid():
            alone = not base.children
            space = self._known[place.space] = _Space(session.new_branch(owner, base))
            space.branch.alone = alone
            if len(self._known) > SPACES_MAX:
                self._known.popitem(last=False)
        branch = space.branch
        if branch.owner() is owner and space.step == place.step:
            return branch
        if space.step != place.step or not (is_alive(branch.owner()) or branch.has_live_child()):
            space.step, space.step_seq = place.step, branch.seq
            if branch.fork_seq != base.seq:  # there were calls outside since
                branch.refork(base.seq)
            base.keep(owner, branch)
            session.note_owner(owner, branch)
            return branch
        child = branch.child_of(owner)
        if child is None:
            child = session.new_branch(owner, branch)
            child.fork_seq = space.step_seq
            branch.keep(owner, child)
            session.note_owner(owner, child)
        return child

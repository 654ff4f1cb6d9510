"""What clients say of their programs for the policy ``adaptive``: weight, deadline, kind.

A name of a kind of which there was one program only tells nothing, and there are clients whose
every program has a name of its own: so a name counts from its second program on. Names are scoped
by API key, and an engine gets a hash.

Pure.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .program import Program

KINDS_MAX: Final = 4096  # the one longest not heard is forgotten


class Wishes(NamedTuple):
    """What is said with one call or message; None: nothing, and it stays as it was."""

    weight: float | None = None
    left_s: float | None = None  # to the deadline, from now; negative if it is over
    kind: str | None = None  # the client's name for programs like it


NO_WISHES: Final = Wishes()


class Kinds:
    """The names that clients give to kinds of programs; see the module."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()  # its one program; "": there were more

    def __len__(self) -> int:
        return len(self._first)

    def note(self, program: Program, wishes: Wishes, now_s: float) -> None:
        """Keep with a program what its client says of it."""
        if wishes.weight is not None:
            program.weight = wishes.weight
        if wishes.left_s is not None:
            program.deadline_s = now_s + wishes.left_s
        if wishes.kind is not None and program.kind is None:
            program.kind = self._known(program, wishes.kind)

    def know(self, kind: str | None) -> None:
        """Take over the kind of a program of an earlier life of the gateway."""
        if kind is not None:
            self._put(kind, "")

    def _known(self, program: Program, name: str) -> str | None:
        """Return the kind, 12 hex digits; None: no other program has had its name."""
        # the length keeps ("a", "b:c") and ("a:b", "c") apart
        text = f"{len(program.scope)}:{program.scope}:{name}"
        kind = hashlib.blake2b(text.encode(), digest_size=6, person=b"autellix-kind").hexdigest()
        is_alone = self._first.get(kind, program.program_id) == program.program_id
        self._put(kind, program.program_id if is_alone else "")
        return None if is_alone else kind

    def _put(self, kind: str, first: str) -> None:
        self._first[kind] = first
        self._first.move_to_end(kind)
        if len(self._first) > KINDS_MAX:
            self._first.popitem(last=False)

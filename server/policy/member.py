"""A program in the eyes of admission, and the kind of programs it belongs to.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .call import Call
from .hazard import Hazard, bound_s
from .service import Program
from .working_set import Hashes, WorkingSet

KINDS_MAX: Final = 128
ONCE_MAX: Final = 1024  # first blocks seen once
KNOWN: Final = 16  # endings after which a kind is believed; until then all kinds together answer
ANSWER_TOKENS: Final = 128  # expected of a call before anything is known


class Kind:
    """Programs that begin with the same tokens, or that the client gives the same name.

    Attributes:
        name: None: programs of which nothing is known.
        hazard: Of their work.
        hashes: The blocks of a first call.
        shared_tokens: What their first calls have in common.
        counted_tokens: The same as it was when the first of them was seated.
        seated: How many have a seat.
        answer_tokens: Mean length of an answer.
    """

    __slots__ = (
        "answer_tokens",
        "counted_tokens",
        "hashes",
        "hazard",
        "name",
        "seated",
        "shared_tokens",
    )

    def __init__(self, name: object) -> None:
        self.name = name
        self.hazard = Hazard()
        self.hashes: Hashes = ()
        self.shared_tokens = 0
        self.counted_tokens = 0
        self.seated = 0
        self.answer_tokens = float(ANSWER_TOKENS)


class Kinds:
    """The kinds there are; bounded, those longest not seen go first.

    Two programs that begin with the same block are of one kind. A first block that was seen once is
    kept apart, so that programs that are like no other do not push the kinds out.
    """

    def __init__(self) -> None:
        self.anybody = Kind(None)
        self._named: OrderedDict[object, Kind] = OrderedDict()
        self._once: OrderedDict[object, Hashes] = OrderedDict()

    def of(self, name: str | None, hashes: Hashes) -> Kind:
        """Return the kind of a program that comes in.

        Args:
            name: As the client says; None: by what its first call begins with.
            hashes: Of the blocks of its first call.
        """
        key: object = name if name is not None else (hashes[0] if hashes else None)
        if key is None:
            return self.anybody
        kind = self._named.pop(key, None)
        if kind is None:
            before = self._once.pop(key, None)
            if before is None and name is None:
                self._once[key] = hashes
                if len(self._once) > ONCE_MAX:
                    self._once.popitem(last=False)
                return self.anybody
            kind = Kind(key)
            kind.hashes = before or ()
        self._named[key] = kind
        if len(self._named) > KINDS_MAX:
            self._named.popitem(last=False)
        return kind

    def like(self, hashes: Hashes) -> Hashes | None:
        """Return the blocks of another program that begins as this one; None: there is none."""
        kind = self._named.get(hashes[0]) if hashes else None
        return None if kind is None else kind.hashes

    def left_s(self, kind: Kind, work_s: float) -> float:
        """Return what a program has left, by its kind if that is known well enough."""
        known = kind.hazard if kind.hazard.endings >= KNOWN else self.anybody.hazard
        return known.left_s(work_s)


class Member:
    """What admission knows of a program.

    Attributes:
        number: Breaks ties: programs that came first are first.
        began_s: When it came, plus the time that it was waiting for tools and humans since.
        work_s: What it has used of the engine, by ``work.py``.
        bucket: Of the work, as told to the hazard.
        next_s: Work at which it comes into the next one.
        left_s: What it has left to run beside the others.
        passed: It has more left than a newcomer of its kind, who would go before it.
        due_s: When it is due; the smallest first.
        margin_s: How much later somebody must be due to give way to it.
        reload_s: How much later it must be due to give way, for what it loses.
        calls: Its calls in the engine.
        running: Those of them that run.
        gap_since_s: When its last call left, None while it has calls.
    """

    __slots__ = (
        "began_s",
        "bucket",
        "calls",
        "deadline_s",
        "due_s",
        "entry",
        "gap_entry",
        "gap_key",
        "gap_since_s",
        "kind",
        "left_s",
        "margin_s",
        "next_s",
        "number",
        "owner",
        "passed",
        "program",
        "reload_s",
        "running",
        "seated",
        "taken_tokens",
        "weight",
        "work_s",
        "working_set",
        "yields",
    )

    def __init__(self, owner: object, program: Program, kind: Kind, number: int) -> None:
        self.owner = owner
        self.program = program
        self.kind = kind
        self.number = number
        self.began_s = program.arrival_s
        self.work_s = 0.0
        self.bucket = 0
        self.next_s = bound_s(0)
        self.working_set = WorkingSet()
        self.weight = 1.0
        self.deadline_s: float | None = None
        self.due_s = program.arrival_s
        self.left_s = self.margin_s = self.reload_s = 0.0
        self.calls: dict[Call, None] = {}
        self.running = 0
        self.gap_since_s: float | None = None
        self.gap_key: str | None = None
        self.seated = self.yields = self.passed = False
        self.taken_tokens = 0.0
        self.entry = self.gap_entry = 0

    def room_tokens(self) -> float:
        """Return the room to keep for it: what it holds, and the answers that are expected."""
        kind = self.kind
        counted = kind.counted_tokens if kind.seated else kind.shared_tokens
        return float(self.working_set.beside(counted))

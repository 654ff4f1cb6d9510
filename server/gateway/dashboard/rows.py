"""Where the rows of a live feed come from: here the process table of this process.

A source holds all rows while somebody watches, and tells once a second which of them are news.
While nobody does it holds nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from ... import views
from ...clock import Clock
from ...process_table import ProcessTable

ROWS_A_TICK: Final = 300  # more changed ones come with the next ticks, oldest change first
CHUNK: Final = 250  # rows; calls go on between two chunks


class News(NamedTuple):
    """What has changed since the last time somebody asked."""

    rows: list[views.Row]  # `ROWS_A_TICK` at most
    gone: list[str]  # programs that are forgotten
    behind: int  # changed ones that did not fit


class Rows(Protocol):
    """A source of rows. It belongs to the event loop."""

    @property
    def total(self) -> int:
        """How many programs there are, held or not."""
        ...

    @property
    def in_flight(self) -> int:
        """Calls in flight, also while nobody watches."""
        ...

    async def fill(self) -> None:
        """Note changes from now on, and make all rows; calls go on meanwhile."""
        ...

    def held(self) -> Collection[views.Row]:
        """Return the rows that are there."""
        ...

    def news(self, now_s: float) -> News:
        """Return what has changed; only after `fill`."""
        ...

    def forget(self) -> None:
        """Nobody watches: hold nothing and note nothing. A second time is no harm."""
        ...


class TableRows:
    """The programs of a table; satisfies `Rows`.

    Args:
        table: The programs.
        clock: The clock of ``table``.
    """

    def __init__(self, table: ProcessTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._rows: dict[str, views.Row] = {}
        self._changed: dict[str, None] = {}
        self._settling: deque[tuple[float, str]] = deque()  # (when to look again, program)

    @property
    def total(self) -> int:
        """How many programs the table has."""
        return len(self._table)

    @property
    def in_flight(self) -> int:
        """Calls in flight."""
        return self._table.in_flight

    async def fill(self) -> None:
        """Have the table note changes, and make all rows."""
        self._table.changes.watcher = self._changed
        ids = [program.program_id for program in self._table.programs()]
        for start in range(0, len(ids), CHUNK):
            now_s = self._clock.now_s()
            for program_id in ids[start : start + CHUNK]:
                self._make_row(program_id, now_s)
            await asyncio.sleep(0)

    def held(self) -> Collection[views.Row]:
        """Return the rows that are made."""
        return self._rows.values()

    def news(self, now_s: float) -> News:
        """Return the rows of programs that have changed, and those that are forgotten."""
        while self._settling and self._settling[0][0] <= now_s:
            self._changed[self._settling.popleft()[1]] = None
        rows = []
        for program_id in list(self._changed)[:ROWS_A_TICK]:
            del self._changed[program_id]
            before = self._rows.get(program_id)
            row = self._make_row(program_id, now_s)
            if row is not None and row != before:
                rows.append(row)
        gone: list[str] = []
        if len(self._rows) > len(self._table):  # else nothing can be forgotten but unseen ones
            gone = [i for i in self._rows if self._table.get(i) is None]
            for program_id in gone:
                del self._rows[program_id]
        return News(rows, gone, len(self._changed))

    def forget(self) -> None:
        """Drop the rows, and let the table note nothing."""
        self._table.changes.watcher = None
        self._rows, self._changed = {}, {}
        self._settling.clear()

    def _make_row(self, program_id: str, now_s: float) -> views.Row | None:
        """Return a program's row and remember it; None: it is forgotten."""
        program = self._table.get(program_id)
        if program is None:
            return None
        if views.settles(program):
            assert program.completed_s is not None
            due_s = program.completed_s + views.SETTLES_S
            if due_s > now_s:
                self._settling.append((due_s, program_id))
        row = self._rows[program_id] = views.row_of(program, now_s)
        return row

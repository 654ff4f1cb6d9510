"""The rows of several gateway processes as one source, by following each one's live feed.

Theory of operation. While somebody watches, a task per process reads its feed: all rows, then what
changes. A feed that ends, stalls or says too much is given up and tried again, after a wait that
grows to a bound. What the process had told stays until it has told all rows again; what is not
among those is gone then. So a process that is started again keeps the rows that its journal has,
and no other. All clocks are one machine's, so the times in rows need no change.

Bounds: `ROWS_MAX` rows of a process, the ids of those that have changed, and not many more of such
that are gone; messages of `MESSAGE_BYTES_MAX`. While nobody watches there is no task, no connection
and no row.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any, Final

import orjson

from ... import views
from ...process_table import PROGRAMS_MAX
from ..client import CallError
from ..tasks import Counter, keep_running
from .rows import ROWS_A_TICK, News

_log = logging.getLogger(__name__)

ROWS_MAX: Final = PROGRAMS_MAX + 10_000  # of a process: a full table, and what changes meanwhile
MESSAGE_BYTES_MAX: Final = 16 << 20
STALLED_S: Final = 10.0  # a tick comes each second, but the first rows of a full table take some
FILL_S: Final = 4.0  # a viewer waits no longer; rows that come later are changes
RETRY_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0)

#: Opens the feed of a process: yields the names and the data of its messages until it ends.
Follow = Callable[[int], AsyncGenerator[tuple[str, bytes], None]]


class TooManyRows(Exception):
    """A process tells of more than a table holds."""


class Followed:
    """What one process has told.

    Attributes:
        rows: Its programs.
        changed: Those whose rows are news, oldest change first.
        gone: Those that are forgotten, which is news too.
        total: How many it has, as it says.
        behind: How many changes it has not sent yet.
        has_answered: Set when all rows are there, or are not to be had for now.
    """

    def __init__(self) -> None:
        self.rows: dict[str, views.Row] = {}
        self.changed: dict[str, None] = {}
        self.gone: dict[str, None] = {}
        self.total = self.behind = 0
        self.has_answered = asyncio.Event()
        self._stale: dict[str, None] = {}  # told by the feed before, and not yet by this one

    def take(self, event: str, data: Any) -> None:
        """Take in one message; one that a viewer alone needs is passed over.

        Raises:
            TooManyRows: see there.
        """
        if event == "hello":
            self._stale = dict.fromkeys(self.rows)
        elif event == "rows":
            self._take_rows(data)
        elif event == "filled":
            self._drop(self._stale)
            self._stale = {}
            self.total = data["rows"]
            self.has_answered.set()
        elif event == "tick":
            self._drop(data.get("gone", ()))
            self._take_rows(data.get("rows", ()))
            self.total, self.behind = data["total"], data.get("behind", 0)

    def lose(self) -> None:
        """The feed has ended."""
        self.behind = 0
        self.has_answered.set()

    def _take_rows(self, rows: Collection[Any]) -> None:
        for fields in rows:
            row = tuple(fields)
            program_id = row[views.ID]
            self._stale.pop(program_id, None)
            before = self.rows.get(program_id)
            if row == before:
                continue
            if before is None:
                self._make_room()
            self.rows[program_id] = row
            self.changed[program_id] = None
            self.gone.pop(program_id, None)

    def _make_room(self) -> None:
        """See that there is room for a row: what this feed has not told yet goes first."""
        if len(self.rows) >= ROWS_MAX:
            self._drop(self._stale)
            self._stale = {}
        if len(self.rows) >= ROWS_MAX or len(self.gone) >= ROWS_MAX:
            raise TooManyRows

    def _drop(self, program_ids: Collection[str]) -> None:
        for program_id in program_ids:
            if self.rows.pop(program_id, None) is not None:
                self.changed.pop(program_id, None)
                self.gone[program_id] = None


class JoinedRows:
    """See the module; satisfies `Rows`.

    Args:
        count: How many processes.
        follow: Opens the feed of one of them.
        calls_in_flight: Returns how many calls they have, all together.
        counter: Counts mistakes.
    """

    def __init__(
        self, count: int, follow: Follow, calls_in_flight: Callable[[], int], counter: Counter
    ) -> None:
        self._count = count
        self._follow = follow
        self._calls_in_flight = calls_in_flight
        self._counter = counter
        self._followed: list[Followed] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._first = 0  # whose changes are told first

    @property
    def total(self) -> int:
        """How many programs the processes have."""
        return sum(each.total for each in self._followed)

    @property
    def in_flight(self) -> int:
        """Calls in flight."""
        return self._calls_in_flight()

    async def fill(self) -> None:
        """Begin to follow, and wait until all rows are there, or not to be had for now."""
        self.forget()
        self._followed = [Followed() for _ in range(self._count)]
        self._tasks = [self._begin(index, each) for index, each in enumerate(self._followed)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FILL_S):
                for each in self._followed:
                    await each.has_answered.wait()
        for each in self._followed:
            each.changed.clear()
            each.gone.clear()

    def held(self) -> Collection[views.Row]:
        """Return the rows that have come."""
        return list(itertools.chain.from_iterable(each.rows.values() for each in self._followed))

    def news(self, now_s: float) -> News:  # noqa: ARG002  (the processes have looked at it)
        """Return the rows that have changed; processes take turns at being first."""
        rows: list[views.Row] = []
        gone: list[str] = []
        self._first += 1
        for turn in range(self._count):
            each = self._followed[(self._first + turn) % self._count]
            for program_id in list(itertools.islice(each.changed, ROWS_A_TICK - len(rows))):
                del each.changed[program_id]
                rows.append(each.rows[program_id])
            gone += each.gone
            each.gone.clear()
        return News(rows, gone, sum(len(e.changed) + e.behind for e in self._followed))

    def forget(self) -> None:
        """Hang up and drop the rows."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self._followed = [], []

    def _begin(self, index: int, followed: Followed) -> asyncio.Task[None]:
        async def keep_following() -> None:
            tries = 0
            while True:
                was_filled = await self._follow_once(index, followed)
                followed.lose()
                tries = 0 if was_filled else tries + 1
                await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])

        return keep_running("gateway rows", keep_following, self._counter)

    async def _follow_once(self, index: int, followed: Followed) -> bool:
        """Read a feed until it ends, however it does; return whether all rows came."""
        is_filled = False
        try:
            async with contextlib.aclosing(self._follow(index)) as messages:
                while True:
                    async with asyncio.timeout(STALLED_S):
                        message = await anext(messages, None)
                    if message is None:
                        break
                    event, data = message
                    followed.take(event, orjson.loads(data))
                    is_filled = is_filled or event == "filled"
            _log.debug("the feed of gateway %d has ended", index)
        except (CallError, TimeoutError) as error:
            _log.debug("the feed of gateway %d is given up: %r", index, error)
        except TooManyRows:
            _log.warning("gateway %d tells of more than %d programs", index, ROWS_MAX)
            return False
        return is_filled

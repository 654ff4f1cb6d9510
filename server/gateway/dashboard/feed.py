"""The live feed: once a second what has changed, encoded once and sent to every viewer.

The first message tells a viewer the fields of a row, then come all rows in chunks, then a message a
second with the changed ones. Costs are bounded whatever happens: rows a second, viewers, and
messages that a slow viewer may owe, who is sent away and comes back by itself. While nobody watches
only the queues are sampled, so that there is a past to look at. Where the rows come from, it does
not know: see `rows`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from ... import views
from ...clock import Clock
from .rows import CHUNK, Rows

PERIOD_S: Final = 1.0
VIEWERS_MAX: Final = 16
OWED_MAX: Final = 10  # messages
SAMPLES_MAX: Final = 900
FAIRNESS_EVERY: Final = 10  # ticks
FAIRNESS_ROWS: Final = 4_000  # of more programs every so manieth is looked at

_ROWS_WORD: Final = b"event: rows\ndata: "


class TooManyViewers(Exception):
    """There are `VIEWERS_MAX` already."""


class Viewer:
    """One who watches: what is still to be sent to them."""

    def __init__(self) -> None:
        self._owed: asyncio.Queue[bytes | None] = asyncio.Queue(OWED_MAX)
        self.is_over = False

    def put(self, message: bytes) -> bool:
        """Take a message; return whether the viewer keeps up."""
        try:
            self._owed.put_nowait(message)
        except asyncio.QueueFull:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Tell `messages` to end."""
        self.is_over = True
        with contextlib.suppress(asyncio.QueueFull):  # a full one is not waited for
            self._owed.put_nowait(None)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield what comes, until `close`."""
        while not self.is_over:
            message = await self._owed.get()
            if message is None:
                return
            yield message


class LiveFeed:
    """See the module. It belongs to the event loop.

    Args:
        rows: The programs.
        engine_views: Rows of engines as the pool sees them.
        clock: The clock of ``rows``.
        about: What else the first message says: policy, version.
    """

    def __init__(
        self,
        rows: Rows,
        engine_views: Callable[[], Sequence[Mapping[str, Any]]],
        clock: Clock,
        about: Mapping[str, Any],
    ) -> None:
        self.boot = secrets.token_hex(6)
        self.engines: list[dict[str, Any]] = []
        self.samples: deque[tuple[Any, ...]] = deque(maxlen=SAMPLES_MAX)
        self._rows = rows
        self._engine_views = engine_views
        self._clock = clock
        self._about = dict(about)
        self._viewers: set[Viewer] = set()
        self._filled: asyncio.Task[None] | None = None
        self._ticks = self._judged = 0
        self._moved = False  # whether a row has changed since fairness was looked at
        self._fairness: dict[str, Any] = views.fairness(())
        self._stepped: dict[str, tuple[float, str | None, int]] = {}

    @property
    def viewers(self) -> int:
        """How many watch now."""
        return len(self._viewers)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another viewer."""
        return len(self._viewers) >= VIEWERS_MAX

    async def run(self) -> None:
        """Tick until cancelled."""
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                self.tick(self._clock.now_s())
        finally:
            self.close()

    def close(self) -> None:
        """Send everybody away."""
        for viewer in list(self._viewers):
            self._leave(viewer)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Watch: the value yields messages of an event stream until the viewer is sent away.

        Raises:
            TooManyViewers: see there.
        """
        if self.is_full:
            raise TooManyViewers
        viewer = Viewer()
        self._viewers.add(viewer)
        try:
            yield self._messages(viewer)
        finally:
            self._leave(viewer)

    async def _messages(self, viewer: Viewer) -> AsyncIterator[bytes]:
        now_s = self._clock.now_s()
        yield _event("hello", self._hello(now_s))
        await self._fill()
        rows = list(self._rows.held())
        for start in range(0, len(rows), CHUNK):
            yield _ROWS_WORD + orjson.dumps(rows[start : start + CHUNK]) + b"\n\n"
            await asyncio.sleep(0)
        yield _event("filled", {"rows": len(rows), "fairness": self._fairness})
        async for message in viewer.messages():
            yield message

    def _hello(self, now_s: float) -> dict[str, Any]:
        if not self.engines:
            self._look_at_engines(now_s)
        return {
            **self._about,
            "boot": self.boot,
            "now_s": now_s,
            "columns": views.COLUMNS,
            "samples": list(self.samples),
            "engines": self.engines,
            "fairness": self._fairness,
        }

    async def _fill(self) -> None:
        """Make all rows, once for however many come at the same time; calls go on meanwhile."""
        if self._filled is None:
            self._filled = asyncio.create_task(self._make_rows(), name="dashboard rows")
        await asyncio.shield(self._filled)

    async def _make_rows(self) -> None:
        await self._rows.fill()
        self._fairness = self._judge()

    def tick(self, now_s: float) -> None:
        """Sample the queues; tell everybody what has changed."""
        self._ticks += 1
        self._look_at_engines(now_s)
        sample = views.queue_sample(now_s, self.engines, self._rows.in_flight)
        self.samples.append(sample)
        if not self._viewers:
            return
        document: dict[str, Any] = {
            "now_s": now_s,
            "sample": sample,
            "engines": self.engines,
            "total": self._rows.total,
        }
        if self._filled is not None and self._filled.done():
            news = self._rows.news(now_s)
            document["rows"], document["gone"] = news.rows, news.gone
            self._moved = self._moved or bool(news.rows)
            if self._ticks >= self._judged + FAIRNESS_EVERY and self._moved:
                self._judged, self._moved = self._ticks, False
                self._fairness = document["fairness"] = self._judge()
            document["behind"] = news.behind
        message = _event("tick", document)
        for viewer in list(self._viewers):
            if not viewer.put(message):
                self._leave(viewer)

    def _judge(self) -> dict[str, Any]:
        rows = self._rows.held()
        stride = -(-len(rows) // FAIRNESS_ROWS) or 1
        return views.fairness(itertools.islice(rows, 0, None, stride))

    def _look_at_engines(self, now_s: float) -> None:
        engines = []
        for view in self._engine_views():
            row = views.engine_row(view)
            row["steps_per_s"] = self._rate_of(row, now_s)
            engines.append(row)
        self.engines = engines

    def _rate_of(self, row: Mapping[str, Any], now_s: float) -> float | None:
        """Return the steps a second since the tick before, of the same start of an engine."""
        step: int | None = row["step"]
        boot, engine_id = row["boot"], str(row["engine"])
        before = self._stepped.get(engine_id)
        if step is None:
            self._stepped.pop(engine_id, None)
            return None
        self._stepped[engine_id] = (now_s, boot, step)
        if before is None or before[1] != boot or now_s <= before[0]:
            return None
        return round(max(0.0, (step - before[2]) / (now_s - before[0])), 1)

    def _leave(self, viewer: Viewer) -> None:
        viewer.close()
        self._viewers.discard(viewer)
        if not self._viewers:
            if self._filled is not None:
                self._filled.cancel()
                self._filled = None
            self._rows.forget()


def _event(name: str, document: Any) -> bytes:
    """Return one message of an event stream."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(document) + b"\n\n"

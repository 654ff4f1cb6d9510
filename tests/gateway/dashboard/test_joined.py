"""The rows of several processes as one source: what joins, what stays, what bounds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from autellix.server import views
from autellix.server.clock import ManualClock
from autellix.server.gateway.client import CallError
from autellix.server.gateway.dashboard import joined, stream
from autellix.server.gateway.dashboard.feed import LiveFeed
from autellix.server.gateway.dashboard.joined import JoinedRows
from autellix.server.gateway.dashboard.rows import ROWS_A_TICK
from autellix.server.gateway.dashboard.stream import ProcessFeed, follow_feed
from autellix.server.gateway.state import GATEWAY
from tests.gateway.conftest import until

from .scene import Scene
from .test_feed import take

CALLS = views.COLUMNS.index("calls")


def row_of(program_id: str, calls: int) -> tuple[Any, ...]:
    """Return a row with little in it."""
    row: list[Any] = [None] * len(views.COLUMNS)
    row[views.ID], row[CALLS] = program_id, calls
    return tuple(row)


class Process:
    """The feed of a process that is none: it says what the test says."""

    def __init__(self, **programs: int) -> None:
        self.programs = programs
        self.opened = self.open = 0
        self.is_silent = False  # it says hello and nothing more
        self.is_back = asyncio.Event()  # else it has no rows yet
        self.is_back.set()
        self._said: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def feed(self) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield all rows, then what is said, until `end`."""
        self.opened += 1
        self.open += 1
        try:
            yield "hello", orjson.dumps({"columns": views.COLUMNS})
            if self.is_silent:
                await asyncio.Event().wait()
            await self.is_back.wait()
            yield "rows", orjson.dumps([row_of(*item) for item in self.programs.items()])
            yield "filled", orjson.dumps({"rows": len(self.programs)})
            while (message := await self._said.get())[0] != "end":
                yield message[0], orjson.dumps(message[1])
        finally:
            self.open -= 1

    def tick(self, behind: int = 0, gone: tuple[str, ...] = (), **programs: int) -> None:
        """Say that programs have changed, and that some are gone."""
        self.programs |= programs
        for program_id in gone:
            del self.programs[program_id]
        rows = [row_of(*item) for item in programs.items()]
        total = len(self.programs)
        news = {"total": total, "rows": rows, "gone": list(gone), "behind": behind}
        self._said.put_nowait(("tick", news))

    def say(self, event: str, data: Any) -> None:
        """Say anything."""
        self._said.put_nowait((event, data))

    def end(self) -> None:
        """End the feed, as a process that dies."""
        self._said.put_nowait(("end", None))


class Joint:
    """Processes, and a feed over the rows of all of them, which ticks when the test says so."""

    def __init__(self, *processes: Process) -> None:
        self.processes = processes
        self.calls = 0
        self.counts: list[str] = []
        self.rows = JoinedRows(len(processes), self._follow, lambda: self.calls, self)
        self.feed = LiveFeed(self.rows, list, ManualClock(5.0), {})

    def count(self, what: str) -> None:
        """Count a mistake."""
        self.counts.append(what)

    def _follow(self, index: int) -> AsyncGenerator[tuple[str, bytes], None]:
        return self.processes[index].feed()

    def held(self) -> dict[str, int]:
        """Return the calls of the programs that are held."""
        return {row[views.ID]: row[CALLS] for row in self.rows.held()}

    async def told(self, messages: AsyncIterator[bytes]) -> Any:
        """Tick; return the message with its rows as the calls of programs."""
        self.feed.tick(5.0)
        ((_, tick),) = await take(messages, "tick")
        tick["rows"] = {row[views.ID]: row[CALLS] for row in tick["rows"]}
        return tick

    async def filled(self, messages: AsyncIterator[bytes]) -> dict[str, int]:
        """Return the calls of the programs that a viewer is told of first."""
        first = await take(messages, "filled")
        return {row[views.ID]: row[CALLS] for name, rows in first if name == "rows" for row in rows}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits long for another try."""
    monkeypatch.setattr(joined, "RETRY_S", (0.01,))


async def test_programs_of_all_processes_are_in_one_feed():
    """All rows first, then what any of them says has changed or is gone."""
    one, two = Process(a=1, b=1), Process(c=1)
    joint = Joint(one, two)
    async with joint.feed.watching() as messages:
        assert await joint.filled(messages) == {"a": 1, "b": 1, "c": 1}
        tick = await joint.told(messages)
        assert (tick["rows"], tick["gone"], tick["total"], tick["behind"]) == ({}, [], 3, 0)
        one.tick(b=2, gone=("a",))
        two.tick(c=5, d=1, behind=7)
        await until(lambda: joint.held() == {"b": 2, "c": 5, "d": 1})
        tick = await joint.told(messages)
        assert (tick["rows"], tick["gone"]) == ({"b": 2, "c": 5, "d": 1}, ["a"])
        assert (tick["total"], tick["behind"]) == (3, 7)
        assert (await joint.told(messages))["rows"] == {}


async def test_a_program_that_comes_and_goes_between_two_ticks_is_gone():
    """And one that goes and comes is not."""
    one = Process(a=1)
    joint = Joint(one)
    async with joint.feed.watching() as messages:
        await joint.filled(messages)
        one.tick(b=1)
        one.tick(gone=("a", "b"))
        one.tick(a=2)
        await until(lambda: joint.held() == {"a": 2})
        tick = await joint.told(messages)
        assert (tick["rows"], tick["gone"]) == ({"a": 2}, ["b"])


async def test_a_process_that_is_started_again_has_what_it_brings_back():
    """Its rows stay meanwhile; then what it has no more is gone, and only changes are told."""
    one, two = Process(a=1, b=1, c=1), Process(z=1)
    joint = Joint(one, two)
    async with joint.feed.watching() as messages:
        await joint.filled(messages)
        one.is_back.clear()
        one.end()
        await until(lambda: one.opened == 2)
        assert joint.held() == {"a": 1, "b": 1, "c": 1, "z": 1}
        tick = await joint.told(messages)
        assert (tick["rows"], tick["gone"], tick["total"]) == ({}, [], 4)
        one.programs = {"a": 1, "b": 9}
        one.is_back.set()
        await until(lambda: joint.held() == {"a": 1, "b": 9, "z": 1})
        tick = await joint.told(messages)
        assert (tick["rows"], tick["gone"], tick["total"]) == ({"b": 9}, ["c"], 3)


async def test_a_feed_that_stalls_is_given_up_and_tried_again(monkeypatch: pytest.MonkeyPatch):
    """A viewer is shown the others meanwhile, and its rows as changes once they come."""
    monkeypatch.setattr(joined, "STALLED_S", 0.05)
    one, two = Process(a=1), Process(b=1)
    one.is_silent = True
    joint = Joint(one, two)
    async with joint.feed.watching() as messages:
        assert await joint.filled(messages) == {"b": 1}
        await until(lambda: one.opened >= 3)
        assert one.open <= 1, "what is given up is closed"
        one.is_silent = False
        await until(lambda: "a" in joint.held())
        assert (await joint.told(messages))["rows"]["a"] == 1


async def test_a_viewer_does_not_wait_for_a_process_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    """It has so long to begin with; the rest come when they do."""
    monkeypatch.setattr(joined, "FILL_S", 0.05)
    one, two = Process(a=1), Process(b=1)
    one.is_silent = True
    joint = Joint(one, two)
    async with joint.feed.watching() as messages:
        assert await joint.filled(messages) == {"b": 1}
        assert one.opened == 1


async def test_more_changes_than_a_tick_may_carry_come_with_the_next_ones():
    """The bound is of all processes together; each has its turn, and none is forgotten."""
    one, two = Process(), Process()
    joint = Joint(one, two)
    async with joint.feed.watching() as messages:
        await joint.filled(messages)
        one.tick(behind=2, **{f"a{n}": 1 for n in range(500)})
        two.tick(**{f"b{n}": 1 for n in range(500)})
        await until(lambda: len(joint.held()) == 1000)
        told: dict[str, int] = {}
        left = []
        for _ in range(4):
            tick = await joint.told(messages)
            assert len(tick["rows"]) <= ROWS_A_TICK
            told |= tick["rows"]
            left.append(tick["behind"])
            if len(left) == 2:
                assert {program_id[0] for program_id in told} == {"a", "b"}
        assert left == [702, 402, 102, 2]
        assert len(told) == 1000


async def test_without_viewers_no_connection_is_held_and_nothing_remembered():
    """The queues are sampled with the calls that the fleet counts; a viewer begins anew."""
    one, two = Process(a=1), Process(b=1)
    joint = Joint(one, two)
    joint.calls = 3
    joint.feed.tick(5.0)
    assert joint.feed.samples[-1][1] == 3
    assert (one.opened, two.opened) == (0, 0)
    for turn in (1, 2):
        async with joint.feed.watching() as messages:
            assert await joint.filled(messages) == {"a": turn, "b": 1}
            assert (one.open, two.open, one.opened) == (1, 1, turn)
            one.tick(a=turn + 1)
            await until(lambda turn=turn: joint.held()["a"] == turn + 1)
        await until(lambda: (one.open, two.open) == (0, 0))
        assert not joint.rows.held()
        assert not joint.rows._followed
        assert not joint.rows._tasks
    assert joint.counts == []


async def test_a_process_that_tells_of_too_many_programs_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
):
    """What is held is bounded, and it is tried again; what it told before makes room."""
    monkeypatch.setattr(joined, "ROWS_MAX", 3)
    one, two = Process(a=1, b=1), Process(z=1)
    joint = Joint(one, two)
    async with joint.feed.watching() as messages:
        await joint.filled(messages)
        one.tick(c=1, d=1)
        await until(lambda: one.opened >= 3)
        assert joint.held() == {"a": 1, "b": 1, "c": 1, "z": 1}
        one.programs = {"a": 1, "d": 1}
        await until(lambda: joint.held() == {"a": 1, "d": 1, "z": 1})
        tick = await joint.told(messages)
        assert (tick["rows"], sorted(tick["gone"])) == ({"d": 1}, ["b", "c"])
    assert joint.counts == []


async def test_a_mistake_in_a_message_is_counted_and_the_feed_read_again():
    """It is logged with its trace, as in any task of the gateway."""
    one = Process(a=1)
    joint = Joint(one)
    async with joint.feed.watching() as messages:
        await joint.filled(messages)
        one.say("tick", {"rows": [[1]]})
        await until(lambda: one.opened == 2)
        assert joint.counts == ["task gateway rows restarted"]
        one.tick(a=2)
        await until(lambda: joint.held() == {"a": 2})
        assert (await joint.told(messages))["rows"] == {"a": 2}


async def test_a_process_serves_its_feed_on_a_private_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its table notes changes while a sibling reads, and no longer; a long message is refused."""
    scene = Scene()
    scene.fill(600)
    app = web.Application()
    app[GATEWAY] = scene.gateway
    process = ProcessFeed(scene.gateway)
    process.hang(app, "/feed")
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "g0")).start()
    rows = JoinedRows(1, lambda _: follow_feed(tmp_path / "g0", "/feed"), int, scene.gateway)
    try:
        await rows.fill()
        assert (len(rows.held()), rows.total) == (600, 600)
        assert {row[views.ID] for row in rows.held()} == {
            program.program_id for program in scene.table.programs()
        }
        assert process.feed.viewers == 1
        scene.program("one more")
        await until(lambda: rows.total == 601)
        assert [row[1] for row in rows.news(scene.now_s).rows] == ["one more"]
        rows.forget()
        await until(lambda: process.feed.viewers == 0)
        assert scene.table.changes.watcher is None
        monkeypatch.setattr(stream, "MESSAGE_BYTES_MAX", 1000)
        with pytest.raises(CallError, match="longer than 1000 bytes"):
            async for _ in follow_feed(tmp_path / "g0", "/feed"):
                pass
        with pytest.raises(CallError):
            async for _ in follow_feed(tmp_path / "nobody", "/feed"):
                pass
    finally:
        rows.forget()
        await runner.cleanup()
    assert scene.gateway.counts == {}

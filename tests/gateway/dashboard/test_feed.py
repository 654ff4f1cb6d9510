"""The live feed: what viewers are told, and what bounds its cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from autellix.server import views
from autellix.server.gateway.dashboard import feed as feeds
from autellix.server.gateway.dashboard.feed import LiveFeed, TooManyViewers
from autellix.server.gateway.dashboard.rows import ROWS_A_TICK

from .scene import Scene


def feed_of(scene: Scene) -> LiveFeed:
    """Return a feed over a scene, which ticks when the test says so."""
    return LiveFeed(scene.rows, scene.engine_views, scene.clock, {"policy": "plas"})


async def take(messages: AsyncIterator[bytes], until: str) -> list[tuple[str, Any]]:
    """Return messages up to the first of a name."""
    taken: list[tuple[str, Any]] = []
    async with asyncio.timeout(10):
        async for message in messages:
            event, data = message.decode().split("\n")[:2]
            name = event.removeprefix("event: ")
            taken.append((name, json.loads(data.removeprefix("data: "))))
            if name == until:
                break
    return taken


async def test_a_viewer_gets_all_rows_and_then_what_changes():
    """First the fields' names, then the rows in chunks, then one message a tick."""
    scene = Scene()
    scene.fill(600)
    feed = feed_of(scene)
    async with feed.watching() as messages:
        first = await take(messages, "filled")
        assert first[0][0] == "hello"
        assert tuple(first[0][1]["columns"]) == views.COLUMNS
        chunks = [data for name, data in first if name == "rows"]
        assert [len(chunk) for chunk in chunks] == [250, 250, 100]
        scene.advance(1)
        feed.tick(scene.now_s)
        ((_, tick),) = await take(messages, "tick")
        assert (tick["rows"], tick["gone"], tick["total"]) == ([], [], 600)
        scene.begin("run-00001")
        scene.program("new one")
        feed.tick(scene.now_s)
        ((_, tick),) = await take(messages, "tick")
        rows = [dict(zip(views.COLUMNS, row, strict=True)) for row in tick["rows"]]
        assert [row["name"] for row in rows] == ["triage-bot 00001", "new one"]
        assert [row["in_flight"] for row in rows] == [1, 0]


async def test_a_state_that_changes_by_itself_is_told():
    """A program between two calls is idle after a while, with no event that says so."""
    scene = Scene()
    scene.fill(20)
    feed = feed_of(scene)
    async with feed.watching() as messages:
        await take(messages, "filled")
        call = scene.begin("run-00001")
        scene.advance(0.5)
        scene.end(*call, [(0.0, "run", 1, "fresh")])
        feed.tick(scene.now_s)
        ((_, tick),) = await take(messages, "tick")
        assert [row[views.STATE] for row in tick["rows"]] == ["tool_wait"]
        scene.advance(views.SETTLES_S + 0.1)
        feed.tick(scene.now_s)
        ((_, tick),) = await take(messages, "tick")
        assert "idle" in {row[views.STATE] for row in tick["rows"]}


async def test_rows_a_tick_are_bounded_and_none_is_forgotten():
    """When everything changes at once it comes with the next ticks."""
    scene = Scene()
    scene.fill(1000)
    feed = feed_of(scene)
    async with feed.watching() as messages:
        await take(messages, "filled")
        scene.advance(views.SETTLES_S * 2)
        for number in range(1000):
            scene.begin(f"run-{number:05d}")
        told: set[str] = set()
        sizes = []
        for _ in range(10):
            feed.tick(scene.now_s)
            ((_, tick),) = await take(messages, "tick")
            sizes.append(len(tick["rows"]))
            told |= {row[views.ID] for row in tick["rows"]}
        assert max(sizes) <= ROWS_A_TICK
        assert len(told) == 1000


async def test_programs_that_the_table_forgets_are_told_as_gone():
    """Tombstones leave after a while."""
    scene = Scene()
    scene.fill(50)
    feed = feed_of(scene)
    async with feed.watching() as messages:
        await take(messages, "filled")
        scene.advance(3600)
        while scene.table.has_due(scene.now_s):
            scene.table.sweep(scene.now_s)
        left = {program.program_id for program in scene.table.programs()}
        assert len(left) < 50
        feed.tick(scene.now_s)
        ((_, tick),) = await take(messages, "tick")
        assert len(tick["gone"]) == 50 - len(left)
        assert not left & set(tick["gone"])


async def test_a_slow_viewer_is_sent_away_and_the_others_stay():
    """It owes some messages at most; all get the same bytes."""
    scene = Scene()
    feed = feed_of(scene)
    async with feed.watching() as slow, feed.watching() as quick:
        await take(slow, "filled")
        await take(quick, "filled")
        for _ in range(feeds.OWED_MAX + 1):
            feed.tick(scene.now_s)
            assert (await take(quick, "tick"))[0][0] == "tick"
        assert feed.viewers == 1
        assert len(await take(slow, "never")) <= feeds.OWED_MAX  # and then it ends


async def test_viewers_are_bounded():
    """One more than allowed is refused."""
    feed = feed_of(Scene())
    viewers = [feed.watching() for _ in range(feeds.VIEWERS_MAX)]
    for viewer in viewers:
        await viewer.__aenter__()
    assert feed.is_full
    with pytest.raises(TooManyViewers):
        await feed.watching().__aenter__()
    await viewers[0].__aexit__(None, None, None)
    assert not feed.is_full
    for viewer in viewers[1:]:
        await viewer.__aexit__(None, None, None)


async def test_without_viewers_nothing_is_held_but_the_queues():
    """The table notes nothing for the feed; the samples are bounded and go on."""
    scene = Scene()
    scene.fill(30)
    feed = feed_of(scene)
    for _ in range(feeds.SAMPLES_MAX + 5):
        scene.advance(1)
        feed.tick(scene.now_s)
    assert len(feed.samples) == feeds.SAMPLES_MAX
    assert scene.table.changes.watcher is None
    async with feed.watching() as messages:
        first = await take(messages, "filled")
        assert len(first[0][1]["samples"]) == feeds.SAMPLES_MAX
        assert scene.table.changes.watcher is not None
    assert scene.table.changes.watcher is None
    assert not scene.rows.held()


async def test_the_engines_step_rate_is_of_one_start():
    """A counter that begins again is no rate."""
    scene = Scene()
    feed = feed_of(scene)
    feed.tick(scene.now_s)
    assert feed.engines[0]["steps_per_s"] is None
    scene.clock.advance(2)
    scene.steps["e0"] += 50
    feed.tick(scene.now_s)
    assert feed.engines[0]["steps_per_s"] == 25.0
    scene.clock.advance(1)
    scene.steps["e0"] = 3
    feed.tick(scene.now_s)
    assert feed.engines[0]["steps_per_s"] == 0.0

"""``autellix top``: the screen, driven by Textual's pilot over a made-up feed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from autellix.errors import ConfigError
from autellix.server import views
from autellix.server.gateway.dashboard.feed import LiveFeed
from autellix.server.top import Top, engines_text
from autellix.server.top_table import ProgramTable
from tests.gateway.dashboard.scene import Scene, add_story

ROOT = Path(__file__).parents[2]


class Source:
    """A feed over a scene, without a server; it can go away and come back."""

    url = "http://127.0.0.1:18000"

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.feed = LiveFeed(scene.rows, scene.engine_views, scene.clock, {"policy": "plas"})
        for age_s in (2, 1, 0):
            scene.wander(1.0)
            self.feed.tick(scene.now_s - age_s)
        self.more = threading.Event()
        self.over = threading.Event()
        self.messages: list[tuple[str, Any]] = []
        self.away = ""

    def follow(self) -> Iterator[tuple[str, Any]]:
        """Yield all rows, then a tick whenever the test says so."""
        if self.away:
            raise ConfigError(self.away)
        yield "hello", json.loads(json.dumps(self.feed._hello(self.scene.now_s)))
        rows = [views.row_of(p, self.scene.now_s) for p in self.scene.table.programs()]
        yield "rows", rows
        yield "filled", {"rows": len(rows), "fairness": views.fairness(rows)}
        while not self.over.is_set():
            self.more.wait(10)
            self.more.clear()
            if self.away:
                raise OSError(self.away)
            yield from self.messages
            self.messages.clear()

    def tick(self) -> None:
        """Send all rows again as one tick."""
        now_s = self.scene.now_s
        rows = [views.row_of(p, now_s) for p in self.scene.table.programs()]
        sample = views.queue_sample(now_s, self.feed.engines, self.scene.table.in_flight)
        tick = {"now_s": now_s, "engines": self.feed.engines, "sample": sample, "rows": rows}
        self.messages.append(("tick", tick))
        self.more.set()

    def program(self, name: str) -> Any:
        """Return a program as the server does."""
        program = views.find_program(self.scene.table, name)
        assert program is not None
        assert self.scene.gateway.book is not None
        now_s = self.scene.now_s
        return {
            "now_s": now_s,
            "row": views.as_dict(views.row_of(program, now_s)),
            "program": program.view(now_s),
            "calls": [
                r.view(now_s) for r in self.scene.gateway.book.log.of_program(program.program_id)
            ],
        }


@pytest.fixture
def source() -> Iterator[Source]:
    """A scene with a story."""
    scene = Scene()
    scene.fill(80)
    add_story(scene)
    made = Source(scene)
    yield made
    made.over.set()
    made.more.set()


async def until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    """Wait until a condition holds, which the screen brings about."""
    async with asyncio.timeout(15):
        while not condition():
            await pilot.pause(0.02)


def head(app: Top) -> str:
    """Return what the head says."""
    return str(app.screen_stack[0].query_one("#head", Static).content)


async def test_programs_and_engines_are_shown(source: Source):
    """Sorted, filtered, opened and left by keys; a picture of each screen is kept."""
    app = Top(source)
    async with app.run_test(size=(118, 32)) as pilot:
        table = app.query_one(ProgramTable)
        await until(pilot, lambda: len(table.rows) == 81)
        assert "● live" in head(app)
        assert "81" in head(app)
        assert table.cursor == table.rows[0]["id"]
        assert table.rows[0]["name"] == "research_agent"
        await pilot.pause(0.3)  # the footer comes last
        keep(app, "top.svg")
        await pilot.press("s")
        services = [row["service_s"] for row in table.rows]
        assert services == sorted(services, reverse=True)
        await pilot.press("o")
        assert {row["state"] for row in table.rows} <= {"active", "tool_wait", "idle"}
        await pilot.press("o", "slash", *"dspy")
        await until(pilot, lambda: {row["framework"] for row in table.rows} == {"DSPy"})
        await pilot.press("enter", "escape")
        await until(pilot, lambda: len(table.rows) == 81)
        await pilot.press("l", "home", "enter")
        await until(pilot, lambda: len(app.screen_stack) == 2)
        page = app.screen.query_one("#program", Static)
        await until(pilot, lambda: str(page.content) != "loading")
        await pilot.pause(0.1)
        keep(app, "top-program.svg")
        await pilot.press("escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("q")
    source.over.set()
    source.more.set()


async def test_the_cursor_stays_on_its_program(source: Source):
    """While the order changes under it; the ends are ends."""
    app = Top(source)
    async with app.run_test(size=(100, 24)) as pilot:
        table = app.query_one(ProgramTable)
        await until(pilot, lambda: len(table.rows) == 81)
        await pilot.press("n", "end")
        assert table.cursor == table.rows[-1]["id"]
        assert table.scroll_offset.y > 0
        await pilot.press("down", "up", "up")
        chosen = table.cursor
        await pilot.press("w")
        assert table.cursor == chosen
        source.scene.program("late", "a late one")
        source.tick()
        await until(pilot, lambda: len(table.rows) == 82)
        assert table.cursor == chosen
        await pilot.press("home", "pagedown")
        assert table.cursor == table.rows[table.size.height - 2]["id"]


async def test_a_server_that_goes_away_is_waited_for(source: Source):
    """What was known stays; a refusal is said in the server's words."""
    app = Top(source)
    async with app.run_test(size=(110, 24)) as pilot:
        table = app.query_one(ProgramTable)
        await until(pilot, lambda: len(table.rows) == 81)
        source.away = "the server is away"
        source.more.set()
        await until(pilot, lambda: "reconnecting (the server is away" in head(app))
        assert len(table.rows) == 81
        source.away = ""
        await until(pilot, lambda: "● live" in head(app))


async def test_ten_thousand_rows_are_drawn_as_few(source: Source):
    """Only lines in sight are made."""
    app = Top(source)
    async with app.run_test(size=(110, 30)) as pilot:
        table = app.query_one(ProgramTable)
        await until(pilot, lambda: len(table.rows) == 81)
        row = table.rows[0]
        app.live.rows = {f"{i:032x}": {**row, "id": f"{i:032x}"} for i in range(10_000)}
        app.redraw()
        drawn: list[int] = []
        render = table.render_line

        def count(y: int) -> Any:
            drawn.append(y)
            return render(y)

        table.render_line = count  # type: ignore[method-assign]
        await pilot.press("end")
        await until(pilot, lambda: drawn)
        assert table.cursor == table.rows[9_999]["id"]
        assert len(drawn) < 500


def test_an_engine_that_tells_nothing_has_a_line(source: Source):
    """A stock engine elsewhere."""
    row = views.engine_row({"engine": "r0", "state": "ready", "calls": 2, "channel": None})
    row["steps_per_s"] = None
    assert "no channel" in engines_text([row]).plain


def keep(app: Top, name: str) -> None:
    """Keep a picture of the screen, in the documents as well if that is asked for."""
    folders = [ROOT / "out" / "screenshots"]
    if os.environ.get("AUTELLIX_SCREENSHOTS") == "docs":
        folders.append(ROOT / "docs" / "screenshots")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        picture = app.export_screenshot(title="autellix top")
        # without the fonts, which a viewer would fetch from somewhere
        picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        (folder / name).write_text(picture + "\n")

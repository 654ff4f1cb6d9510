"""``autellix top``: programs and engines of a running server, live in a terminal.

A thread follows the dashboard's feed and hands its messages to the screen; when the server goes
away, what was known stays in sight until it is back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from autellix.errors import ConfigError

from . import views_text
from .top_table import ProgramTable
from .views_client import LiveTable

RETRY_S: Final = (0.5, 1.0, 2.0, 4.0)
ASK_EVERY_S: Final = 1.0
_METER_CELLS: Final = 10
_SORTS: Final = {
    "l": "last", "s": "service", "w": "wait", "d": "slowdown", "c": "calls", "n": "name",
}  # fmt: skip
_HELP: Final = (
    "↑ ↓ move   Enter open   / filter   Esc back\n"
    "sort by  l last call   s service   w wait   d slowdown   c calls   n name\n"
    "o open programs only   q quit"
)


class Source(Protocol):
    """Where the figures come from: `AdminClient`."""

    url: str

    def follow(self) -> Iterator[tuple[str, Any]]:
        """Yield the feed's messages until it ends."""
        ...

    def program(self, name: str) -> Any:
        """Return one program."""
        ...


class Top(App[int]):
    """The screen with all programs."""

    TITLE = "autellix"
    CSS = """
    #head { height: auto; padding: 0 1; }
    #engines { height: auto; max-height: 8; padding: 0 1; color: $text-muted; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    #table { height: 1fr; padding: 0 1; overflow-x: hidden; }
    #program { padding: 1 2; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "clear", "clear", show=False),
        Binding("o", "only_open", "open only"),
        Binding("question_mark", "keys", "keys", key_display="?"),
        *(
            Binding(key, f"sort('{name}')", f"by {name}", show=False)
            for key, name in _SORTS.items()
        ),
    ]

    def __init__(self, source: Source, words: Sequence[str] = ()) -> None:
        super().__init__()
        self.source = source
        self.live = LiveTable()
        self.link = "connecting"
        self.sorted_by = "last"
        self.words = [word.lower() for word in words]
        self.is_open_only = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="top feed", daemon=True)

    def compose(self) -> ComposeResult:
        """Return the parts from top to bottom."""
        yield Static(id="head")
        yield Static(id="engines")
        yield Input(
            " ".join(self.words), placeholder="name, framework, state, engine or id", id="filter"
        )
        yield ProgramTable(id="table")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow."""
        self.query_one(ProgramTable).focus()
        self.redraw()
        self._thread.start()

    def on_unmount(self) -> None:
        """Follow no more; the thread ends with its next message, at the latest with its limit."""
        self._over.set()

    def _follow(self) -> None:
        """Read the feed until the screen is closed; runs in a thread."""
        tries = 0
        while not self._over.is_set():
            try:
                for event, data in self.source.follow():
                    if self._over.is_set():
                        return
                    tries = 0
                    self.call_from_thread(self.take, event, data)
                link = "the server ended the connection"
            except (ConfigError, OSError) as error:
                link = str(error)
            if not self._over.is_set():
                self.call_from_thread(self.lose, link)
            self._over.wait(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1

    def take(self, event: str, data: Any) -> None:
        """Take one message of the feed."""
        self.live.take(event, data)
        if event in ("filled", "tick"):
            self.link = "live"
            self.redraw()

    def lose(self, why: str) -> None:
        """The feed has ended: say so, and keep what is known."""
        self.link = f"reconnecting ({views_text.plain(why)[:80]})"
        self.redraw()

    def shown(self) -> list[dict[str, Any]]:
        """Return the rows to show, in their order."""
        rows = [row for row in self.live.rows.values() if views_text.matches(row, self.words)]
        if self.is_open_only:
            rows = [row for row in rows if row["state"] not in ("ended", "expired")]
        key, down = views_text.sort_key(self.sorted_by)
        return sorted(rows, key=key, reverse=down)

    def redraw(self) -> None:
        """Show what is known now."""
        base = self.screen_stack[0]
        rows = self.shown()
        base.query_one("#head", Static).update(self._head(len(rows)))
        base.query_one("#engines", Static).update(engines_text(self.live.engines))
        base.query_one(ProgramTable).show(rows, self.live.now_s)

    def _head(self, shown: int) -> Text:
        live, spread = self.live, self.live.fairness.get("percentiles") or {}
        _, in_flight, running, waiting, _ = live.sample
        style = "bold green" if self.link == "live" else "bold yellow"
        count = f"{shown} of {len(live.rows)}" if shown != len(live.rows) else f"{shown}"
        return Text.assemble(
            ("autellix ", "bold"), (f"{self.source.url}  ", "dim"), (f"● {self.link}", style),
            f"  policy {live.about.get('policy', views_text.DASH)}\n",
            ("programs ", "dim"), count, ("   calls ", "dim"), f"{in_flight} in flight, ",
            f"{running} running, {waiting} waiting", ("   slowdown ", "dim"),
            f"{views_text.factor(spread.get('50'))} median, ",
            f"{views_text.factor(spread.get('99'))} P99", ("   sorted by ", "dim"), self.sorted_by,
        )  # fmt: skip

    def action_sort(self, name: str) -> None:
        """Sort by a figure."""
        self.sorted_by = name
        self.redraw()

    def action_only_open(self) -> None:
        """Show or hide what is over."""
        self.is_open_only = not self.is_open_only
        self.redraw()

    def action_filter(self) -> None:
        """Type a filter."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_clear(self) -> None:
        """Leave the filter; a second time, forget it."""
        field = self.query_one("#filter", Input)
        if not field.has_focus:
            field.value = ""
        field.remove_class("shown")
        self.query_one(ProgramTable).focus()

    def action_keys(self) -> None:
        """Say which keys there are."""
        self.notify(_HELP, title="Keys", timeout=12)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as it is typed."""
        self.words = event.value.lower().split()
        self.redraw()

    def on_input_submitted(self) -> None:
        """Go to the table."""
        self.action_clear()

    def on_program_table_opened(self, message: ProgramTable.Opened) -> None:
        """Show one program."""
        self.push_screen(ProgramScreen(self.source, message.program_id))


class ProgramScreen(Screen[None]):
    """One program with its calls, asked for again each second."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "back"),
    ]

    def __init__(self, source: Source, program_id: str) -> None:
        super().__init__()
        self._source = source
        self._program_id = program_id

    def compose(self) -> ComposeResult:
        """Return the page."""
        with VerticalScroll():
            yield Static("loading", id="program")
        yield Footer()

    def on_mount(self) -> None:
        """Ask, and go on asking."""
        self._ask()
        self.set_interval(ASK_EVERY_S, self._ask)

    def _ask(self) -> None:
        self.run_worker(self._read, thread=True, exclusive=True, exit_on_error=False)

    def _read(self) -> None:
        page: Any
        try:
            page = views_text.program_page(
                self._source.program(self._program_id), self.size.width - 4
            )
        except (ConfigError, OSError) as error:
            page = Text(views_text.plain(error), style="yellow")
        if self.is_attached:
            self.app.call_from_thread(self._show, page)

    def _show(self, page: Any) -> None:
        if self.is_attached:
            self.query_one("#program", Static).update(page)


def engines_text(engines: Sequence[dict[str, Any]]) -> Text:
    """Return a line for each engine."""
    lines = []
    for engine in engines:
        slots, running = engine["slots"], engine["running"]
        load = running / slots if slots and running is not None else None
        calls = f"{running}/{slots} slots" if load is not None else f"{engine['calls']} calls"
        age_s = engine["heard_age_s"]
        lines.append(
            Text.assemble(
                (f"{views_text.plain(engine['engine']):6}", "bold"),
                (f"{engine['state']:9}", "green" if engine["state"] == "ready" else "yellow"),
                "load ",
                meter(load),
                f" {calls:12} ",
                "KV ",
                meter(engine["kv_use"]),
                f" {views_text.share(engine['kv_use']):>4}  ",
                f"hits {views_text.share(engine['hit_share']):>4}  ",
                f"{engine['waiting'] or 0:>3} waiting ",
                f"{engine['steps_per_s'] or 0:>5.0f} steps/s  ",
                "no channel" if age_s is None else f"heard {views_text.ago(age_s)}",
            )
        )
    return Text("\n").join(lines)


def meter(share: float | None) -> Text:
    """Return a share as a bar."""
    full = round(min(1.0, max(0.0, share or 0.0)) * _METER_CELLS)
    style = "red" if (share or 0) > 0.95 else "yellow" if (share or 0) > 0.8 else "green"
    return Text.assemble(("━" * full, style), ("━" * (_METER_CELLS - full), "bright_black"))

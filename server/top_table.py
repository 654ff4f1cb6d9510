"""The table of `autellix top`: any number of programs, of which only those in sight are drawn.

The cursor stays on its program while the order changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from .views_text import HEADS, cells_of

_GAP = 2
_HEAD_STYLE = Style(bold=True, color="bright_blue")
_DROPPED = ("framework", "engine", "level", "calls")  # in this order, where a terminal is narrow
_NAME_MIN = 12
_CURSOR = Style(reverse=True)


class ProgramTable(ScrollView, can_focus=True):
    """Rows of programs under a head; Enter opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "edge(0)", "first", show=False),
        Binding("end", "edge(1)", "last", show=False),
        Binding("enter", "open", "open"),
    ]

    class Opened(Message):
        """A program is to be shown."""

        def __init__(self, program_id: str) -> None:
            super().__init__()
            self.program_id = program_id

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: Sequence[Mapping[str, Any]] = ()
        self.cursor: str | None = None
        self._now_s = 0.0
        self._at: dict[str, int] = {}

    def show(self, rows: Sequence[Mapping[str, Any]], now_s: float) -> None:
        """Show these rows, in this order."""
        self.rows, self._now_s = rows, now_s
        self._at = {row["id"]: index for index, row in enumerate(rows)}
        if self.cursor not in self._at:
            self.cursor = rows[0]["id"] if rows else None
        self.virtual_size = Size(1, len(rows) + 1)
        self.refresh()

    def _widths(self) -> list[int]:
        """Return the columns' widths, 0: not shown; the name takes what is left."""
        room = self.scrollable_content_region.width
        widths = {head: width for head, width, _ in HEADS}
        widths["program"] = _NAME_MIN
        for head in _DROPPED:
            if sum(widths.values()) + _GAP * len(widths) > room:
                del widths[head]
        widths["program"] += max(0, room - sum(widths.values()) - _GAP * (len(widths) - 1))
        return [widths.get(head, 0) for head, _, _ in HEADS]

    def render_line(self, y: int) -> Strip:
        """Return one line: the head, a row, or nothing."""
        width = self.size.width
        if y == 0:
            heads = [Text(head, style=_HEAD_STYLE) for head, _, _ in HEADS]
            return self._line(heads, Style(), width)
        index = self.scroll_offset.y + y - 1
        if index >= len(self.rows):
            return Strip.blank(width, self.rich_style)
        row = self.rows[index]
        is_cursor = row["id"] == self.cursor and self.has_focus
        return self._line(cells_of(row, self._now_s), _CURSOR if is_cursor else Style(), width)

    def _line(self, cells: Sequence[Text], over: Style, width: int) -> Strip:
        segments = []
        base = self.rich_style + over
        for cell, (_, _, is_number), size in zip(cells, HEADS, self._widths(), strict=True):
            if not size:
                continue
            text = cell.plain
            pad = max(0, size - cell_len(text))
            text = " " * pad + text if is_number and pad else set_cell_size(text, size)
            style = cell.style if isinstance(cell.style, Style) else Style.parse(cell.style)
            segments += [Segment(text, base + style), Segment(" " * _GAP, base)]
        return Strip(segments).adjust_cell_length(width, base)

    def action_move(self, by: int) -> None:
        """Move the cursor by some rows."""
        if self.rows:
            index = self._at.get(self.cursor or "", 0) + by
            self._go(max(0, min(len(self.rows) - 1, index)))

    def action_page(self, by: int) -> None:
        """Move the cursor by a page."""
        self.action_move(by * max(1, self.size.height - 2))

    def action_edge(self, last: int) -> None:
        """Move the cursor to the first or last row."""
        self.action_move(len(self.rows) if last else -len(self.rows))

    def action_open(self) -> None:
        """Open the program under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Opened(self.cursor))

    def on_click(self, event: Click) -> None:
        """A first click moves the cursor, one on the cursor opens."""
        index = self.scroll_offset.y + event.y - 1
        if event.y == 0 or not 0 <= index < len(self.rows):
            return
        if self.rows[index]["id"] == self.cursor:
            self.action_open()
        else:
            self._go(index)

    def _go(self, index: int) -> None:
        self.cursor = self.rows[index]["id"]
        # one line more than the row's, since the head covers the first one
        self.scroll_to_region(Region(0, index, 1, 2), animate=False)
        self.refresh()

"""Programs as text for terminals: numbers as people read them, tables, and a call's life as a bar.

What a program calls itself goes to the terminal without its control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

DASH: Final = "–"  # noqa: RUF001 (as on the dashboard)
BAR_CELLS: Final = 44
CALL_CELLS: Final = 84  # of a line of a call, its bar left out
STATE_STYLES: Final = {
    "active": "bold green", "tool_wait": "blue", "idle": "default", "draining": "yellow",
    "ended": "dim", "expired": "magenta",
}  # fmt: skip
PHASES: Final = {  # what a call does → (how it is drawn, its style)
    "gateway": ("░", "bright_black"), "queued": ("▒", "yellow"), "running": ("█", "green"),
    "preempted": ("▓", "red"), "swapped": ("▚", "magenta"), "engine": ("█", "blue"),
    "answering": ("░", "cyan"),
}  # fmt: skip
SORTS: Final = ("last", "name", "state", "calls", "service", "wait", "slowdown", "level", "tokens")


def plain(text: object) -> str:
    """Return a text without what a terminal would obey."""
    return "".join(c if c.isprintable() else "·" for c in str(text))


def seconds(value: float | None) -> str:
    """Return a duration.

    >>> seconds(0.25), seconds(12.345), seconds(75), seconds(None)
    ('250 ms', '12.3 s', '1m 15s', '–')
    """
    if value is None:
        return DASH
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    if value < 3600:
        return f"{value // 60:.0f}m {value % 60:02.0f}s"
    return f"{value // 3600:.0f}h {value % 3600 // 60:02.0f}m"


def ago(value: float) -> str:
    """Return how long ago something was."""
    if value < 1.5:
        return "now"
    if value < 60:
        return f"{value:.0f} s"
    return f"{value // 60:.0f} min" if value < 3600 else f"{value // 3600:.0f} h"


def factor(value: float | None) -> str:
    """Return a slowdown."""
    return DASH if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def share(value: float | None) -> str:
    """Return a share in per cent."""
    return DASH if value is None else f"{value:.0%}"


def level(value: int | None) -> str:
    """Return a level."""
    return DASH if value is None else str(value)


def sort_key(name: str) -> tuple[Callable[[Mapping[str, Any]], Any], bool]:
    """Return (the key of a row, whether the largest comes first); unknown figures come last."""
    if name == "last":
        return lambda row: (row["in_flight"] > 0, row["last_s"]), True
    if name in ("name", "state"):
        return lambda row: (plain(row[name]).lower(), row["id"]), False
    field = {"service": "service_s", "wait": "wait_s"}.get(name, name)
    return lambda row: (-1 if row[field] is None else row[field], row["last_s"]), True


def matches(row: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Return whether all words occur in what a row is known by."""
    if not words:
        return True
    text = " ".join(
        str(row[field] or "") for field in ("name", "framework", "state", "engine", "id")
    )
    text = text.lower()
    return all(word in text for word in words)


def cells_of(row: Mapping[str, Any], now_s: float) -> tuple[Text, ...]:
    """Return a row's cells in the order of `HEADS`."""
    style = STATE_STYLES.get(row["state"], "default")
    quiet = "dim" if row["state"] in ("ended", "expired") else ""
    calls = f"{row['calls']}" + (f" +{row['in_flight']}" if row["in_flight"] else "")
    wait = DASH if row["slowdown"] is None else seconds(row["wait_s"])
    last = "now" if row["in_flight"] else ago(now_s - row["last_s"])
    heat = row["slowdown"] or 0
    return (
        Text(plain(row["name"]), style=quiet or "bold"),
        Text(plain(row["framework"] or DASH), style=quiet),
        Text(row["state"].replace("_", " "), style=style),
        Text(level(row["level"]), style=quiet),
        Text(calls, style=quiet),
        Text(seconds(row["service_s"]), style=quiet),
        Text(wait, style=quiet),
        Text(plain(row["engine"] or DASH), style=quiet),
        Text(
            factor(row["slowdown"]), style="red" if heat >= 6 else "yellow" if heat >= 2 else quiet
        ),
        Text(last, style=quiet),
    )


#: The columns of a table of programs: (head, least width, whether it is a number).
HEADS: Final = (
    ("program", 22, False), ("framework", 13, False), ("state", 9, False), ("level", 5, True),
    ("calls", 7, True), ("service", 8, True), ("wait", 8, True), ("engine", 6, False),
    ("slowdown", 8, True), ("last", 6, True),
)  # fmt: skip


def programs_table(rows: Sequence[Mapping[str, Any]], now_s: float, total: int) -> RenderableType:
    """Return programs as a table."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for head, width, is_number in HEADS:
        table.add_column(
            head, justify="right" if is_number else "left", no_wrap=True, min_width=min(width, 9)
        )
    table.add_column("id", no_wrap=True, style="dim")
    for row in rows:
        table.add_row(*cells_of(row, now_s), row["id"][:8])
    return Group(table, Text(f"{len(rows)} of {total} programs", style="dim"))


def program_page(known: Mapping[str, Any], width: int) -> RenderableType:
    """Return one program: its figures, and its calls with a bar of what each did.

    Args:
        known: What the server says of it.
        width: Of the terminal; the bars take what is left of it.
    """
    row, program, calls = known["row"], known["program"], known["calls"]
    head = Text.assemble(
        (plain(row["name"]), "bold"), "  ",
        (row["state"].replace("_", " "), STATE_STYLES.get(row["state"], "")), "  ",
        (f"{plain(row['framework'] or '')}  {row['id']}", "dim"),
    )  # fmt: skip
    figures = (
        ("response", seconds(program["response_s"])), ("service", seconds(row["service_s"])),
        ("wait", DASH if row["slowdown"] is None else seconds(row["wait_s"])),
        ("slowdown", factor(row["slowdown"])), ("level", level(row["level"])),
        ("calls", f"{row['calls']}, {row['in_flight']} in flight"),
        ("threads", str(row["threads"])), ("tokens", str(row["tokens"])),
        ("preemptions", str(row["preemptions"])), ("swaps", str(row["swaps"])),
    )  # fmt: skip
    line = Text("   ").join(Text.assemble((f"{name} ", "dim"), value) for name, value in figures)
    if not calls:
        return Group(head, line, Text("Its calls are no longer remembered.", style="dim"))
    bar_cells = max(12, min(BAR_CELLS * 2, width - CALL_CELLS))
    return Group(head, line, calls_table(calls, known["now_s"], bar_cells), legend())


def calls_table(calls: Sequence[Mapping[str, Any]], now_s: float, bar_cells: int) -> Table:
    """Return calls, oldest first, each with a bar of so many cells on a common scale."""
    begin_s = min(call["begun_s"] for call in calls)
    end_s = max(now_s if call["ended_s"] is None else call["ended_s"] for call in calls)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for name, size, is_number in (
        ("call", 5, False), ("node", 10, False), ("after", 14, False), ("engine", 6, False),
        ("level", 5, True), ("took", 7, True), ("wait", 7, True), ("state", 12, False),
    ):  # fmt: skip
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True, width=size)
    table.add_column(
        f"0 … {seconds(end_s - begin_s)}", no_wrap=True, overflow="crop", width=bar_cells
    )
    for call in calls:
        parents = " ".join(f"{thread}.{seq}" for thread, seq in call["parents"])
        state = "running" if call["ended_s"] is None else plain(call["outcome"] or call["status"])
        failed = call["ended_s"] is not None and (call["status"] or 500) >= 400
        table.add_row(
            f"{call['thread']}.{call['seq']}",
            Text(plain(call["node"] or DASH)),
            parents or DASH,
            call["engine"] or DASH,
            level(call["level"]),
            seconds(call["took_s"]),
            seconds(call["wait_s"]),
            Text(state, style="red" if failed else ""),
            bar_of(call, begin_s, end_s, bar_cells),
        )
    return table


def bar_of(call: Mapping[str, Any], begin_s: float, end_s: float, size: int) -> Text:
    """Return what a call did as a bar; of two phases in one cell the longer one is drawn."""
    scale = size / max(end_s - begin_s, 1e-6)
    cells: list[tuple[float, str]] = [(0.0, "")] * size
    for stretch in call["intervals"]:
        start, end = ((stretch[at] - begin_s) * scale for at in ("start_s", "end_s"))
        for cell in range(max(0, int(start)), min(size, int(end) + 1)):
            covered = min(end, cell + 1) - max(start, cell)
            if covered > cells[cell][0]:
                cells[cell] = (covered, stretch["state"])
    bar = Text()
    for _, state in cells:
        glyph, style = PHASES.get(state, (" ", ""))
        bar.append(glyph, style)
    return bar


def legend() -> Text:
    """Return what the bars' glyphs mean."""
    text = Text()
    for state, (glyph, style) in PHASES.items():
        text.append(f"{glyph}{glyph} ", style)
        text.append(f"{state}   ", "dim")
    return text

"""Traces from what really ran: rows of calls become programs in the shipped form.

A row is one call: who made it, when it began and ended, and token counts. No text is read and none
is written. Parents are found from times: a call follows the calls of its thread, and the first call
of a thread follows whatever of the program had ended when it began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .trace import Call, Program, TraceError

CALLS_MAX = 100_000  # of one program


class Row(NamedTuple):
    """One call that ran."""

    program: str
    thread: str
    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int


def read_rows(lines: Iterable[str], file: str) -> Iterator[Row]:
    """Yield rows from JSON Lines with the fields of ``Row``; other fields are passed over.

    Raises:
        TraceError: a line is wrong; file, line number and reason.
    """
    kinds = {"program": str, "thread": str, "start_s": float, "end_s": float}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            row = Row(*(kinds.get(name, int)(values[name]) for name in Row._fields))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{file}:{number}: no call: {error!r}") from None
        if row.end_s < row.start_s or min(row.prompt_tokens, row.output_tokens) < 1:
            raise TraceError(f"{file}:{number}: ends before it starts, or has no tokens")
        yield row


def programs(rows: Iterable[Row], source: str, kind: str = "react") -> list[Program]:
    """Return the programs that rows belong to, in order of arrival.

    Args:
        rows: In any order.
        source: What the trace says it comes from.
        kind: One of ``trace.KINDS``.

    Raises:
        TraceError: a program has more calls than is sensible.
    """
    by_program: dict[str, list[Row]] = {}
    for row in rows:
        calls = by_program.setdefault(row.program, [])
        if len(calls) >= CALLS_MAX:
            raise TraceError(f"program {row.program!r} has more than {CALLS_MAX} calls")
        calls.append(row)
    if not by_program:
        return []
    zero_s = min(row.start_s for calls in by_program.values() for row in calls)
    found = [
        _program(f"p{number:05d}", sorted(calls, key=lambda r: (r.start_s, r.end_s)), zero_s,
                 source, kind)
        for number, calls in enumerate(by_program.values())
    ]  # fmt: skip
    return sorted(found, key=lambda p: (p.arrival_s or 0.0, p.name))


def _program(name: str, rows: list[Row], zero_s: float, source: str, kind: str) -> Program:
    last_of: dict[str, int] = {}
    calls: list[Call] = []
    threads = {thread: f"t{n}" for n, thread in enumerate(dict.fromkeys(r.thread for r in rows))}
    for number, row in enumerate(rows):
        parents = _parents(number, row, rows, last_of)
        source_call = max(parents, default=None)
        ended_s = max((rows[parent].end_s for parent in parents), default=row.start_s)
        shared = min(row.hit_tokens, row.prompt_tokens) if source_call is not None else 0
        calls.append(
            Call(
                id=number,
                parents=parents,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                cached_prefix_of=source_call,
                prefix_tokens=shared,
                tool_s=round(row.start_s - ended_s, 3),
                interrupt="tool" if parents else None,
                role=None,
                thread=threads[row.thread] if len(threads) > 1 else None,
            )
        )
        last_of[row.thread] = number
    return Program(
        name=name,
        source=source,
        kind=kind,
        arrival_s=round(rows[0].start_s - zero_s, 3),
        shared_prefix=None,
        role_prefixes={},
        calls=tuple(calls),
    )


def _parents(number: int, row: Row, rows: list[Row], last_of: Mapping[str, int]) -> tuple[int, ...]:
    """Return the calls that this one had to wait for: those over by then that nothing follows."""
    own = last_of.get(row.thread)
    if own is not None and rows[own].end_s <= row.start_s:
        return (own,)
    over = [k for k in range(number) if rows[k].end_s <= row.start_s]
    if not over:
        return ()
    latest: dict[str, int] = {}
    for k in over:
        latest[rows[k].thread] = k
    return tuple(sorted(latest.values()))


def to_row(values: Mapping[str, Any]) -> str:
    """Return one call as a line that ``read_rows`` reads."""
    return json.dumps({name: values[name] for name in Row._fields}, separators=(",", ":"))

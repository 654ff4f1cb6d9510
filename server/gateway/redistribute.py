"""The journals of several gateway processes: each has its own, and rows that move between them.

A program is journalled by the process that owns it, and another number of processes gives it
another owner. So before any of them starts, rows are put where they belong.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autellix.errors import ConfigError

from ..ownership import COUNT_MAX, owner_of_response, owner_of_session
from .backend import MEMORY, REDIS_SCHEMES
from .journal import age_of, open_file


def part_of(state: str, index: int) -> str:
    """Return where one of several processes keeps its state.

    >>> part_of("run.sqlite", 0), part_of("run.sqlite", 1), part_of(":memory:", 1)
    ('run.sqlite', 'run.sqlite.1', ':memory:')
    """
    return state if not index or state in ("", MEMORY) else f"{state}.{index}"


def redistribute(state: str, count: int) -> int:
    """Put every journalled row into the file of its owner; return how many have moved.

    Args:
        state: The file of the first process, and the first part of the others' names.
        count: How many processes there are now.

    Raises:
        ConfigError: a file cannot be written, or a gateway has it.
    """
    if state in ("", MEMORY) or state.startswith(REDIS_SCHEMES):
        return 0
    there = [n for n in range(1, COUNT_MAX) if Path(part_of(state, n)).exists()]
    if not there and count == 1:
        return 0
    files: dict[int, sqlite3.Connection] = {}
    try:
        for index in sorted({*range(count), *there}):
            files[index] = open_file(Path(part_of(state, index)))
        moved = sum(_move(files, index, count) for index in files)
    except sqlite3.Error as error:
        raise ConfigError(
            f"state: {state!r} is not allowed ({error}); allowed is a file that can be written, "
            "and others beside it, that no other gateway uses"
        ) from error
    finally:
        for db in files.values():
            db.close()
    for index in there:
        if index >= count:
            for suffix in ("", "-wal", "-shm"):
                Path(part_of(state, index) + suffix).unlink(missing_ok=True)
    return moved


def _move(files: Mapping[int, sqlite3.Connection], index: int, count: int) -> int:
    """Move what is another's out of one file; it is in both for a moment, never in none."""
    moved = 0
    for table, key in (("programs", "program_id"), ("responses", "response_id")):
        cursor = files[index].execute(f"SELECT * FROM {table}")
        columns = [each[0] for each in cursor.description]
        rows: dict[int, list[dict[str, Any]]] = {}
        for values in cursor:
            row = dict(zip(columns, values, strict=True))
            owner = _owner_of(row, count)
            if owner != index:
                rows.setdefault(owner, []).append(row)
        for owner, some in rows.items():
            names = ",".join(columns)
            marks = ",".join(f":{name}" for name in columns)
            age_s = age_of(files[owner])  # of its own: it is forgotten by that
            with files[owner] as db:
                db.executemany(
                    f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})",
                    [{**row, "changed_s": age_s} for row in some],
                )
            with files[index] as db:
                db.executemany(f"DELETE FROM {table} WHERE {key} = ?", [(r[key],) for r in some])
            moved += len(some)
    return moved


def _owner_of(row: Mapping[str, Any], count: int) -> int:
    if "response_id" in row:
        return owner_of_response(row["response_id"], count) or 0
    return owner_of_session(row["scope"], row["session"], count)

"""The journal: what must outlive the gateway, in one SQLite file.

Twice a second the programs and the homes of stored responses that have changed are written in one
transaction, by a thread, so that no request waits for a disk. What a crash can lose is what came
after the last transaction: less than a second of service. Service of calls in flight is written as
it grows. Single calls are not kept, nor are untagged programs, which end with their call.

Rows are forgotten by the journal's own age, the seconds that gateways have had it open: a wall
clock that jumps makes it forget nothing, and neither does a long stop.

A disk that is full or locked is logged once and tried again; nothing but memory of the past depends
on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from autellix.errors import ConfigError

from ..accounts import Charged
from ..clock import Clock
from ..process_table import TOMBSTONE_S, ProcessTable
from ..program import Program
from ..types import EngineAddress
from .record import more_of, remembered, take_more
from .responses import HOMES_MAX, ResponseHome, ResponseHomes

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.4
KEEP_OPEN_S: Final = 86_400.0
BUSY_S: Final = 1.0
ROWS_AT_ONCE: Final = 64  # made before calls may go on; a row takes some 10 µs

_SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS programs (
  program_id TEXT PRIMARY KEY, scope TEXT NOT NULL, session TEXT NOT NULL, name TEXT NOT NULL,
  service_s REAL NOT NULL, wait_s REAL NOT NULL, calls INTEGER NOT NULL, home TEXT,
  conversation TEXT, parent_session TEXT, arrival_unix_s REAL NOT NULL,
  ended_unix_s REAL, reason TEXT, expired INTEGER NOT NULL, changed_s REAL NOT NULL,
  more TEXT, path_s REAL, wait_path_s REAL
) WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS responses (
  response_id TEXT PRIMARY KEY, engine_id TEXT NOT NULL, address TEXT NOT NULL, scope TEXT NOT NULL,
  session TEXT, changed_s REAL NOT NULL
) WITHOUT ROWID
""",
)
# columns by name: a file of a later version has more of them
_WRITE: Final = (
    "INSERT OR REPLACE INTO programs (program_id, scope, session, name, service_s, wait_s, calls,"
    " home, conversation, parent_session, arrival_unix_s, ended_unix_s, reason, expired, changed_s,"
    " more, path_s, wait_path_s) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_WRITE_HOME: Final = (
    "INSERT OR REPLACE INTO responses (response_id, engine_id, address, scope, session, changed_s)"
    " VALUES (?,?,?,?,?,?)"
)
_FORGET: Final = (
    "DELETE FROM programs WHERE changed_s < CASE WHEN expired OR ended_unix_s IS NOT NULL "
    "THEN ? ELSE ? END"
)
_FORGET_HOMES: Final = "DELETE FROM responses WHERE changed_s < ?"

_Row = tuple[Any, ...]


class Journal:
    """One open journal, which belongs to one gateway alone; it runs on the event loop."""

    def __init__(
        self, path: Path, table: ProcessTable, clock: Clock, homes: ResponseHomes | None = None
    ) -> None:
        """Open the file, made if it is new.

        Raises:
            ConfigError: it cannot be written, or another gateway has it.
        """
        self._table = table
        self._homes = homes if homes is not None else ResponseHomes()
        self._homes.watch()
        self._clock = clock
        self._failing = False
        self._lock = threading.Lock()
        try:
            self._db = open_file(path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"state: {str(path)!r} is not allowed ({error}); allowed is a file that can be "
                "written and that no other gateway uses"
            ) from error
        self._begun_s = clock.now_s() - age_of(self._db)

    async def restore(self) -> int:
        """Put what is journalled into the table; return how many programs."""
        now_s, unix_s = self._clock.now_s(), self._clock.unix_s()
        rows = self._db.execute(
            "SELECT program_id, scope, session, name, service_s, wait_s, calls, home, conversation,"
            " parent_session, arrival_unix_s, ended_unix_s, reason, expired, more, path_s,"
            " wait_path_s FROM programs ORDER BY changed_s"
        )
        count = sum(self._restore_one(row, now_s, unix_s) for row in rows)
        homes = self._db.execute(
            "SELECT response_id, engine_id, address, scope, session FROM responses"
            " ORDER BY changed_s DESC LIMIT ?",
            (HOMES_MAX,),
        ).fetchall()
        for response_id, engine_id, address, scope, session in reversed(homes):
            home = ResponseHome(engine_id, EngineAddress(*orjson.loads(address)), scope, session)
            self._homes.put(response_id, home, is_news=False)
        return count

    def _restore_one(self, row: Sequence[Any], now_s: float, unix_s: float) -> bool:
        (program_id, scope, session, name, service_s, wait_s, calls, home, conversation,
         parent_session, arrival_unix_s, ended_unix_s, reason, expired, more, path_s,
         wait_path_s) = row  # fmt: skip
        program = remembered(
            program_id=program_id, scope=scope, session=session, name=name,
            age_s=unix_s - arrival_unix_s, now_s=now_s,
        )  # fmt: skip
        program.conversation, program.parent_session = conversation, parent_session
        if ended_unix_s is not None:
            program.ended_s, program.end_reason = now_s, reason
        program.expired = bool(expired)
        program.calls_begun = program.calls_ended = calls  # those in flight ended with the gateway
        program.wait_s, program.home = wait_s, home
        take_more(program, more)
        if path_s is None:  # a file from before both measures were kept: it had the policy's own
            path_s, wait_path_s = (service_s if self._table.accounting == "atlas" else 0.0), 0.0
        return self._table.restore(program, Charged(service_s, path_s, wait_path_s), now_s)

    async def run(self) -> None:
        """Write what changes until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what has changed."""
        now_s, unix_s = self._clock.now_s(), self._clock.unix_s()
        age_s = now_s - self._begun_s
        changed = [pair for pair in self._table.take_changed(now_s) if pair[0].session is not None]
        homes = [
            (i, h.engine_id, orjson.dumps(tuple(h.address)), h.scope, h.program_session, age_s)
            for i, h in self._homes.take_changed()
        ]
        try:
            rows: list[_Row] = []
            for program, charged in changed:
                rows.append(self._row(program, charged, now_s, unix_s, age_s))
                if len(rows) % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # calls go on in between
            await asyncio.to_thread(self._write, rows, homes, age_s)
        except asyncio.CancelledError:
            self._put_back(changed, homes)  # written twice is no harm
            raise
        except sqlite3.Error as error:
            self._put_back(changed, homes)
            if not self._failing:
                _log.warning("the journal cannot be written, trying on: %s", error)
            self._failing = True
        else:
            if self._failing:
                _log.info("the journal can be written again")
            self._failing = False

    def _put_back(self, changed: Sequence[tuple[Program, Charged]], homes: Sequence[_Row]) -> None:
        self._table.put_back(program for program, _ in changed)
        self._homes.put_back(home[0] for home in homes)

    async def close(self) -> None:
        """Close the file; what has changed since the last `flush` is lost."""
        with self._lock:
            self._db.close()

    def _write(self, rows: list[_Row], homes: list[_Row], age_s: float) -> None:
        # the lock: a write goes on in its thread when the task that waits for it is cancelled
        with self._lock, self._db:  # commits, or rolls back
            self._db.executemany(_WRITE, rows)
            self._db.executemany(_WRITE_HOME, homes)
            self._db.execute(_FORGET, (age_s - TOMBSTONE_S, age_s - KEEP_OPEN_S))
            self._db.execute(_FORGET_HOMES, (age_s - KEEP_OPEN_S,))

    @staticmethod
    def _row(program: Program, charged: Charged, now_s: float, unix_s: float, age_s: float) -> _Row:
        ended_s = program.ended_s
        return (
            program.program_id, program.scope, program.session, program.name, charged.sum_s,
            program.wait_s, program.calls_begun, program.home, program.conversation,
            program.parent_session, unix_s - (now_s - program.arrival_s),
            None if ended_s is None else unix_s - (now_s - ended_s), program.end_reason,
            int(program.expired), age_s, more_of(program), charged.path_s, charged.wait_path_s,
        )  # fmt: skip


def open_file(path: Path) -> sqlite3.Connection:
    """Return the file, made if it is new, for this gateway alone.

    Raises:
        sqlite3.Error: it cannot be written, or another gateway has it.
    """
    with contextlib.suppress(OSError):  # sqlite says better what is wrong
        path.touch(mode=0o600)  # it names sessions
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        # two gateways would overwrite each other's figures
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")  # safe against kill -9 of this process
        with db:
            for statement in _SCHEMA:
                db.execute(statement)
            for column, kind in (("more", "TEXT"), ("path_s", "REAL"), ("wait_path_s", "REAL")):
                if column not in _columns(db, "programs"):  # a file of an earlier version
                    db.execute(f"ALTER TABLE programs ADD COLUMN {column} {kind}")
            for table in ("programs", "responses"):
                if "changed_unix_s" in _columns(db, table):  # stamped by the wall clock
                    db.execute(f"UPDATE {table} SET changed_unix_s = 0")
                    db.execute(f"ALTER TABLE {table} RENAME COLUMN changed_unix_s TO changed_s")
            db.execute(_FORGET, (0.0, 0.0))  # a write takes the lock now
    except sqlite3.Error:
        db.close()
        raise
    return db


def _columns(db: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in db.execute(f"PRAGMA table_info({table})")}


def age_of(db: sqlite3.Connection) -> float:
    """Return the journal's age when it was written last."""
    stamps = "SELECT changed_s FROM programs UNION ALL SELECT changed_s FROM responses"
    newest: float | None = db.execute(f"SELECT max(changed_s) FROM ({stamps})").fetchone()[0]
    return newest or 0.0

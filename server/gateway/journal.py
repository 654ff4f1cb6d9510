"""The journal: what must outlive the gateway, in one SQLite file.

Twice a second the programs that have changed are written in one transaction, by a thread, so that
no request waits for a disk. What a crash can lose is what came after the last transaction: less
than a second of service. Service of calls in flight is written as it grows. Threads and single
calls are not kept, nor are untagged programs, which end with their call.

A disk that is full or locked is logged once and tried again; nothing but memory of the past depends
on it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from autellix.errors import ConfigError

from ..accounts import SumAccount
from ..clock import Clock
from ..process_table import TOMBSTONE_S, ProcessTable
from ..program import Program

_log = logging.getLogger(__name__)

PERIOD_S: Final = 0.4
KEEP_OPEN_S: Final = 86_400.0
BUSY_S: Final = 1.0

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS programs (
  program_id TEXT PRIMARY KEY, scope TEXT NOT NULL, session TEXT NOT NULL, name TEXT NOT NULL,
  service_s REAL NOT NULL, wait_s REAL NOT NULL, calls INTEGER NOT NULL, home TEXT,
  conversation TEXT, parent_session TEXT, arrival_unix_s REAL NOT NULL,
  ended_unix_s REAL, reason TEXT, expired INTEGER NOT NULL, changed_unix_s REAL NOT NULL
) WITHOUT ROWID
"""
_WRITE: Final = "INSERT OR REPLACE INTO programs VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
_FORGET: Final = (
    "DELETE FROM programs WHERE changed_unix_s < CASE WHEN expired OR ended_unix_s IS NOT NULL "
    "THEN ? ELSE ? END"
)


class Journal:
    """One open journal, which belongs to one gateway alone; it runs on the event loop."""

    def __init__(self, path: Path, table: ProcessTable, clock: Clock) -> None:
        """Open the file, made if it is new.

        Raises:
            ConfigError: it cannot be written, or another gateway has it.
        """
        self._table = table
        self._clock = clock
        self._failing = False
        self._lock = threading.Lock()
        try:
            self._db = _open(path)
        except sqlite3.Error as error:
            raise ConfigError(
                f"state: {str(path)!r} is not allowed ({error}); allowed is a file that can be "
                "written and that no other gateway uses"
            ) from error

    def restore(self) -> int:
        """Put the journalled programs into the table; return how many."""
        now_s, unix_s = self._clock.now_s(), self._clock.unix_s()
        rows = self._db.execute(
            "SELECT program_id, scope, session, name, service_s, wait_s, calls, home, conversation,"
            " parent_session, arrival_unix_s, ended_unix_s, reason, expired FROM programs"
            " ORDER BY changed_unix_s"
        )
        return sum(self._restore_one(row, now_s, unix_s) for row in rows)

    def _restore_one(self, row: Sequence[Any], now_s: float, unix_s: float) -> bool:
        (program_id, scope, session, name, service_s, wait_s, calls, home, conversation,
         parent_session, arrival_unix_s, ended_unix_s, reason, expired) = row  # fmt: skip
        # a wall clock may have jumped: an age is never negative
        age_s = max(0.0, unix_s - arrival_unix_s)
        program = Program(
            program_id=program_id,
            scope=scope,
            session=session,
            name=name,
            arrival_s=now_s - age_s,
            account=SumAccount(),  # the table puts its own in
            lease_until_s=now_s,
            last_call_s=now_s,
            conversation=conversation,
            parent_session=parent_session,
            ended_s=now_s if ended_unix_s is not None else None,
            end_reason=reason,
            expired=bool(expired),
            calls_begun=calls,
            calls_ended=calls,  # calls in flight at the crash have ended with it
            wait_s=wait_s,
            home=home,
        )
        return self._table.restore(program, service_s, now_s)

    async def run(self) -> None:
        """Write what changes until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what has changed."""
        now_s, unix_s = self._clock.now_s(), self._clock.unix_s()
        changed = [pair for pair in self._table.take_changed(now_s) if pair[0].session is not None]
        rows = [self._row(program, service_s, now_s, unix_s) for program, service_s in changed]
        try:
            await asyncio.to_thread(self._write, rows, unix_s)
        except sqlite3.Error as error:
            self._table.put_back(program for program, _ in changed)
            if not self._failing:
                _log.warning("the journal cannot be written, trying on: %s", error)
            self._failing = True
        else:
            if self._failing:
                _log.info("the journal can be written again")
            self._failing = False

    def close(self) -> None:
        """Close the file; what has changed since the last `flush` is lost."""
        self._db.close()

    def _write(self, rows: list[tuple[Any, ...]], unix_s: float) -> None:
        # the lock: a write goes on in its thread when the task that waits for it is cancelled
        with self._lock, self._db:  # commits, or rolls back
            self._db.executemany(_WRITE, rows)
            self._db.execute(_FORGET, (unix_s - TOMBSTONE_S, unix_s - KEEP_OPEN_S))

    @staticmethod
    def _row(program: Program, service_s: float, now_s: float, unix_s: float) -> tuple[Any, ...]:
        ended_s = program.ended_s
        return (
            program.program_id, program.scope, program.session, program.name, service_s,
            program.wait_s, program.calls_begun, program.home, program.conversation,
            program.parent_session, unix_s - (now_s - program.arrival_s),
            None if ended_s is None else unix_s - (now_s - ended_s), program.end_reason,
            int(program.expired), unix_s,
        )  # fmt: skip


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        # two gateways would overwrite each other's figures
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")  # safe against kill -9 of this process
        with db:
            db.execute(_SCHEMA)
            db.execute(_FORGET, (0.0, 0.0))  # a write takes the lock now
    except sqlite3.Error:
        db.close()
        raise
    return db

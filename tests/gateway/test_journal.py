"""The journal: what outlives a gateway, however it ends."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autellix.errors import ConfigError
from autellix.server.clock import ManualClock, SystemClock
from autellix.server.gateway.journal import Journal
from autellix.server.process_table import TOMBSTONE_S, ProcessTable, program_id_of
from autellix.server.program import Arrival, ProgramState

from .conftest import running

ROOT = Path(__file__).parents[2]


def read_back(path: Path) -> ProcessTable:
    """Return a fresh table with what is in a journal."""
    clock = SystemClock()
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    journal.restore()
    journal.close()
    assert table.check_integrity() == []
    return table


async def test_sessions_are_back_after_a_restart(tmp_path: Path):
    """Service, name and state; an untagged call is not kept."""
    path = tmp_path / "state.sqlite"
    async with running(state=str(path)) as rig:
        url = f"{rig.url}/autellix/v1/sessions"
        async with rig.client.put(f"{url}/run-1", json={"name": "planner"}) as response:
            assert response.status == 200
        await rig.chat({"X-Autellix-Session": "run-1"})
        await rig.chat({"X-Autellix-Session": "run-2"})
        await rig.chat()
        async with rig.client.delete(f"{url}/run-2") as response:
            assert response.status == 204
        before = {p.program_id: p.account.service_s for p in rig.table.programs() if p.session}
    async with running(state=str(path)) as rig:
        after = {p.program_id: p.account.service_s for p in rig.table.programs()}
        assert after == before
        first = rig.table.get(program_id_of("", "run-1"))
        second = rig.table.get(program_id_of("", "run-2"))
        assert first is not None
        assert second is not None
        assert (first.name, first.home, first.calls_begun) == ("planner", "e0", 1)
        assert second.state(time.monotonic()) is ProgramState.ENDED
        await rig.chat({"X-Autellix-Session": "run-1"})
        service_ms = int(rig.engine.seen[-1].headers["x-vllm-priority"])
        assert service_ms == int(before[first.program_id] * 1000)
        await rig.settled()


@pytest.mark.slow
def test_kill_9_at_a_random_moment_loses_less_than_a_second(tmp_path: Path):
    """Three kills, each of a process that goes on from the journal of the one before."""
    path = tmp_path / "state.sqlite"
    chance = random.Random(7)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.journal_process", str(path)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith("restored ")
        lines = chance.randrange(5, 25)
        said: dict[str, float] = {}
        for _ in range(lines):
            said = json.loads(process.stdout.readline())
        process.kill()
        process.wait()
        for line in process.stdout:  # said before the kill, not read yet
            if line.endswith("}\n"):
                said = json.loads(line)
        process.stdout.close()
        table = read_back(path)
        for session, service_s in said.items():
            program = table.get(program_id_of("", session))
            got_s = program.account.service_s if program is not None else 0.0
            assert service_s - 1.0 < got_s < service_s + 1.0, session
    assert said["long"] > 1.0, "too little service to tell"


async def test_a_journal_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch):
    """A full disk loses nothing, as long as there is room again before the end."""
    path = tmp_path / "state.sqlite"
    clock = ManualClock(100.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    call, _ = table.begin_call(Arrival("", "s"), "0badcafe", 100.0)
    table.dispatch(call, "e0")
    table.end_call(call, 103.0)

    def full(rows: object, unix_s: float) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", full)
        await journal.flush()
        await journal.flush()
    await journal.flush()
    journal.close()
    program = read_back(path).get(program_id_of("", "s"))
    assert program is not None
    assert program.account.service_s == 3.0


def test_a_journal_belongs_to_one_gateway(tmp_path: Path, monkeypatch):
    """The second one is told so, and so is one whose file cannot be made."""
    monkeypatch.setattr("autellix.server.gateway.journal.BUSY_S", 0.01)
    clock = ManualClock(100.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(tmp_path / "state.sqlite", table, clock)
    with pytest.raises(ConfigError, match=r"no other gateway uses"):
        Journal(tmp_path / "state.sqlite", table, clock)
    with pytest.raises(ConfigError, match=r"state: "):
        Journal(tmp_path / "no" / "folder", table, clock)
    journal.close()


async def test_old_tombstones_leave_the_journal(tmp_path: Path):
    """The file does not grow for ever."""
    path = tmp_path / "state.sqlite"
    clock = ManualClock(1000.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    program = table.open_program("", "s", 1000.0)
    table.end_program(program, "ok", 1000.0)
    await journal.flush()
    clock.advance(TOMBSTONE_S + 1)
    await journal.flush()
    journal.close()
    assert len(read_back(path)) == 0

"""The journal: what outlives a gateway, however it ends."""

from __future__ import annotations

import asyncio
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
from autellix.server.gateway.responses import ResponseHome, ResponseHomes
from autellix.server.process_table import TOMBSTONE_S, ProcessTable, program_id_of
from autellix.server.program import Arrival, ProgramState
from autellix.server.types import EngineAddress

from .conftest import running
from .fake_engine import fake_engines

ROOT = Path(__file__).parents[2]


async def read_back(path: Path) -> ProcessTable:
    """Return a fresh table with what is in a journal."""
    clock = SystemClock()
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    await journal.restore()
    await journal.close()
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
        table = asyncio.run(read_back(path))
        for session, service_s in said.items():
            program = table.get(program_id_of("", session))
            got_s = program.account.service_s if program is not None else 0.0
            assert service_s - 1.0 < got_s < service_s + 1.0, session
    assert said["long"] > 1.0, "too little service to tell"


async def test_both_measures_are_back_after_a_restart(tmp_path: Path):
    """The next life may go by the other policy than the last one went by."""
    path = tmp_path / "state.sqlite"
    clock = ManualClock(100.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    calls = []
    for number in range(3):
        call, _ = table.begin_call(Arrival("", "s"), f"{number:08x}", 100.0)
        table.dispatch(call, "e0")
        calls.append(call)
    for call in calls:
        table.end_call(call, 105.0)
        call.cost.wait_s = 2.0
        call.program.wait_s += 2.0
    await journal.flush()
    await journal.close()
    again = await read_back(path)
    program = again.get(program_id_of("", "s"))
    assert program is not None
    for accounting, figures in (("plas", (15.0, 6.0)), ("atlas", (5.0, 2.0))):
        again.accounting = accounting  # type: ignore[assignment]
        assert program.attained() == pytest.approx(figures)


async def test_a_journal_that_cannot_be_written_is_tried_again(tmp_path: Path, monkeypatch):
    """A full disk loses nothing, as long as there is room again before the end."""
    path = tmp_path / "state.sqlite"
    clock = ManualClock(100.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    call, _ = table.begin_call(Arrival("", "s"), "0badcafe", 100.0)
    table.dispatch(call, "e0")
    table.end_call(call, 103.0)

    def full(rows: object, homes: object, age_s: float) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", full)
        await journal.flush()
        await journal.flush()
    await journal.flush()
    await journal.close()
    program = (await read_back(path)).get(program_id_of("", "s"))
    assert program is not None
    assert program.account.service_s == 3.0


async def test_a_journal_belongs_to_one_gateway(tmp_path: Path, monkeypatch):
    """The second one is told so, and so is one whose file cannot be made."""
    monkeypatch.setattr("autellix.server.gateway.journal.BUSY_S", 0.01)
    clock = ManualClock(100.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(tmp_path / "state.sqlite", table, clock)
    with pytest.raises(ConfigError, match=r"no other gateway uses"):
        Journal(tmp_path / "state.sqlite", table, clock)
    with pytest.raises(ConfigError, match=r"state: "):
        Journal(tmp_path / "no" / "folder", table, clock)
    await journal.close()


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
    await journal.close()
    assert len(await read_back(path)) == 0


class JumpyClock(ManualClock):
    """A clock whose wall jumps."""

    jump_s = 0.0

    def unix_s(self) -> float:
        """Return the wall clock."""
        return self.now_s() + self.jump_s


@pytest.mark.parametrize("jump_s", [10 * 365 * 86_400.0, -10 * 365 * 86_400.0])
async def test_a_wall_clock_that_jumps_forgets_nothing(tmp_path: Path, jump_s: float):
    """Sessions that did not change since are back all the same, and old ones still leave."""
    path = tmp_path / "state.sqlite"
    clock = JumpyClock(1e9)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    for session in ("open", "over"):
        table.open_program("", session, clock.now_s())
    table.end_program(table.open_program("", "over", clock.now_s()), "ok", clock.now_s())
    await journal.flush()
    clock.jump_s = jump_s
    for session in ("new", "newer"):
        clock.advance(1.0)
        table.open_program("", session, clock.now_s())
        await journal.flush()
    await journal.close()
    assert len(await read_back(path)) == 4

    clock = JumpyClock(5.0)  # after a reboot both clocks begin anew
    again = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, again, clock)
    assert await journal.restore() == 4
    await journal.flush()
    clock.advance(TOMBSTONE_S)
    await journal.flush()
    await journal.close()
    left = {program.session for program in (await read_back(path)).programs()}
    assert left == {"open", "new", "newer"}


async def test_threads_and_stored_responses_are_back_after_a_restart(tmp_path: Path):
    """Joins go on where they were; a response is asked of the engine that holds it."""
    path = str(tmp_path / "state.sqlite")
    tags = {"X-Autellix-Session": "run-1"}
    async with fake_engines(tmp_path, 2, tcp=True) as engines:
        async with running(engines=engines, state=path) as rig:
            await rig.chat(tags)
            for thread in ("1", "2"):
                await rig.chat({**tags, "X-Autellix-Thread": thread, "X-Autellix-Parent": "0:1"})
            body = {"model": "m", "input": "hi"}
            async with rig.client.post(f"{rig.url}/v1/responses", json=body) as response:
                assert response.status == 200
            (owner,) = [e for e in engines if e.seen and e.seen[-1].path == "/v1/responses"]
            response_id = owner.seen[-1].body["request_id"]
        async with running(engines=engines, state=path) as rig:
            async with rig.client.get(f"{rig.url}/v1/responses/{response_id}") as response:
                assert response.status == 200
            assert owner.seen[-1].path == f"/v1/responses/{response_id}"
            stranger = {"authorization": "Bearer other"}
            url = f"{rig.url}/v1/responses/{response_id}"
            async with rig.client.get(url, headers=stranger) as response:
                assert response.status == 404
            await rig.chat(tags)  # the join
            program = rig.table.get(program_id_of("", "run-1"))
            assert program is not None
            assert sorted(program.threads) == [0, 1, 2]
            assert set(program.threads[0].parents) == {(0, 0), (1, 0), (2, 0)}
            assert program.threads[1].parent == (0, 1)
            assert (program.calls_begun, program.calls_ended) == (4, 4)
            assert program.threads[0].last_call == (0, 1)


async def test_a_journal_of_the_version_before_is_read(tmp_path: Path):
    """It had no column for threads, and stamps of a wall clock, which may have jumped."""
    path = tmp_path / "state.sqlite"
    clock = ManualClock(1000.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    call, _ = table.begin_call(Arrival("", "s", thread=3), "0badcafe", clock.now_s())
    table.dispatch(call, "e0")
    clock.advance(2.0)
    table.end_call(call, clock.now_s())
    await journal.flush()
    await journal.close()
    with sqlite3.connect(path) as db:
        for column in ("more", "path_s", "wait_path_s"):
            db.execute(f"ALTER TABLE programs DROP COLUMN {column}")
        db.execute("DROP TABLE responses")
        db.execute("ALTER TABLE programs RENAME COLUMN changed_s TO changed_unix_s")
        db.execute(
            "INSERT INTO programs SELECT 'other', scope, 'other', name, service_s, wait_s, calls,"
            " home, conversation, parent_session, arrival_unix_s, ended_unix_s, reason, expired,"
            " 4e9 FROM programs"
        )
    db.close()
    journal = Journal(path, table, clock)
    await journal.flush()
    await journal.close()
    program = (await read_back(path)).get(program_id_of("", "s"))
    assert program is not None
    assert (program.account.service_s, program.threads) == (2.0, {})


async def test_a_journal_of_a_later_version_takes_writes(tmp_path: Path):
    """Columns that this version does not know are no reason to lose service or homes."""
    path = tmp_path / "state.sqlite"
    clock = ManualClock(1000.0)
    await Journal(path, ProcessTable(now_s=clock.now_s()), clock).close()
    with sqlite3.connect(path) as db:
        for table in ("programs", "responses"):
            db.execute(f"ALTER TABLE {table} ADD COLUMN later TEXT NOT NULL DEFAULT 'none'")
    db.close()
    table, homes = ProcessTable(now_s=clock.now_s()), ResponseHomes()
    journal = Journal(path, table, clock, homes)
    call, _ = table.begin_call(Arrival("", "s"), "0badcafe", clock.now_s())
    table.dispatch(call, "e0")
    table.end_call(call, clock.now_s() + 2.0)
    homes.put("resp_1", ResponseHome("e0", EngineAddress(None, "127.0.0.1", 8000), "", "s"))
    await journal.flush()
    await journal.close()
    table, homes = ProcessTable(now_s=clock.now_s()), ResponseHomes()
    journal = Journal(path, table, clock, homes)
    assert await journal.restore() == 1
    await journal.close()
    program = table.get(program_id_of("", "s"))
    assert program is not None
    assert program.account.service_s == 2.0
    home = homes.get("resp_1", "")
    assert home is not None
    assert home.engine_id == "e0"

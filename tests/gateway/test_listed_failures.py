"""One test for each failure that is easily forgotten, named for it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import msgspec
import pytest

from autellix import wire
from autellix.server.channel import Accounting
from autellix.server.clock import ManualClock
from autellix.server.gateway.journal import Journal
from autellix.server.gateway.server import FIELD_BYTES_MAX
from autellix.server.process_table import ProcessTable, program_id_of
from autellix.server.program import Arrival, ProgramState
from tests.pool.test_control import Ends, hello, report

from .conftest import Rig, running, until

RUN = {"X-Autellix-Session": "run-1"}
UVICORN_HEAD_BYTES = 65_536  # h11's limit, which vLLM's server raises or keeps


class JumpingClock(ManualClock):
    """A clock whose wall time is set at will."""

    wall_s = 1.8e9

    def unix_s(self) -> float:
        """Return what the wall shows."""
        return self.wall_s


async def reach(rig: Rig, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and write to it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(request)
    return reader, writer


def post(body: dict[str, object], *lines: bytes) -> bytes:
    """Return a completion call."""
    data = json.dumps(body).encode()
    head = [b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(data), b"", b""]) + data


async def test_engine_restart_in_mid_session(rig: Rig):
    """The session's service is kept, its home is where the engine now listens."""
    await rig.chat(RUN)
    program = rig.table.get(program_id_of("", "run-1"))
    assert program is not None
    before_s = program.account.service_s
    await rig.engine.stop()
    assert (await rig.chat(RUN))[0] == 502
    rig.engine.address = rig.engine.address._replace(uds=f"{rig.engine.address.uds}.new")
    await rig.engine.start()
    assert (await rig.chat(RUN))[0] == 200
    assert program.account.service_s >= before_s > 0
    await rig.settled()


async def test_clock_steps_of_the_wall_clock(tmp_path: Path):
    """Leases follow the monotonic clock; a journal from the future is no negative age."""
    clock = JumpingClock(1000.0)
    table = ProcessTable(now_s=clock.now_s(), lease_s=60.0)
    journal = Journal(tmp_path / "state", table, clock)
    call, _ = table.begin_call(Arrival("", "s"), "0badcafe", clock.now_s())
    table.dispatch(call, "e0")
    clock.advance(2.0)
    clock.wall_s += 86_400.0  # somebody sets the clock a day ahead under the call
    table.end_call(call, clock.now_s())
    assert call.program.account.service_s == pytest.approx(2.0)
    assert table.sweep(clock.now_s()) == []
    await journal.flush()
    await journal.close()
    clock.wall_s -= 2 * 86_400.0  # and then two days back
    again = ProcessTable(now_s=clock.now_s(), lease_s=60.0)
    journal = Journal(tmp_path / "state", again, clock)
    assert await journal.restore() == 1
    program = again.get(program_id_of("", "s"))
    assert program is not None
    assert program.arrival_s <= clock.now_s()
    assert program.account.service_s == pytest.approx(2.0)
    await journal.flush()
    assert again.sweep(clock.now_s() + 59.0) == []
    await journal.close()


async def test_the_same_program_from_two_gateways(tmp_path: Path):
    """On one file the second gateway is refused; sharing needs Redis, see test_shared.py."""
    from autellix.errors import ConfigError

    path = str(tmp_path / "state")
    async with running(state=path) as first:
        with pytest.raises(ConfigError, match="no other gateway uses"):
            async with running(state=path):
                pass
        assert (await first.chat(RUN))[0] == 200


async def test_sqlite_disk_full(tmp_path: Path, caplog):
    """A real SQLITE_FULL: calls go on, it is said once, and nothing is lost when there is room."""
    clock = ManualClock(1000.0)
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(tmp_path / "state", table, clock)
    journal._db.execute("PRAGMA max_page_count = 8")
    for number in range(500):
        table.open_program("", f"s{number}" + "x" * 100, clock.now_s())
    for _ in range(3):
        await journal.flush()
    assert caplog.text.count("the journal cannot be written") == 1
    assert "full" in caplog.text
    journal._db.execute("PRAGMA max_page_count = 1073741823")
    await journal.flush()
    await journal.close()
    with sqlite3.connect(tmp_path / "state") as db:
        assert db.execute("SELECT count(*) FROM programs").fetchone() == (500,)
    db.close()


async def test_sqlite_locked(tmp_path: Path, monkeypatch):
    """Another process holds the file at the start: the error says so, and nothing hangs."""
    from autellix.errors import ConfigError

    monkeypatch.setattr("autellix.server.gateway.journal.BUSY_S", 0.05)
    holder = sqlite3.connect(tmp_path / "state", isolation_level=None)
    holder.execute("CREATE TABLE t (x)")
    holder.execute("BEGIN EXCLUSIVE")
    clock = ManualClock(1000.0)
    table = ProcessTable(now_s=clock.now_s())
    with pytest.raises(ConfigError, match="locked"):
        Journal(tmp_path / "state", table, clock)
    holder.execute("ROLLBACK")
    holder.close()
    journal = Journal(tmp_path / "state", table, clock)
    await journal.close()


def test_gateway_paused_for_a_minute_and_resumed():
    """The leases do not run out all at once: everybody has half a lease to say that it lives."""
    table = ProcessTable(now_s=0.0, lease_s=60.0)
    for number in range(100):
        table.open_program("", f"s{number}", 0.0)
    assert table.sweep(1.0) == []
    assert table.sweep(62.0) == []  # it stood still
    assert table.renew(program_id_of("", "s0"), 70.0)
    for now_s in range(63, 92):
        assert table.sweep(float(now_s)) == []
    for now_s in range(92, 99):
        table.sweep(float(now_s))
    states = {p.session: p.state(100.0) for p in table.programs()}
    assert states["s0"] is ProgramState.IDLE
    assert list(states.values()).count(ProgramState.EXPIRED) == 99


async def test_session_end_while_calls_run(rig: Rig):
    """The call is answered, the session drains, and is over with its last call."""
    rig.engine.stall_at = 0
    call = asyncio.create_task(rig.chat(RUN))
    await rig.engine.arrived.wait()
    async with rig.client.delete(f"{rig.url}/autellix/v1/sessions/run-1") as answer:
        assert answer.status == 204
    program = rig.table.get(program_id_of("", "run-1"))
    assert program is not None
    assert program.state(program.last_call_s) is ProgramState.DRAINING
    rig.engine.go.set()
    assert (await call)[0] == 200
    await rig.settled()
    assert program.state(program.last_call_s) is ProgramState.ENDED


async def test_id_of_an_ended_session_is_used_again(rig: Rig):
    """By a call: served, charged to the tombstone, counted as late. By its owner: open again."""
    url = f"{rig.url}/autellix/v1/sessions/run-1"
    await rig.chat(RUN)
    async with rig.client.delete(url):
        pass
    program = rig.table.get(program_id_of("", "run-1"))
    assert program is not None
    before_s = program.account.service_s
    assert (await rig.chat(RUN))[0] == 200
    assert program.calls_late == 1
    assert program.account.service_s > before_s
    assert program.state(program.last_call_s) is ProgramState.ENDED
    async with rig.client.put(url, json={}) as answer:
        assert answer.status == 200
    assert program.ended_s is None
    assert program.account.service_s > before_s
    await rig.settled()


async def test_header_longer_than_uvicorns_limit(rig: Rig):
    """Ours is lower, so that the engine never sees a head that it would refuse in its own form."""
    assert FIELD_BYTES_MAX < UVICORN_HEAD_BYTES
    reader, writer = await reach(rig, post({"model": "m"}, b"x-long: " + b"y" * UVICORN_HEAD_BYTES))
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer[9:13] == b"400 "
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert rig.engine.seen == []


async def test_clients_http_1_1_pipelining(rig: Rig):
    """Three calls in one write: three answers in their order, each of its own program."""
    calls = [
        post({"model": "m", "n": n}, b"x-autellix-session: s%d" % n, b"x-autellix-call: c%d" % n)
        for n in range(3)
    ]
    reader, writer = await reach(rig, b"".join(calls))
    programs = []
    for _ in range(3):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        await reader.readexactly(int(fields[b"content-length"]))
        programs.append(fields[b"x-autellix-program"].decode())
    writer.close()
    assert programs == [program_id_of("", f"s{n}") for n in range(3)]
    assert [seen.body["n"] for seen in rig.engine.seen] == [0, 1, 2]
    await rig.settled()


@pytest.mark.parametrize("stream", [True, False])
async def test_half_closed_streams(rig: Rig, stream: bool):
    """A client that closes its sending half counts as gone; its call leaves the engine."""
    rig.engine.stall_at = 2 if stream else 0
    _, writer = await reach(rig, post({"model": "m", "stream": stream}))
    await rig.engine.arrived.wait()
    writer.write_eof()
    await asyncio.wait_for(rig.engine.stopped.wait(), 1.0)
    await rig.settled()
    writer.close()


async def test_version_skew_of_the_sdk(rig: Rig):
    """A newer SDK's headers and fields are ignored and served; the server says its version."""
    newer = {**RUN, "X-Autellix-Client": "python/9.9;src=ctx;new=1", "X-Autellix-Mood": "fine",
             "X-Autellix-Version": "7"}  # fmt: skip
    status, headers, _ = await rig.chat(newer)
    assert (status, headers["X-Autellix-Version"]) == (200, str(wire.PROTOCOL_VERSION))
    assert not [name for name in rig.engine.seen[-1].headers if name.startswith("x-autellix")]
    url = f"{rig.url}/autellix/v1/sessions/run-1"
    async with rig.client.put(url, json={"name": "n", "of_version_9": {"x": 1}}) as answer:
        assert answer.status == 200
    async with rig.client.get(f"{rig.url}/autellix/v1/info") as answer:
        assert (await answer.json())["version"] == wire.PROTOCOL_VERSION
    async with rig.client.post(f"{rig.url}/autellix/v9/sessions") as answer:
        assert answer.status == 404


async def test_version_skew_of_the_engines_plug_in_is_said_and_ignored(caplog):
    """Another version of the control channel is not misread."""
    ends = Ends()
    await ends.say(msgspec.structs.replace(hello(), version=99))
    await ends.say(Accounting(boot_id="b1", reports=(report(1),)))
    assert ends.got == []
    assert ends.server.peers() == {}
    assert "speaks version 99 of the control channel" in caplog.text


async def test_an_engine_without_the_plug_in(rig: Rig):
    """An engine that does not report leaves its calls charged by wall time; see test_control.py."""
    await rig.chat(RUN)
    await until(lambda: rig.table.in_flight == 0)
    row = next(iter(rig.table.programs())).view(0.0)
    assert row["calls_by_wall_time"] == 1
    assert row["service_s"] > 0

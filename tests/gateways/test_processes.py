"""Gateway processes end, are killed and are started again; nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from autellix.errors import ConfigError
from autellix.server import cli
from autellix.server.config import ServeConfig
from autellix.server.gateways.fleet import check_gateways
from autellix.server.server_config import ServerConfig
from tests.processes import is_alive
from tests.serve_process import wait_until

from .rig import COUNT, LIMIT_S, Connection, Rig, running, session_of

OWNERS = range(COUNT)


def begun(rig: Rig, session: str) -> Connection:
    """Begin a call that waits in the engine; return its connection."""
    connection = rig.connection()
    calls = rig.row(session)["calls"]
    connection.begin(session)
    wait_until(lambda: rig.row(session)["calls"] == calls + 1, LIMIT_S)
    return connection


def pid_of(rig: Rig, index: int) -> int:
    """Return one gateway process, by its name."""
    (pid,) = [pid for pid in rig.pids() if command_line(pid).split()[-1] == f"gateway-{index}"]
    return pid


def command_line(pid: int) -> str:
    """Return how a process was started."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def journalled(state: Path) -> dict[str, int]:
    """Return the sessions that a process has written down, with their calls."""
    # it has the file for itself: a copy is read
    copy = state.with_name("copy")
    for suffix in ("", "-wal"):
        source = Path(f"{state}{suffix}")
        if source.exists():
            Path(f"{copy}{suffix}").write_bytes(source.read_bytes())
    db = sqlite3.connect(copy)
    try:
        return dict(db.execute("SELECT session, calls FROM programs"))
    finally:
        db.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{copy}{suffix}").unlink(missing_ok=True)


def test_a_killed_process_is_started_again_and_others_go_on(tmp_path: Path):
    """Its calls end, its programs are back with what they had; the other's are not touched."""
    state = tmp_path / "state.sqlite"
    with running(tmp_path, state=str(state)) as rig:
        sessions = [session_of(owner) for owner in OWNERS]
        for session in sessions:
            for _ in range(3):
                assert rig.call(session).status == 200
        wait_until(lambda: journalled(Path(f"{state}.1")).get(sessions[1]) == 3, LIMIT_S)
        rig.stall()
        calls = [begun(rig, session) for session in sessions]
        killed = pid_of(rig, 1)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(OSError):
            calls[1].end()
        wait_until(lambda: len(rig.pids()) == COUNT and killed not in rig.pids(), LIMIT_S)
        wait_until(lambda: rig.engine.cancelled == 1, LIMIT_S)
        assert rig.row(sessions[0])["calls_in_flight"] == 1
        back = rig.row(sessions[1])
        assert back["calls"] in (3, 4)  # the fourth had begun, and may have been written down
        assert back["calls_in_flight"] == 0
        assert back["service_s"] > 0
        rig.go_on()
        assert calls[0].end()[0] == 200
        for session in sessions:
            assert rig.call(session).status == 200
        assert rig.row(sessions[0])["calls"] == 5
        assert "gateway 1 ended" in rig.log()
        for connection in calls:
            connection.close()


def test_a_forwarded_call_of_a_killed_process_is_told_of_it(tmp_path: Path):
    """That is no engine's death, neither to its client nor in the figures."""
    with running(tmp_path) as rig:
        session = session_of(1)
        assert rig.call(session).status == 200
        connection = rig.connection()
        assert connection.ask(session_of(0))[0] == 200  # so it is the other process's
        rig.stall()
        connection.begin(None, session_id=session)
        wait_until(lambda: rig.row(session)["calls_in_flight"] == 1, LIMIT_S)
        killed = pid_of(rig, 1)
        os.kill(killed, signal.SIGKILL)
        status, body = connection.end()
        assert (status, json.loads(body)["error"]["code"]) == (502, "gateway_died")
        wait_until(lambda: len(rig.pids()) == COUNT and killed not in rig.pids(), LIMIT_S)
        rig.go_on()
        assert rig.call(session).status == 200
        assert rig.counts()["gateway died"] == 1
        assert "engine died" not in rig.counts()
        connection.close()


def test_sessions_survive_another_number_of_processes(tmp_path: Path):
    """What two have written down is found by one, and what that one has by two."""
    state = tmp_path / "state.sqlite"
    sessions = [session_of(owner) for owner in OWNERS]
    for turn, arguments in enumerate(((), ("--gateways", "1"), ("--gateways", "3"), ())):
        with running(tmp_path, *arguments, state=str(state)) as rig:
            for session in sessions:
                assert rig.call(session).status == 200
                assert rig.row(session)["calls"] == turn + 1
            if not arguments:
                for owner, session in enumerate(sessions):
                    assert rig.sessions_at(owner) == {session: turn + 1}


def test_sigterm_lets_running_calls_end(tmp_path: Path):
    """Those of all processes are answered; a new connection is refused; nothing is left."""
    with running(tmp_path) as rig:
        sessions = [session_of(owner) for owner in OWNERS]
        for session in sessions:
            assert rig.call(session).status == 200
        rig.stall()
        calls = [begun(rig, session) for session in sessions]
        pids = rig.pids()
        rig.server.process.send_signal(signal.SIGTERM)

        def is_closed() -> bool:
            try:
                rig.server.health()
            except ConnectionError:
                return True
            return False

        wait_until(is_closed, LIMIT_S)
        assert rig.server.process.poll() is None
        rig.go_on()
        for connection in calls:
            assert connection.end()[0] == 200
            connection.close()
        assert rig.server.process.wait(LIMIT_S) == 0
        assert not any(map(is_alive, pids))


def test_a_second_signal_skips_the_waiting(tmp_path: Path):
    """Calls are given up, and no process stays."""
    with running(tmp_path) as rig:
        session = session_of(1)
        assert rig.call(session).status == 200
        rig.stall()
        call = begun(rig, session)
        rig.server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: stopping" in rig.log(), LIMIT_S)
        rig.server.process.send_signal(signal.SIGINT)
        assert rig.server.process.wait(LIMIT_S) == 130
        call.close()


def test_the_servers_end_is_theirs(tmp_path: Path):
    """However it ends, and though signals to a gateway process itself end nothing."""
    with running(tmp_path) as rig:
        pids = rig.pids()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for owner in OWNERS:
            assert rig.call(session_of(owner)).status == 200
        assert rig.pids() == pids
        rig.server.process.kill()
        rig.server.process.wait(LIMIT_S)
        wait_until(lambda: not any(map(is_alive, pids)), LIMIT_S)


@pytest.mark.parametrize("number", ["0", "65", "two"])
def test_a_wrong_number_is_refused(number: str, capsys: pytest.CaptureFixture[str]):
    """With the flag's name and what is allowed."""
    assert cli.serve(["--engine-url", "http://127.0.0.1:1", "--gateways", number]) == 2
    said = capsys.readouterr().err
    assert f"gateways: {number} is not allowed; allowed is a whole number from 1 up to 64" in said


def test_redis_is_for_several_servers():
    """Processes of one server own their programs, and share no table."""
    config = ServerConfig(serve=ServeConfig(gateways=2, state="redis://h:1/0"))
    with pytest.raises(
        ConfigError, match=r"^gateways: 2 is not allowed with --state redis://h:1/0"
    ):
        check_gateways(config)
    check_gateways(ServerConfig(serve=ServeConfig(state="redis://h:1/0")))


def test_a_state_that_somebody_has_is_refused(tmp_path: Path):
    """Before a process is started: the file of each of them."""
    taken = sqlite3.connect(tmp_path / "s.sqlite.1")
    taken.execute("PRAGMA locking_mode=EXCLUSIVE")
    taken.execute("CREATE TABLE t (x)")
    try:
        status = cli.serve(
            ["--engine-url", "http://127.0.0.1:1", "--gateways", "2", "--port", "0",
             "--state", str(tmp_path / "s.sqlite")]
        )  # fmt: skip
        assert status == 2
    finally:
        taken.close()

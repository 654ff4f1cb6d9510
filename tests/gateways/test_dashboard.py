"""The dashboard and ``autellix top`` of a server of several gateway processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autellix.server.gateway.dashboard.login import COOKIE
from autellix.server.views_client import AdminClient, LiveTable
from tests.serve_process import exchange, wait_until

from .rig import API, COUNT, LIMIT_S, Rig, running, session_of
from .test_processes import journalled, pid_of

OWNERS = range(COUNT)
Shown = dict[str, dict[str, Any]]  # programs by name


class Watch:
    """Who follows the live feed, as ``autellix top`` does."""

    def __init__(self, rig: Rig) -> None:
        port, key = rig.server.admin_site()
        self.client = AdminClient(f"http://127.0.0.1:{port}", key)
        self.table = LiveTable()
        self.gone: set[str] = set()
        self._messages = self.client.follow()

    def until(self, condition: Callable[[Shown], object]) -> Shown:
        """Follow until a condition holds of the programs; return them."""
        shown: Shown = {}

        def holds() -> bool:
            nonlocal shown
            event, data = next(self._messages)
            self.table.take(event, data)
            self.gone |= set(data.get("gone", ())) if event == "tick" else set()
            shown = {row["name"]: row for row in self.table.rows.values()}
            return event in ("filled", "tick") and bool(condition(shown))

        wait_until(holds, LIMIT_S)
        return shown

    def close(self) -> None:
        """Hang up."""
        self._messages.close()


def ask_admin(rig: Rig, method: str, path: str, body: Any = None, **headers: str) -> Any:
    """Ask the admin site, without its key."""
    port, _ = rig.server.admin_site()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    data = None if body is None else json.dumps(body).encode()
    return exchange(connection, method, path, data, headers)


def test_programs_of_all_processes_are_in_one_stream(tmp_path: Path):
    """With their calls in flight, and what changes while somebody watches; nobody else may."""
    with running(tmp_path) as rig:
        site = f"http://127.0.0.1:{rig.server.admin_site()[0]}"
        assert f"look: {site}/dashboard; autellix top --admin-url {site} --key-file /" in rig.log()
        sessions = [session_of(owner) for owner in OWNERS]
        for session in sessions:
            assert rig.call(session).status == 200
        watch = Watch(rig)
        shown = watch.until(lambda shown: set(sessions) <= set(shown))
        assert [shown[session]["calls"] for session in sessions] == [1] * COUNT
        assert watch.table.is_filled
        assert watch.table.about["policy"] == "program"
        assert [engine["engine"] for engine in watch.table.engines] == ["r0"]
        later = [session_of(owner, "later") for owner in OWNERS]
        rig.stall()
        calls = [rig.connection() for _ in OWNERS]
        for connection, session in zip(calls, later, strict=True):
            connection.begin(session)
        watch.until(lambda shown: all(shown.get(s, {}).get("in_flight") == 1 for s in later))
        watch.until(lambda _: watch.table.sample[1] == COUNT)
        rig.go_on()
        for connection in calls:
            assert connection.end()[0] == 200
            connection.close()
        watch.until(lambda shown: all(shown[s]["in_flight"] == 0 for s in later))
        page = watch.client.program(later[1])
        assert (page["row"]["id"], len(page["calls"])) == (
            next(i for i, row in watch.table.rows.items() if row["name"] == later[1]), 1,
        )  # fmt: skip
        assert watch.gone == set()
        watch.close()
        for _ in range(4):
            assert rig.server.ask("GET", f"{API}/internal/live").status == 404
            assert rig.server.ask("GET", "/dashboard/live").status == 404


@pytest.mark.parametrize("is_journalled", [True, False])
def test_a_killed_process_brings_back_what_its_journal_has(tmp_path: Path, is_journalled: bool):
    """Its programs stay in sight until it is there again; without a journal they are gone then."""
    state = tmp_path / "state.sqlite"
    with running(tmp_path, state=str(state) if is_journalled else ":memory:") as rig:
        sessions = [session_of(owner) for owner in OWNERS]
        for session in sessions:
            for _ in range(3):
                assert rig.call(session).status == 200
        watch = Watch(rig)
        shown = watch.until(lambda shown: set(sessions) <= set(shown))
        ids = [shown[session]["id"] for session in sessions]
        if is_journalled:
            wait_until(lambda: journalled(Path(f"{state}.1")).get(sessions[1]) == 3, LIMIT_S)
        killed = pid_of(rig, 1)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(rig.pids()) == COUNT and killed not in rig.pids(), LIMIT_S)
        if not is_journalled:
            shown = watch.until(lambda shown: sessions[1] not in shown)
            assert shown[sessions[0]]["calls"] == 3
        assert rig.call(sessions[1]).status == 200
        calls = 4 if is_journalled else 1
        watch.until(lambda shown: shown.get(sessions[1], {}).get("calls") == calls)
        assert watch.gone == (set() if is_journalled else {ids[1]})
        # it watches still while the server stops
    assert "Traceback" not in rig.log()
    watch.close()


def test_the_pages_are_there_and_know_all_processes(tmp_path: Path):
    """Files for everybody, the rest for the key or its cookie, whose secret is by the journal."""
    state = tmp_path / "state.sqlite"
    with running(tmp_path, state=str(state)) as rig:
        for path in ("/dashboard", "/dashboard/static/main.js", "/dashboard/session"):
            assert ask_admin(rig, "GET", path).status == 200, path
        for path in ("live", "engines", "programs", "programs/x"):
            assert ask_admin(rig, "GET", f"/dashboard/{path}").status == 401, path
        _, key = rig.server.admin_site()
        reply = ask_admin(rig, "POST", "/dashboard/login", {"key": key})
        assert reply.status == 204
        assert Path(f"{state}.dashboard").stat().st_size == 32
        cookie = reply.headers["set-cookie"].partition(";")[0]
        assert cookie.startswith(COOKIE)
        sessions = [session_of(owner) for owner in OWNERS]
        for session in sessions:
            assert rig.call(session).status == 200
        found = ask_admin(rig, "GET", "/dashboard/programs", cookie=cookie).json
        assert {row["name"] for row in found["programs"]} == set(sessions)
        assert found["total"] == COUNT
        for session in sessions:
            page = ask_admin(rig, "GET", f"/dashboard/programs/{session}", cookie=cookie).json
            assert (page["row"]["name"], len(page["calls"])) == (session, 1)

        def look() -> Any:
            return ask_admin(rig, "GET", "/dashboard/engines", cookie=cookie).json

        assert [row["engine"] for row in look()["engines"]] == ["r0"]
        wait_until(lambda: look()["samples"], LIMIT_S)

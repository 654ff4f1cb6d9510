"""The dashboard of a real ``autellix serve``, before a fake engine: killed, and watched again."""

from __future__ import annotations

import hashlib
import re
import signal
import socket
from pathlib import Path

import pytest

from autellix.server import views_cli
from autellix.server.admin_cli import ENV_KEY, ENV_URL
from tests.gateway.fake_engine import engine_in_thread
from tests.serve_process import ServeProcess, wait_until

from .browser import Visit, chromium

ADMIN_KEY = "an operator's key"
ADMIN = f"ops:{hashlib.sha256(ADMIN_KEY.encode()).hexdigest()}"


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_journaled(folder: Path, session: str) -> bool:
    """Return whether the journal has a session; its gateway lets nobody else open the file."""
    return any(session.encode() in file.read_bytes() for file in folder.glob("state.sqlite*"))


@pytest.mark.parametrize("gateways", ["1", "2"])
def test_a_server_is_watched_killed_and_watched_again(
    tmp_path: Path, gateways: str, monkeypatch, capsys
):
    """The page finds the way back by itself, with the programs of before; the terminal as well."""
    admin_port = free_port()
    with engine_in_thread(tmp_path) as (engine, _), chromium() as browser:
        arguments = (
            "--engine-url", f"http://127.0.0.1:{engine.address.port}", "--policy", "program",
            "--admin-port", str(admin_port), "--admin-keys", ADMIN,
            "--state", str(tmp_path / "state.sqlite"), "--gateways", gateways,
        )  # fmt: skip
        one = Visit(browser, f"http://127.0.0.1:{admin_port}/dashboard")
        for turn in (1, 2):
            server = ServeProcess(tmp_path / f"log{turn}", *arguments)
            try:
                server.wait_ready(60)
                found = re.search(r"admin site on (\S+),", server.log.read_text())
                assert found is not None
                assert str(admin_port) in found[1]
                if turn == 1:
                    one.page.goto(one.url)
                    one.give_key(ADMIN_KEY)
                    assert "No programs yet" in one.page.inner_text(".empty")
                else:
                    one.wait_live()
                    wait_until(lambda: "watched" in one.cell(0, 0), 20)
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
                headers = {"X-Autellix-Session": "watched"}
                server.ask("POST", "/v1/chat/completions", body, headers)
                wait_until(lambda: one.cell(0, 4).startswith(str(turn)), 20)  # noqa: B023
                # A killed gateway loses what it had not written yet, less than a second of it.
                wait_until(lambda: is_journaled(tmp_path, "watched"), 20)
                server.stop(signal.SIGKILL)
                one.page.wait_for_selector("#link[data-state=retrying]")
            finally:
                server.kill_everything()
        monkeypatch.setenv(ENV_URL, found[1])
        monkeypatch.setenv(ENV_KEY, ADMIN_KEY)
        server = ServeProcess(tmp_path / "log3", *arguments)
        try:
            server.wait_ready(60)
            assert views_cli.show(["watched"]) == 0
            assert "watched" in capsys.readouterr().out
            assert server.stop() == 0
        finally:
            server.kill_everything()
        one.close("ERR_")

"""A real server of several gateway processes before a fake engine, which runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autellix.server.ownership import owner_of_session
from tests.gateway.fake_engine import FakeEngine, engine_in_thread
from tests.processes import children_of
from tests.serve_process import ServeProcess, UnixConnection, exchange, wait_until

API = "/autellix/v1"
CHAT = "/v1/chat/completions"
COUNT = 2
LIMIT_S = 60.0


def session_of(owner: int, name: str = "run") -> str:
    """Return a session that a process owns."""
    return next(
        session
        for n in range(1000)
        if owner_of_session("", session := f"{name}-{n}", COUNT) == owner
    )


def tagged(session: str) -> dict[str, str]:
    """Return the header that names a session."""
    return {"X-Autellix-Session": session}


def chat(**fields: Any) -> dict[str, Any]:
    """Return the body of a call."""
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


class Rig:
    """The server, and the engine behind it."""

    def __init__(self, engine: FakeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.loop = loop
        self.server: ServeProcess = None  # type: ignore[assignment]  # set by `running`

    def in_engine(self, do: Callable[[], Any]) -> Any:
        """Do something on the engine's loop."""

        async def call() -> Any:
            return do()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(LIMIT_S)

    def stall(self) -> None:
        """Have calls wait in the engine until `go_on`."""
        self.in_engine(self.engine.go.clear)
        self.engine.stall_at = 0

    def go_on(self) -> None:
        """Let them go on."""
        self.engine.stall_at = None
        self.in_engine(self.engine.go.set)

    def connection(self) -> Connection:
        """Return a client's connection that stays."""
        return Connection(self.server)

    def call(self, session: str, path: str = CHAT, **fields: Any) -> Any:
        """Make a call on a connection of its own; return the reply."""
        return self.server.ask("POST", path, chat(**fields), tagged(session))

    def row(self, session: str) -> dict[str, Any]:
        """Return what is known of a session."""
        reply = self.server.ask("GET", f"{API}/sessions/{session}")
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.json
        return found

    def sessions_at(self, index: int) -> dict[str, int]:
        """Return the sessions in one process's own table, with their calls."""
        connection = UnixConnection(str(self.folder / f"g{index}"), LIMIT_S)
        rows = exchange(connection, "GET", f"{API}/sessions", None, {}).json["sessions"]
        return {row["session"]: row["calls"] for row in rows}

    def counts(self) -> dict[str, int]:
        """Return what the processes have counted besides calls."""
        found: dict[str, int] = self.server.ask("GET", f"{API}/programs").json["gateway"]
        return found

    def admin(self, path: str) -> Any:
        """Ask the admin site."""
        port = re.search(r"admin site on http://127\.0\.0\.1:(\d+)", self.server.log.read_text())
        assert port is not None
        key = (self.folder / "admin-key").read_text().strip()
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=LIMIT_S)
        return exchange(connection, "GET", path, None, {"authorization": f"Bearer {key}"})

    @property
    def folder(self) -> Path:
        """The server's private folder."""
        found = re.search(r"key in (\S+)/admin-key", self.server.log.read_text())
        assert found is not None
        return Path(found[1])

    def log(self) -> str:
        """Return what the server has said."""
        return self.server.log.read_text()

    def pids(self) -> list[int]:
        """Return the gateway processes."""
        return children_of(self.server.process.pid)


class Connection:
    """One connection of a client; requests on it come one after the other."""

    def __init__(self, server: ServeProcess) -> None:
        self.http = server.connection(LIMIT_S)

    def ask(self, session: str, path: str = CHAT, **fields: Any) -> Any:
        """Make a call; return (status, body)."""
        body = json.dumps(chat(**fields))
        headers = {"content-type": "application/json", **tagged(session)}
        self.http.request("POST", path, body, headers)
        response = self.http.getresponse()
        return response.status, response.read()

    def begin(self, session: str | None, **fields: Any) -> None:
        """Send a call and do not wait for it."""
        headers = {"content-type": "application/json"}
        if session is not None:
            headers |= tagged(session)
        self.http.request("POST", CHAT, json.dumps(chat(**fields)), headers)

    def end(self) -> Any:
        """Wait for what was sent; return (status, body)."""
        response = self.http.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        """Hang up."""
        self.http.close()


@contextlib.contextmanager
def engine_thread(folder: Path) -> Iterator[Rig]:
    """Run the engine."""
    with engine_in_thread(folder) as (made, loop):
        yield Rig(made, loop)


@contextlib.contextmanager
def running(folder: Path, *arguments: str, state: str = ":memory:") -> Iterator[Rig]:
    """Run engine and server until the block ends; a test may have ended the server."""
    with engine_thread(folder) as rig:
        url = f"http://127.0.0.1:{rig.engine.address.port}"
        rig.server = ServeProcess(
            folder / "log", "--engine-url", url, "--policy", "program", "--gateways", str(COUNT),
            "--admin-port", "0", "--state", state, *arguments,
        )  # fmt: skip
        try:
            wait_until(lambda: "ready: " in rig.log() or rig.server.process.poll() is not None,
                       LIMIT_S)  # fmt: skip
            assert rig.server.process.poll() is None, rig.log()
            yield rig
            rig.go_on()
            if rig.server.process.poll() is None:
                assert rig.server.stop() == 0, rig.log()
            rig.server.check_gone()
        finally:
            rig.server.kill_everything()

"""A real ``autellix serve`` in a process of its own: started, asked, and seen to be gone.

Every process that comes from it carries a mark in its environment, so that what is left of it is
found whoever its parent is by then.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
START_S_MAX = 240.0  # 30 s on an idle machine with two cores, three times that on a busy one
_MARK = "AUTELLIX_TEST_RUN"
_PORT = "AUTELLIX_SERVER_PORT"  # a variable, as arguments may end with some for vLLM


class Reply(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("engine", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
) -> Reply:
    """Send one request, read the whole answer and hang up."""
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, fields, response.read())


class ServeProcess:
    """One running server; ``arguments`` are those of ``autellix serve``."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        self.mark = secrets.token_hex(8)
        self._port: int | None = None
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import sys; from autellix.cli import main; sys.exit(main())",
                    "serve",
                    *arguments,
                ],
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", _MARK: self.mark, _PORT: "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def port(self) -> int:
        """The port it chose; waits until it has one."""
        if self._port is None:
            wait_until(lambda: self._find_port() or self.process.poll() is not None, 30)
            self._port = self._find_port()
            assert self._port is not None, f"it ended:\n{self.log.read_text()}"
        return self._port

    @property
    def base_url(self) -> str:
        """What agents put into OPENAI_BASE_URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_ready(self, limit_s: float = START_S_MAX) -> None:
        """Wait until ``/health`` says that an engine answers."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.log.read_text()}"
            return self.health() == 200

        wait_until(is_ready, limit_s, every_s=0.1)

    def health(self) -> int:
        """Return the status of ``/health``."""
        return self.ask("GET", "/health", timeout_s=10).status

    def connection(self, timeout_s: float = 60) -> http.client.HTTPConnection:
        """Return a new connection to the gateway."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> Reply:
        """Send one request; a body that is not bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Content-Type": "application/json"} if data is not None else {}
        return exchange(
            self.connection(timeout_s), method, path, data, {**fields, **(headers or {})}
        )

    def admin_site(self) -> tuple[int, str]:
        """Return the port of the admin site, and the key that the server made for it."""
        found = re.search(r"admin site on http://[^:]+:(\d+), key in (\S+)", self.log.read_text())
        assert found is not None
        return int(found[1]), Path(found[2]).read_text().strip()

    def admin_page(self, path: str) -> str:
        """Return what the admin site has at ``path``."""
        port, key = self.admin_site()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"authorization": f"Bearer {key}"}
        return exchange(connection, "GET", path, None, headers).body.decode()

    @contextlib.contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Begin a streamed chat call; yields the open answer, its first byte read already."""
        with contextlib.closing(self.connection()) as connection:
            data = json.dumps({**body, "stream": True})
            connection.request("POST", "/v1/chat/completions", data, JSON)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.read(1)
            with response:
                yield response

    def processes(self) -> dict[int, str]:
        """Return what lives of this server, the gateway included: process id → role."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError, IndexError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environment = (entry / "environ").read_bytes().split(b"\0")
                if state not in "ZX" and f"{_MARK}={self.mark}".encode() in environment:
                    found[int(entry.name)] = _role((entry / "cmdline").read_bytes().decode())
        return found

    def pid_of(self, role: str) -> int:
        """Return the one process in this role."""
        (pid,) = [pid for pid, of in self.processes().items() if of == role]
        return pid

    def engine_metrics(self) -> dict[str, float]:
        """Return the engine's own counters, asked directly and summed over labels."""
        from autellix.server.pool.probe import counters

        arguments = Path(f"/proc/{self.pid_of('api server')}/cmdline").read_bytes().split(b"\0")
        uds = arguments[arguments.index(b"--uds") + 1].decode()
        return counters(exchange(UnixConnection(uds, 30), "GET", "/metrics", None, {}).body)

    def stop(self, number: signal.Signals = signal.SIGTERM, limit_s: float = 60) -> int:
        """End it and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(limit_s)

    def check_gone(self, limit_s: float = 15) -> None:
        """Fail if a process, the port or the private folder outlives the server."""
        wait_until(lambda: not self.processes(), limit_s, what=lambda: str(self.processes()))
        if self._port is not None:
            with socket.socket() as probe:  # past connections may linger, a listener may not
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", self._port))
                probe.listen()

    def kill_everything(self) -> None:
        """Leave nothing, whatever a test did."""
        for _ in range(100):
            if not (pids := self.processes()):
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def _find_port(self) -> int | None:
        match = re.search(r"listening on https?://127\.0\.0\.1:(\d+)", self.log.read_text())
        return int(match[1]) if match else None


JSON = {"Content-Type": "application/json"}


def _role(command_line: str) -> str:
    """Return what a process is, by its command line or title."""
    for part, role in (
        ("guard.py", "guard"),
        ("EngineCore", "engine core"),
        ("Worker", "worker"),
        ("resource_tracker", "tracker"),
        ("api_server", "api server"),
        ("autellix.cli", "gateway"),
    ):
        if part in command_line:
            return role
    return command_line.replace("\0", " ")[:80]


def wait_until(
    is_true: Callable[[], Any],
    limit_s: float,
    *,
    every_s: float = 0.05,
    what: Callable[[], str] = lambda: "",
) -> None:
    """Return as soon as the condition holds; fail when the limit is over."""
    end_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end_s, f"still not so after {limit_s:.0f} s {what()}"
        time.sleep(every_s)


@contextlib.contextmanager
def serving(log: Path, *arguments: str) -> Iterator[ServeProcess]:
    """Run a server until it is ready; afterwards stop it in good order and check that it is gone.

    A test may have killed it meanwhile: then only its being gone is checked.
    """
    server = ServeProcess(log, *arguments)
    try:
        server.wait_ready()
        yield server
        was_alive = server.process.poll() is None
        status = server.stop()
        assert not was_alive or status == 0, f"exit status {status}:\n{log.read_text()}"
        server.check_gone()
    finally:
        server.kill_everything()

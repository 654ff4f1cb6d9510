"""Signals and readiness of the whole server, with an engine that the test plays itself."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import Reply, ServeProcess, wait_until

ANSWER = json.dumps({"id": "x", "object": "chat.completion", "choices": []}).encode()
CALL = {"model": "played", "messages": [{"role": "user", "content": "hi"}]}


class PlayedEngine:
    """An engine whose calls end when the test says so."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.calls = threading.Semaphore(0)  # released by each call that has arrived
        played = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(b"")

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                played.calls.release()
                played.may_answer.wait(30)
                self.reply(ANSWER)

            def reply(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> PlayedEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def engine() -> Iterator[PlayedEngine]:
    """An engine that runs elsewhere."""
    with PlayedEngine() as played:
        yield played


@pytest.fixture
def server(engine: PlayedEngine, tmp_path: Path) -> Iterator[ServeProcess]:
    """A server with no engine of its own; gone without a trace afterwards."""
    running = ServeProcess(tmp_path / "log", "--engine-url", engine.url)
    try:
        running.wait_ready(30)
        yield running
        assert running.process.poll() is not None
        running.check_gone()
    finally:
        running.kill_everything()


class Asking:
    """A call that waits for its answer in a thread of its own."""

    def __init__(self, server: ServeProcess, engine: PlayedEngine) -> None:
        self.reply: Reply | None = None
        self._thread = threading.Thread(target=self._run, args=(server,))
        self._thread.start()
        assert engine.calls.acquire(timeout=20)

    def _run(self, server: ServeProcess) -> None:
        try:
            self.reply = server.ask("POST", "/v1/chat/completions", CALL)
        except OSError:
            self.reply = None

    def join(self) -> Reply | None:
        """Return the answer, None: the connection ended without one."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.reply


def test_sigterm_lets_running_calls_end(server: ServeProcess, engine: PlayedEngine):
    """The running call is answered, a new connection is refused, and the status is 0."""
    running = Asking(server, engine)
    server.process.send_signal(signal.SIGTERM)

    def is_closed() -> bool:
        try:
            server.health()
        except ConnectionError:
            return True
        return False

    wait_until(is_closed, 10)
    assert server.process.poll() is None
    engine.may_answer.set()
    reply = running.join()
    assert reply is not None
    assert reply.body == ANSWER
    assert server.process.wait(15) == 0


def test_a_second_signal_skips_the_waiting(server: ServeProcess, engine: PlayedEngine):
    """The running call is given up, and the status says that it was Ctrl-C."""
    running = Asking(server, engine)
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in server.log.read_text(), 10)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(15) == 130
    reply = running.join()
    assert reply is None or reply.status >= 500


def test_readiness_follows_the_engine(tmp_path: Path):
    """503 while nobody is there, 200 once somebody is; liveness all along."""
    played = PlayedEngine()
    server = ServeProcess(tmp_path / "log", "--engine-url", played.url)
    played.server.socket.close()  # nobody listens there now
    try:
        wait_until(lambda: server.ask("GET", "/live").status == 200, 20)
        assert server.health() == 503
        refused = server.ask("POST", "/v1/chat/completions", CALL)
        assert refused.status == 503
        assert "retry-after" in refused.headers
        assert server.stop() == 0
        server.check_gone()
    finally:
        server.kill_everything()
        played.server.server_close()

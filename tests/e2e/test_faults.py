"""Deaths and freezes on real vLLM: nothing hangs, nothing is orphaned, the server comes back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autellix import wire
from tests.serve_process import START_S_MAX, Reply, ServeProcess, serving, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]

CHAT = "/v1/chat/completions"
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Go on."}],
    "max_tokens": 1900,
    "ignore_eos": True,
}
SHORT = {**LONG, "max_tokens": 2}
FREEZE_S_MAX = 30.0

AGENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("POST", "/v1/chat/completions", json.dumps({**json.loads(sys.argv[2]),
    "stream": True}), {"Content-Type": "application/json", "X-Autellix-Session": "doomed"})
answer = connection.getresponse()
answer.read(1)
print("streaming", flush=True)
while answer.read(1):
    pass
print("over", flush=True)
"""


@pytest.fixture(scope="module")
def shared_server(tiny_model: Path, tmp_path_factory) -> Iterator[ServeProcess]:
    """A server that is quick to find an engine frozen and a session abandoned."""
    log = tmp_path_factory.mktemp("serve") / "log"
    settings = "--pool-frozen-floor-s 5 --pool-frozen-cap-s 8 --pool-probe-deadline-s 2"
    settings += " --gateway-lease-s 3 --pool-healthy-after-s 0 --pool-drain-s 1"
    with serving(log, str(tiny_model), *settings.split()) as running:
        yield running


def in_flight(server: ServeProcess) -> int:
    """Return how many calls the gateway holds."""
    return server.ask("GET", "/autellix/v1/programs").json["calls_in_flight"]


def engine_pids(server: ServeProcess) -> dict[int, str]:
    """Return the engine's processes."""
    return {pid: role for pid, role in server.processes().items() if role != "gateway"}


def wait_back(server: ServeProcess, before: dict[int, str]) -> None:
    """Wait until the old engine is gone, all of it, and a new one answers."""
    wait_until(lambda: not before.keys() & server.processes().keys(), 30)
    # The pool may hear of the end a moment after it: what tells is the new engine itself.
    roles = sorted(before.values())
    wait_until(lambda: sorted(engine_pids(server).values()) == roles, START_S_MAX)
    server.wait_ready()
    assert server.ask("POST", CHAT, SHORT).status == 200
    assert in_flight(server) == 0


@pytest.fixture
def server(shared_server: ServeProcess) -> ServeProcess:
    """The server with a whole engine: a test that failed half-way may have left a dead one."""
    roles = {"guard", "api server", "engine core", "worker"}
    wait_until(lambda: roles <= set(engine_pids(shared_server).values()), START_S_MAX)
    shared_server.wait_ready()
    return shared_server


class Asking:
    """A call in a thread of its own, whose outcome is looked at later."""

    def __init__(self, server: ServeProcess, body: dict[str, Any]) -> None:
        self.reply: Reply | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(server, body))
        self._thread.start()

    def _run(self, server: ServeProcess, body: dict[str, Any]) -> None:
        try:
            self.reply = server.ask("POST", CHAT, body)
        except (OSError, http.client.HTTPException) as error:
            self.error = error

    def join(self, limit_s: float) -> None:
        """Wait for the outcome; fail if there is none in time."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the call hangs"


def test_a_saturated_engine_is_never_ejected(server: ServeProcess):
    """Many long prompts at once, more than run together: busy, and ready all the time."""
    prompts = [f"{number} " + "word " * 1500 for number in range(24)]
    calls = [
        Asking(server, {**LONG, "messages": [{"role": "user", "content": text}], "max_tokens": 64})
        for text in prompts
    ]
    wait_until(lambda: in_flight(server) > 0, 10)
    while in_flight(server):
        assert server.health() == 200
    for call in calls:
        call.join(60)
        assert call.reply is not None, call.error
        assert call.reply.status == 200
    (engine,) = server.ask("GET", "/autellix/v1/engines").json["engines"]
    assert engine["starts"] == 1


def test_an_agent_killed_in_mid_stream(server: ServeProcess):
    """Its call ends in the engine at once, and its session when the lease is over."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(server.port), json.dumps(LONG)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "streaming\n"
        # The engine's figures come out a little after its tokens.
        wait_until(lambda: server.engine_metrics()["vllm:num_requests_running"] == 1, 5)
        agent.kill()
    wait_until(lambda: in_flight(server) == 0, 5)
    wait_until(lambda: server.engine_metrics()["vllm:num_requests_running"] == 0, 5)

    def is_over() -> bool:
        reply = server.ask("GET", f"{wire.API_PREFIX}/sessions/doomed")
        return reply.status == 404 or reply.json["state"] in ("ended", "expired")

    wait_until(is_over, 15)


@pytest.mark.parametrize("role", ["api server", "engine core"])
def test_a_stopped_process_is_seen_by_health_and_may_come_back(server: ServeProcess, role: str):
    """SIGSTOP in mid-call: not ready within 30 s; SIGCONT: ready, and the call goes on."""
    before = engine_pids(server)
    pid = server.pid_of(role)
    with server.stream({**LONG, "max_tokens": 1000}) as answer:
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: server.health() == 503, FREEZE_S_MAX)
            refused = server.ask("POST", CHAT, SHORT)
            assert refused.status == 503
            assert refused.json["error"]["message"]
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: server.health() == 200, 15)
        assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert engine_pids(server) == before
    assert in_flight(server) == 0


@contextlib.contextmanager
def stopped_in_mid_stream(server: ServeProcess) -> Iterator[http.client.HTTPResponse]:
    """Begin a long answer and stop the engine core in it; yields the answer.

    On a busy machine an answer may be over by then: the engine goes on, and another one is asked.
    """
    core = server.pid_of("engine core")
    for _ in range(5):
        with server.stream(LONG) as answer:
            os.kill(core, signal.SIGSTOP)
            if in_flight(server) == 1:
                yield answer
                return
            os.kill(core, signal.SIGCONT)
    pytest.fail("five answers were over before the engine was stopped")


def test_the_engine_core_killed_in_mid_stream(server: ServeProcess):
    """A clear 5xx where no header was sent, an end where one was; then a new engine."""
    before = engine_pids(server)
    with stopped_in_mid_stream(server) as answer:
        waiting = Asking(server, LONG)
        wait_until(
            lambda: in_flight(server) == 2,
            30,
            what=lambda: f"{in_flight(server)} in flight, {waiting.reply}, {waiting.error!r}",
        )
        os.kill(server.pid_of("engine core"), signal.SIGKILL)
        try:
            rest = answer.read()
        except http.client.IncompleteRead as error:
            rest = error.partial
    assert b'"error"' in rest or b"[DONE]" not in rest
    waiting.join(30)
    assert waiting.reply is not None, waiting.error
    assert waiting.reply.status >= 500
    assert waiting.reply.json["error"]["message"]
    wait_back(server, before)


def test_the_api_server_killed_leaves_no_orphan(server: ServeProcess):
    """Engine core and worker, which outlive it by themselves, end with it."""
    before = engine_pids(server)
    assert {"guard", "api server", "engine core", "worker"} <= set(before.values())
    os.kill(server.pid_of("api server"), signal.SIGKILL)
    wait_back(server, before)


@pytest.mark.heavy
@pytest.mark.parametrize("role", ["guard", "api server", "engine core", "worker"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_every_process_may_be_killed(server: ServeProcess, role: str, number: signal.Signals):
    """Whichever goes, by either signal: no orphan, and the engine is replaced."""
    before = engine_pids(server)
    os.kill(server.pid_of(role), number)
    wait_back(server, before)


def test_the_gateway_killed_in_mid_stream(server: ServeProcess):
    """Kill -9: clients are told by the end of the connection; all of the engine goes, and the port.

    The last test of the module: it ends the server.
    """
    arguments = Path(f"/proc/{server.pid_of('api server')}/cmdline").read_bytes().split(b"\0")
    folder = Path(arguments[arguments.index(b"--uds") + 1].decode()).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with server.stream(LONG) as answer:
        server.process.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
    assert server.process.wait(5) == -signal.SIGKILL
    server.check_gone()
    assert not folder.exists()


@pytest.mark.parametrize("role", ["gateway", "guard", "api server", "engine core"])
def test_ctrl_c_during_the_start_leaves_nothing(tiny_model: Path, tmp_path: Path, role: str):
    """As soon as there is such a process, whatever it is doing then."""
    server = ServeProcess(tmp_path / "log", str(tiny_model))
    try:
        wait_until(lambda: role in server.processes().values(), START_S_MAX, every_s=0.01)
        status = server.stop(signal.SIGINT)
        # The others are Python's own ways, before any line of ours has run.
        is_site = status == 1 and "init_import_site" in server.log.read_text()
        assert status in (130, -signal.SIGINT) or is_site
        server.check_gone()
    finally:
        server.kill_everything()


def test_an_engine_that_cannot_start_ends_the_server(tiny_model: Path, tmp_path: Path):
    """Exit status 3, with the engine's own words in the log."""
    server = ServeProcess(tmp_path / "log", str(tiny_model), "--", "--no-such-flag")
    try:
        assert server.process.wait(START_S_MAX) == 3
        assert "--no-such-flag" in server.log.read_text()
        server.check_gone()
    finally:
        server.kill_everything()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "port: 70000 is not allowed"),
        (["--policy", "best"], "policy: best is not allowed"),
        (["--", "--port", "1"], "vllm argument --port is refused"),
        (["--config", "/no/such/file"], "config: /no/such/file"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(arguments, says, tmp_path: Path):
    """Exit status 2 and one line that names the field."""
    server = ServeProcess(tmp_path / "log", "some/model", *arguments)
    assert server.process.wait(30) == 2
    assert says in server.log.read_text()

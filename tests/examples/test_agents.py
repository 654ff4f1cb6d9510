"""Every example agent runs unchanged against a plain server, and is one program there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
AGENTS = ("loop_agent", "short_agent", "langgraph_agent", "autogen_team")
CALLS = {"loop_agent": 5, "short_agent": 6, "langgraph_agent": 7, "autogen_team": 4}


class Seen(NamedTuple):
    """A call as it reached the server."""

    headers: dict[str, str]
    body: dict[str, Any]


class PlainServer(ThreadingHTTPServer):
    """Answers chat completions, calls a tool when it must, and knows nothing of autellix."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[Seen] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: PlainServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/chat/completions"):
            return self._answer(404, {"error": {"message": "not here"}})
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.calls.append(Seen(headers, body))
        message: dict[str, Any] = {"role": "assistant", "content": "Fine."}
        if body.get("tool_choice") == "required":
            function = {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}
            call = {"id": f"c{len(self.server.calls)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return self._answer(
            200,
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            },
        )

    def do_GET(self) -> None:
        self._answer(404, {"error": {"message": "not here"}})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(404, {"error": {"message": "not here"}})

    do_DELETE = do_GET

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


class Run(NamedTuple):
    """An agent that has ended."""

    status: int
    output: str
    calls: list[Seen]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    """Every agent, run at the same time, each against a server of its own."""
    servers = {name: PlainServer() for name in AGENTS}
    children = {}
    for name, server in servers.items():
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {k: v for k, v in os.environ.items() if not k.startswith("AUTELLIX_")}
        env |= {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
        children[name] = subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}.py")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    done = {}
    for name, child in children.items():
        output, _ = child.communicate(timeout=120)
        done[name] = Run(child.returncode, output, servers[name].calls)
    yield done
    for server in servers.values():
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_ends_well(runs: dict[str, Run], name: str):
    """It exits with 0, says one line, and makes the calls that it always makes."""
    run = runs[name]
    assert run.status == 0, run.output
    assert len(run.output.strip().splitlines()) == 1, run.output
    assert len(run.calls) == CALLS[name]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_one_program(runs: dict[str, Run], name: str):
    """All its calls carry the same session, and the session of nobody else."""
    sessions = {call.headers.get("x-autellix-session") for call in runs[name].calls}
    assert len(sessions) == 1
    assert None not in sessions
    others = [c for other, run in runs.items() if other != name for c in run.calls]
    assert sessions.isdisjoint(call.headers["x-autellix-session"] for call in others)


def test_the_branches_of_the_graph_are_threads(runs: dict[str, Run]):
    """Two branches of three calls each, in threads of their own, and a report."""
    numbers = [call.headers["x-autellix-thread"] for call in runs["langgraph_agent"].calls]
    assert sorted(numbers.count(n) for n in set(numbers)) in ([1, 3, 3], [3, 4])


@pytest.mark.parametrize("name", ["loop_agent", "short_agent"])
def test_a_plain_loop_is_one_chain(runs: dict[str, Run], name: str):
    """One thread, its calls numbered, forked nowhere."""
    headers = [call.headers for call in runs[name].calls]
    assert {h["x-autellix-thread"] for h in headers} == {"0"}
    assert [h["x-autellix-seq"] for h in headers] == [str(n) for n in range(len(headers))]
    assert not any("x-autellix-parent" in h for h in headers)


def test_turns_of_a_team_are_one_chain(runs: dict[str, Run]):
    """Writer and critic in turn: no call is beside another."""
    headers = [call.headers for call in runs["autogen_team"].calls]
    assert len({h["x-autellix-thread"] for h in headers}) == 1
    assert [h["x-autellix-seq"] for h in headers] == ["0", "1", "2", "3"]


def test_the_branches_fork_at_the_root(runs: dict[str, Run]):
    """Both branches have the root thread for a parent, which makes the report, if it has a call."""
    headers = [call.headers for call in runs["langgraph_agent"].calls]
    forks = {h["x-autellix-parent"] for h in headers if "x-autellix-parent" in h}
    assert forks == {"0:0"}
    assert {h["x-autellix-thread"] for h in headers if "x-autellix-parent" in h} <= {"1", "2"}


def test_the_tool_loop_is_forced_and_ends(runs: dict[str, Run]):
    """Each branch must call the tool twice and then may not; the tool is strict."""
    calls = [call.body for call in runs["langgraph_agent"].calls]
    choices = [body["tool_choice"] for body in calls if "tools" in body]
    assert sorted(choices) == ["none"] * 2 + ["required"] * 4
    assert all(t["function"]["strict"] for body in calls for t in body.get("tools", []))


@pytest.mark.parametrize("name", AGENTS)
def test_the_only_autellix_line_is_the_import(name: str):
    """What else is in the file is the framework's."""
    lines = (EXAMPLES / f"{name}.py").read_text().split("from __future__")[1].splitlines()
    code = [line for line in lines if "autellix" in line]
    assert len(code) == 1
    assert code[0].startswith("import autellix")
    assert len(lines) < 60

"""LangGraph's development server with wrapped graphs: each run over HTTP is one program."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("langgraph_api")
pytest.importorskip("autellix.integrations", reason="the adapters are not installed here")

from autellix.testing import FakeServer

from .happens_before import dag_of

START_S_MAX = 180.0
MAPPED = {"plan": set(), "left": {"plan"}, "right": {"plan"}, "join": {"left", "right"}}


class Dev(NamedTuple):
    """A development server, and the model that its graphs call."""

    url: str
    fake: FakeServer

    def ask(self, method: str, path: str, body: Any = None) -> str:
        """Return what the server answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())

    def thread(self) -> str:
        """Make a thread, as the server calls a conversation."""
        return str(json.loads(self.ask("POST", "/threads", {}))["thread_id"])

    def programs(self) -> dict[str, list[str]]:
        """Return the calls by session; each session has ended."""
        found: dict[str, list[str]] = {}
        for call in self.fake.calls:
            assert call.session is not None
            found.setdefault(call.session, []).append(call.text)
        for session in found:
            self.fake.wait_event("DELETE", session)
        return found

    def reason(self) -> str:
        """Return why the only session ended."""
        (session,) = self.programs()
        return self.fake.wait_event("DELETE", session).path.partition("reason=")[2]


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers."""
    last = time.monotonic() + START_S_MAX
    while time.monotonic() < last and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ok", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"no development server: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    folder = tmp_path_factory.mktemp("dev") / "app"
    shutil.copytree(Path(__file__).with_name("langgraph_dev"), folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("langgraph")
    command = [program, "dev", "--no-browser", "--no-reload", "--port", str(port)]
    log = folder / "log"
    with FakeServer() as fake, log.open("wb") as out:
        told = {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": fake.base_url,
            "LANGGRAPH_CLI_NO_ANALYTICS": "1",
            "LANGSMITH_TRACING": "false",
        }
        env = {**os.environ, **told}
        with subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out) as process:
            try:
                wait_until_ready(f"http://127.0.0.1:{port}", process, log)
                yield Dev(f"http://127.0.0.1:{port}", fake)
            finally:
                process.terminate()


@pytest.fixture
def dev(started: Dev) -> Iterator[Dev]:
    """The server; what the test before left is forgotten."""
    started.fake.clear()
    started.fake.gates.clear()
    yield started
    for gate in started.fake.gates.values():
        gate.set()


def run(assistant: str, **more: Any) -> dict[str, Any]:
    """Return what asks for a run."""
    return {"assistant_id": assistant, "input": {"said": []}, **more}


def updates(text: str) -> list[str]:
    """Return which nodes a stream told of."""
    parts = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [key for part in parts for key in json.loads(part) if key in MAPPED or key == "part"]


def waited(dev: Dev, thread: str) -> None:
    """Run the map and wait for its result."""
    said = json.loads(dev.ask("POST", f"/threads/{thread}/runs/wait", run("mapped")))["said"]
    assert sorted(said) == ["echo: join", "echo: left", "echo: plan", "echo: right"]


def streamed(dev: Dev, thread: str) -> None:
    """Run the map and read its stream."""
    body = run("mapped", stream_mode=["updates"])
    told = updates(dev.ask("POST", f"/threads/{thread}/runs/stream", body))
    assert told == ["plan", "part", "part", "join"]


@pytest.mark.parametrize("way", [waited, streamed])
def test_a_run_on_a_thread_is_one_program(dev: Dev, way: Callable[[Dev, str], None]):
    """Its order is exact, the thread is its conversation, and the state is there afterwards."""
    thread = dev.thread()
    dev.fake.together("left", "right")
    way(dev, thread)
    assert dag_of(dev.fake) == MAPPED
    assert dev.reason() == "ok"
    assert {c.headers["x-autellix-conversation"] for c in dev.fake.calls} == {thread}
    assert {c.thread for c in dev.fake.calls if c.text in ("left", "right")} != {0}
    state = json.loads(dev.ask("GET", f"/threads/{thread}/state"))
    assert len(state["values"]["said"]) == 4
    assert state["next"] == []


def test_runs_at_once_are_programs_of_their_own(dev: Dev):
    """Three runs without a thread, asked for together."""
    dev.ask("POST", "/runs/batch", [run("mapped") for _ in range(3)])
    dev.fake.wait_for(calls=12, timeout_s=60.0)
    assert [sorted(texts) for texts in dev.programs().values()] == [sorted(MAPPED)] * 3


def test_an_interrupted_run_goes_on_as_the_program_it_was(dev: Dev):
    """The server's own checkpointer keeps the state; the answer comes with another request."""
    path = f"/threads/{dev.thread()}/runs/wait"
    assert "__interrupt__" in json.loads(dev.ask("POST", path, run("asking")))
    body = {"assistant_id": "asking", "command": {"resume": "yes"}}
    said = json.loads(dev.ask("POST", path, body))["said"]
    assert said == ["echo: before", "yes", "echo: after"]
    assert list(dev.programs().values()) == [["before", "after"]]


def test_a_created_agent_is_one_program_and_tells_of_its_tool(dev: Dev):
    """LangChain's ``create_agent``, wrapped."""
    dev.fake.tool_calls_next.append([("look_up", {"word": "fox"})])
    start = {"messages": [{"role": "user", "content": "go"}]}
    body = {"assistant_id": "agent", "input": start}
    messages = json.loads(dev.ask("POST", "/runs/wait", body))["messages"]
    assert [m["type"] for m in messages] == ["human", "ai", "tool", "ai"]
    assert list(dev.programs().values()) == [["go", "fox is a word"]]
    told = [(e.body["event"], e.body["tool"]) for e in dev.fake.events if "tool" in e.body]
    assert told == [("start", "look_up"), ("end", "look_up")]


def test_a_failed_run_ends_as_an_error(dev: Dev):
    """The server tells of the error, the program too."""
    assert "ValueError" in dev.ask("POST", "/runs/wait", run("failing"))
    assert dev.reason() == "error"


def test_a_cancelled_run_says_so(dev: Dev):
    """Cancelled over HTTP while a call is under way."""
    dev.fake.gates["before"] = threading.Event()
    thread = dev.thread()
    begun = json.loads(dev.ask("POST", f"/threads/{thread}/runs", run("asking")))
    dev.fake.wait_for(calls=1, timeout_s=60.0)
    dev.ask("POST", f"/threads/{thread}/runs/{begun['run_id']}/cancel?wait=true", {})
    assert dev.reason() == "cancelled"


def test_it_shows_wrapped_graphs(dev: Dev):
    """Drawing and schemas are those of the graph inside."""
    (found,) = json.loads(dev.ask("POST", "/assistants/search", {"graph_id": "mapped"}))
    drawn = json.loads(dev.ask("GET", f"/assistants/{found['assistant_id']}/graph"))
    assert {node["id"] for node in drawn["nodes"]} >= {"plan", "part", "join"}
    schemas = json.loads(dev.ask("GET", f"/assistants/{found['assistant_id']}/schemas"))
    assert set(schemas["input_schema"]["properties"]) == {"said", "text"}

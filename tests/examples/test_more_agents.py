"""The longer examples: programs and threads as their texts say, on a recording server."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from autellix.testing import FakeServer

EXAMPLES = Path(__file__).parents[2] / "examples"


def environment(server: FakeServer) -> dict[str, str]:
    """Return the environment in which an example finds the server."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("AUTELLIX_")}
    return {
        **plain,
        "OPENAI_BASE_URL": server.base_url,
        "OPENAI_API_KEY": "k",
        "OPENAI_MODEL": "fake",
    }


def run(name: str, server: FakeServer) -> str:
    """Run an example to its end and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def calls_by_session(server: FakeServer) -> list[int]:
    """Return the number of calls of each program, in the order of their arrival."""
    sessions = [call.session for call in server.calls]
    assert None not in sessions
    return [sessions.count(session) for session in dict.fromkeys(sessions)]


@pytest.fixture
def server():
    """A server that records."""
    with FakeServer() as server:
        yield server


def test_a_tree_search_forks_five_threads_a_level(server: FakeServer):
    """Two levels of five children with two calls each: one program, and five threads at a time."""
    assert "2 levels of 5" in run("tree_search.py", server)
    assert calls_by_session(server) == [20]
    threads = [call.thread for call in server.calls]
    assert len(set(threads)) == 10
    assert {threads.count(thread) for thread in threads} == {2}


def test_a_map_reduce_is_a_program_per_run(server: FakeServer):
    """Three topics and two topics, each with a summary: two programs with the graph's name."""
    assert run("langgraph_map_reduce.py", server).count("map-reduce:") == 2
    assert calls_by_session(server) == [4, 3]
    assert server.wait_event("PUT").body["name"] == "facts"
    for session in {call.session for call in server.calls}:
        server.wait_event("DELETE", str(session))


def test_a_diamond_of_agents_is_one_program(server: FakeServer):
    """Four agents, two of them side by side."""
    assert "drafter, optimist, pessimist, editor" in run("autogen_diamond.py", server)
    assert calls_by_session(server) == [4]
    assert server.calls[1].thread != server.calls[2].thread


def test_each_request_of_a_service_is_a_program(server: FakeServer, tmp_path: Path):
    """Two requests, two programs of two calls, which end with their streams."""
    import socket
    import time

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "web_service.py")],
        env={**environment(server), "PORT": str(port)},
    )
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/docs", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < deadline_s and service.poll() is None  # noqa: PT018
                time.sleep(0.05)
        for about in ("fox", "crow"):
            url = f"http://127.0.0.1:{port}/story?about={about}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert f"A short story about a {about}" in answer.read().decode()
        assert calls_by_session(server) == [2, 2]
        for session in {call.session for call in server.calls}:
            server.wait_event("DELETE", str(session))
    finally:
        service.terminate()
        service.wait(20)


def test_pictures_go_through_and_the_tool_is_reported(server: FakeServer):
    """Four screenshots in one program; the server learns of the waits for the screen."""
    server.answers["Move the cursor to the middle: answer with x and y."] = "16, 15"
    assert "at 16, 15 after 4 steps" in run("computer_use.py", server)
    assert calls_by_session(server) == [4]
    for call in server.calls:
        url = call.body["messages"][0]["content"][0]["image_url"]["url"]
        assert url.startswith("data:image/png;base64,iVBORw0KGgo")
    (session,) = {str(call.session) for call in server.calls}
    assert server.wait_event("PUT").body["name"] == "computer use"
    server.wait_event("DELETE", session)
    told = [e.body["event"] for e in server.events if e.body.get("tool") == "screen"]
    assert told == ["start", "end"] * 4


def test_no_example_is_long():
    """Each is read in one go; the demo's own agents are at most 60 lines."""
    for path in EXAMPLES.glob("*.py"):
        if path.name != "demo.py":
            assert len(path.read_text().splitlines()) <= 60, path.name

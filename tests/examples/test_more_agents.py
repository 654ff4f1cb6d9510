"""The longer examples: programs and threads as their texts say, on a recording server."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from autellix.testing import FakeServer
from tests.serve_process import ServeProcess, serving, wait_until

from .example_run import (
    EXAMPLES,
    calls_by_session,
    check_fork,
    check_program,
    environment,
    run,
)


def test_a_tree_search_forks_five_threads_a_level(server: FakeServer):
    """Two levels of five children with two calls each: one program, and five threads at a time."""
    assert "2 levels of 5" in run("tree_search.py", server)
    assert calls_by_session(server) == [20]
    threads = [call.thread for call in server.calls]
    assert len(set(threads)) == 10
    assert {threads.count(thread) for thread in threads} == {2}
    heads = [call for call in server.calls if call.seq == 0]
    for level in (heads[:5], heads[5:]):
        check_fork(level)


def test_a_map_reduce_is_a_program_per_run(server: FakeServer):
    """Three topics and two topics, each with a summary: two programs with the graph's name."""
    for topics in (("sun", "moon", "sea"), ("fox", "crow")):
        server.together(*(f"Tell one fact about the {topic}." for topic in topics))
    assert run("langgraph_map_reduce.py", server).count("map-reduce:") == 2
    assert calls_by_session(server) == [4, 3]
    assert server.wait_event("PUT").body["name"] == "facts"
    calls = list(server.calls)
    for *facts, summary in (calls[:4], calls[4:]):
        assert len({call.thread for call in facts}) == len(facts)
        assert len({call.parent for call in facts}) == 1
        assert summary.text.count("echo: Tell one fact") == len(facts)
    for session in {call.session for call in server.calls}:
        server.wait_event("DELETE", str(session))


def test_a_diamond_of_agents_is_one_program(server: FakeServer):
    """Four agents, two of them side by side."""
    assert "drafter, optimist, pessimist, editor" in run("autogen_diamond.py", server)
    assert calls_by_session(server) == [4]
    draft, *reviews, verdict = check_program(server, "review")
    assert len({call.thread for call in reviews}) == 2  # one of them goes on the drafter's chain
    assert verdict.thread not in {call.thread for call in (draft, *reviews)}
    assert {call.parent for call in (draft, *reviews, verdict)} == {draft.parent}


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
        assert [(call.thread, call.seq) for call in server.calls] == [(0, 0), (0, 1)] * 2
        for session in {call.session for call in server.calls}:
            server.wait_event("DELETE", str(session))
    finally:
        service.terminate()
        service.wait(20)


def test_pictures_pass_the_gateway_as_they_are(server: FakeServer, tmp_path: Path):
    """Four screenshots in one program, with the waits for the screen; the same with a gateway."""
    server.answers["Move the cursor to the middle: answer with x and y."] = "16, 15"
    assert "at 16, 15 after 4 steps" in run("computer_use.py", server)
    calls = check_program(server, "computer use")
    assert [(call.thread, call.seq) for call in calls] == [(0, n) for n in range(4)]
    for call in calls:
        url = call.body["messages"][0]["content"][0]["image_url"]["url"]
        assert url.startswith("data:image/png;base64,iVBORw0KGgo")
    told = [e.body["event"] for e in server.events if e.body.get("tool") == "screen"]
    assert told == ["start", "end"] * 4
    server.clear()
    with serving(tmp_path / "log", "--engine-url", server.url, "--state", ":memory:") as gateway:
        env = {**environment(server), "OPENAI_BASE_URL": gateway.base_url}
        command = [sys.executable, str(EXAMPLES / "computer_use.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: programs_of(gateway)[0]["state"] == "ended", 10)
        (program,) = programs_of(gateway)
    assert [call.body for call in server.calls] == [call.body for call in calls]
    assert [program[key] for key in ("name", "calls", "tools")] == ["computer use", 4, 4]
    assert [thread["calls"] for thread in program["threads"]] == [4]


def programs_of(gateway: ServeProcess) -> list[dict[str, Any]]:
    """Return what a server knows."""
    return gateway.ask("GET", "/autellix/v1/programs").json["programs"]


def test_no_example_is_long():
    """Each is read in one go; the demo's own agents are at most 60 lines."""
    for path in EXAMPLES.glob("*.py"):
        if path.name != "demo.py":
            assert len(path.read_text().splitlines()) <= 60, path.name

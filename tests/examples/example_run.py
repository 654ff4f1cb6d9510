"""An example, run as a user runs it, against a server that records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autellix.testing import FakeServer, RecordedCall

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
    return run_python([str(EXAMPLES / name)], server)


def run_python(arguments: list[str], server: FakeServer) -> str:
    """Run Python to its end where an example runs, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def calls_by_session(server: FakeServer) -> list[int]:
    """Return the number of calls of each program, in the order of their arrival."""
    sessions = [call.session for call in server.calls]
    assert None not in sessions
    return [sessions.count(session) for session in dict.fromkeys(sessions)]


def check_program(server: FakeServer, name: str) -> list[RecordedCall]:
    """Return the calls of the one program, after seeing its name and that it ended well."""
    (session,) = {str(call.session) for call in server.calls}
    assert server.wait_event("PUT").body["name"] == name
    assert server.wait_event("DELETE", session).path.endswith("reason=ok")
    return list(server.calls)


def check_fork(calls: list[RecordedCall], root: int = 0) -> None:
    """Fail unless these calls are at the head of threads of their own, forked at one place."""
    threads = {call.thread for call in calls}
    assert len(threads) == len(calls)
    assert root not in threads
    (fork,) = {call.parent for call in calls}
    assert fork is not None
    assert fork.thread == root

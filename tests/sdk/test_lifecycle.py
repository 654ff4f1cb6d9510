"""Session messages: sent aside, bounded, and given up on when nobody wants them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading

import openai
import pytest

import autellix
from autellix import lifecycle, runtime
from autellix.config import Origin
from autellix.frameworks import framework_here
from autellix.testing import FakeServer

from .talk import ASK, Talk


def test_start_heartbeat_and_end(talk: Talk, server: FakeServer):
    """The server hears of the session once, of its life by the lease, and of its end."""
    server.lease_s = 0.15
    with autellix.session("s", conversation="c-7", ttl=90.0, metadata={"user": "u"}) as session:
        talk.ask("hi")
        talk.ask("again")
        beat = server.wait_event("POST")
    start = server.wait_event("PUT")
    assert start.body.pop("framework") == framework_here()
    assert start.body == {
        "pid": os.getpid(), "name": "s", "conversation": "c-7", "ttl_s": 90.0,
        "metadata": {"user": "u"},
    }  # fmt: skip
    assert start.headers["authorization"] == "Bearer sk-fake"
    assert beat.body == {"ids": [session.id]}
    server.wait_event("DELETE", session.id)
    assert [e.method for e in server.events].count("PUT") == 1
    assert server.calls[0].headers["x-autellix-conversation"] == "c-7"


def test_a_start_says_only_what_a_server_takes(talk: Talk, server: FakeServer):
    """A long name is cut, too much metadata and an impossible conversation are left out."""
    with autellix.session("n\n" + "x" * 200, conversation="a b", metadata={"k": "v" * 3000}):
        talk.ask("hi")
    start = server.wait_event("PUT")
    start.body.pop("framework")
    assert start.body == {"pid": os.getpid(), "name": "n" + "x" * 127}
    assert "x-autellix-conversation" not in server.calls[0].headers


def test_a_session_that_calls_nobody_is_never_sent(server: FakeServer):
    """No call, no message, no thread."""
    with autellix.session():
        pass
    assert autellix.flush()
    assert not server.events
    assert runtime.get_runtime().lifecycle_if_any is None


def test_a_restarted_server_is_told_again(talk: Talk, server: FakeServer):
    """What it does not know any more is started again."""
    server.lease_s = 0.15
    with autellix.session() as session:
        talk.ask("hi")
        server.wait_event("PUT")
        server.clear()
        server.unknown.add(session.id)
        assert server.wait_event("PUT").session == session.id


def test_a_plain_server_gets_tags_and_no_more_messages(talk: Talk, server: FakeServer):
    """404 to the first message: calls keep their headers, and nothing else is ever sent."""
    server.sessions = False
    with autellix.session() as session:
        talk.ask("one")
        assert autellix.flush(5)
        talk.ask("two")
    with autellix.session():
        talk.ask("three")
    assert autellix.flush(5)
    assert len(server.events) == 1
    assert server.calls[1].headers["x-session-id"] == session.id
    assert set(autellix.status().server.values()) == {"plain"}


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusing_server_is_left_alone(
    status: int, talk: Talk, server: FakeServer, caplog: pytest.LogCaptureFixture
):
    """One line in the log, and no second try."""
    server.session_status = status
    with caplog.at_level(logging.ERROR, "autellix"), autellix.session():
        talk.ask("one")
        assert autellix.flush(5)
    assert autellix.flush(5)
    assert len(server.events) == 1
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert len(server.calls) == 1


def test_an_unwell_server_is_asked_again_later(
    talk: Talk, server: FakeServer, caplog: pytest.LogCaptureFixture
):
    """5xx: messages wait, calls go on, one warning; then they arrive in order."""
    server.session_status = 503
    with caplog.at_level(logging.WARNING, "autellix"), autellix.session():
        talk.ask("one")
        server.wait_event("PUT")
        assert not autellix.flush(0.2)
        talk.ask("two")
        server.session_status = None
    assert autellix.flush(5)
    assert [e.method for e in server.events][-2:] == ["PUT", "DELETE"]
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_a_refused_port_delays_nobody(talk: Talk):
    """Nothing listens: the user sees the client's own error, and the exit takes no time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
    with client, autellix.session(), pytest.raises(openai.APIConnectionError):
        client.completions.create(model="fake", prompt="hi")
    autellix.flush(0.3)
    assert autellix.status().server == {f"http://127.0.0.1:{port}": "unreachable"}


def test_a_port_that_accepts_nothing_delays_nobody(server: FakeServer):
    """Messages to a black hole hang on the background thread only, and the exit gives up."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        program = (
            "import autellix, time, sys\n"
            "from autellix.config import Origin\n"
            "autellix.init(scope='process', timeout=60)\n"
            "with autellix.session() as session:\n"
            f"    session.touch(Origin('http', '127.0.0.1', {hole.getsockname()[1]}), None)\n"
            "    assert not autellix.flush(0.1)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert done.returncode == 0


def test_the_queue_is_bounded(server: FakeServer):
    """A server that never answers costs a bounded number of messages; the oldest go first."""
    sender = lifecycle.Lifecycle(runtime.get_runtime())
    origin = Origin("http", "127.0.0.1", 1)
    sender._start = lambda: False  # type: ignore[method-assign]
    for _ in range(lifecycle.QUEUE_MAX + 5):
        session = runtime.get_runtime().new_session()
        session._peers[origin] = None
        sender.open(session, origin)
    assert sender.dropped == 5
    assert len(sender._peers[origin].pending) == lifecycle.QUEUE_MAX


def test_a_message_that_cannot_be_sent_ends_no_other(
    talk: Talk, server: FakeServer, caplog: pytest.LogCaptureFixture
):
    """It is dropped, counted and said; an API key from a file loses its newline."""
    autellix.init(server.url, api_key="sk-1\n")
    with autellix.session():
        talk.ask("one")
    assert autellix.flush(5)
    assert [e.headers["authorization"] for e in server.events] == ["Bearer sk-1"] * 2
    autellix.init(api_key="sk-1\nx")
    with caplog.at_level(logging.WARNING, "autellix"), autellix.session():
        talk.ask("two")
        assert autellix.flush(5)
    autellix.init(api_key="sk-2")
    with autellix.session() as session:
        talk.ask("three")
    assert autellix.flush(5)
    assert server.wait_event("DELETE", session.id)
    status = autellix.status()
    assert status.dropped == status.errors == 2
    assert any("cannot be sent" in record.message for record in caplog.records)


def test_a_dead_sender_is_started_again(talk: Talk, server: FakeServer):
    """Whatever ended the thread, the next message starts another."""
    sender = runtime.get_runtime().lifecycle
    sender._worker = threading.Thread()  # never started: not alive
    with autellix.session():
        talk.ask("one")
    assert autellix.flush(5)
    assert [e.method for e in server.events] == ["PUT", "DELETE"]


def test_tool_hints(talk: Talk, server: FakeServer):
    """Start and end of a tool call, with its thread and how long it took."""

    @autellix.tool("lookup")
    def lookup() -> str:
        return "found"

    with autellix.session() as session:
        talk.ask("hi")
        with autellix.tool("search"):
            assert lookup() == "found"
        with pytest.raises(ZeroDivisionError), autellix.tool("broken"):
            raise ZeroDivisionError
    assert autellix.flush(5)
    hints = [e for e in server.events if e.path.endswith("/tools")]
    assert {e.session for e in hints} == {session.id}
    assert [(e.body["event"], e.body["tool"]) for e in hints] == [
        ("start", "search"), ("start", "lookup"), ("end", "lookup"), ("end", "search"),
        ("start", "broken"), ("end", "broken"),
    ]  # fmt: skip
    assert hints[0].body["thread"] == 0
    assert hints[0].body["id"] == hints[3].body["id"] != hints[1].body["id"]
    assert hints[3].body["duration_s"] >= hints[2].body["duration_s"] >= 0
    assert [e.body.get("ok") for e in hints[-2:]] == [None, False]


def test_two_servers_are_two_lives(talk: Talk, server: FakeServer):
    """A session that calls two servers starts and ends on both, and a dead one harms none."""
    with FakeServer(sessions=False) as other, openai.OpenAI(base_url=other.base_url) as client:
        with autellix.session() as session:
            talk.ask("here")
            client.completions.create(model="fake", prompt="there")
        assert autellix.flush(5)
        assert other.calls[0].session == server.calls[0].session == session.id
        assert other.calls[0].seq == 1
    assert server.wait_event("DELETE").session == session.id


def test_a_forked_child_that_exits_normally_does_not_wait(talk: Talk, server: FakeServer):
    """The parent's exit handler is not the child's, whatever was queued at the fork."""
    code = (
        ASK + "import os\n"
        "ask()\n"
        "assert autellix.flush(5)\n"
        "sender = autellix.runtime.get_runtime().lifecycle\n"
        "sender._wake.acquire()\n"  # as if its thread were at work
        "pid = os.fork()\n"
        "if pid == 0: raise SystemExit(0)\n"
        "sender._wake.release()\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [e.method for e in server.events].count("DELETE") == 1


def test_a_late_call_to_another_server_opens_nothing_there(talk: Talk, server: FakeServer):
    """An ended session is not started again by a straggler."""
    with autellix.session() as session:
        talk.ask("hi")
    with FakeServer() as other, openai.OpenAI(base_url=other.base_url) as client:
        session.run(client.completions.create, model="fake", prompt="late")
        assert autellix.flush(5)
        assert other.calls[0].source == "late"
        assert not other.events


def test_shutdown_ends_what_is_open_and_starts_again(talk: Talk, server: FakeServer):
    """After shutdown the thread is gone; a later session works as the first did."""
    autellix.start_session("one")
    talk.ask("one")
    autellix.shutdown()
    assert server.wait_event("DELETE").session == talk.calls["one"].session
    with autellix.session():
        talk.ask("two")
    assert autellix.flush(5)
    assert [e.method for e in server.events].count("DELETE") == 2


def test_a_framework_is_known_by_its_modules():
    """The most particular one wins; a process without any has none."""
    assert framework_here({"json", "os"}) is None
    assert framework_here({"openai"}) == "OpenAI"
    assert framework_here({"openai", "langchain_core", "langgraph.graph"}) == "LangGraph"

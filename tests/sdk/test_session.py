"""Sessions: as a block, a decorator, a handle, and by themselves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

import autellix
from autellix.testing import FakeServer

from .talk import ASK, Talk, run


def test_a_script_without_a_session_gets_one_at_its_first_call(talk: Talk, server: FakeServer):
    """Two calls outside every block share one process session, opened by the first."""
    assert autellix.current_session() is None
    talk.ask("one")
    talk.ask("two")
    (id,) = talk.sessions
    assert id is not None
    assert [c.source for c in server.calls] == ["process", "process"]
    assert talk.threads == {"one": (0, 0), "two": (0, 1)}
    assert server.wait_event("PUT").session == id


def test_a_block_is_a_session_and_ends(talk: Talk, server: FakeServer):
    """Calls in the block carry its id; the server hears of start and end."""
    with autellix.session("trip") as session:
        talk.ask("inside")
        assert autellix.current_session() is session
    assert talk.calls["inside"].session == session.id
    assert server.wait_event("PUT").body["name"] == "trip"
    assert server.wait_event("DELETE").path.endswith(f"{session.id}?reason=ok")
    assert session.state == "ended"


async def test_async_with_and_two_sessions_at_once_do_not_mix(talk: Talk):
    """Concurrent sessions in one loop keep their calls apart."""

    async def agent(name: str) -> str:
        async with autellix.session(name) as session:
            for turn in range(3):
                await talk.aask(f"{name}{turn}")
            return session.id

    ids = dict(zip("abc", await asyncio.gather(*map(agent, "abc")), strict=True))
    assert len(set(ids.values())) == 3
    for text, call in talk.calls.items():
        assert call.session == ids[text[0]]


def test_an_error_ends_the_session_as_an_error(talk: Talk, server: FakeServer):
    """The user's exception passes unchanged, and the end says why."""

    @autellix.session
    def failing() -> None:
        talk.ask("x")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing()
    assert server.wait_event("DELETE").path.endswith("reason=error")


def test_a_decorated_function_is_a_session_per_run(talk: Talk):
    """Bare and with a name; signature and name stay."""

    @autellix.session
    def agent(question: str) -> str:
        talk.ask(question)
        return question.upper()

    @autellix.session("named")
    async def async_agent(question: str) -> str:
        await talk.aask(question)
        session = autellix.current_session()
        assert session is not None
        return str(session.name)

    assert agent("a") == "A"
    assert agent("b") == "B"
    assert agent.__name__ == "agent"
    assert run(async_agent("c")) == "named"
    assert len(talk.sessions) == 3


def test_a_decorated_generator_leaves_its_caller_clean(talk: Talk):
    """Between its steps the caller is outside; all its calls are one session and one thread."""
    autellix.init(scope="explicit")

    @autellix.session
    def agent():
        got = yield talk.ask("g1")
        assert got == "sent"
        yield talk.ask("g2")
        return "end"

    steps = agent()
    next(steps)
    talk.ask("outside")
    steps.send("sent")
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == "end"
    calls = talk.calls
    assert calls["g1"].session == calls["g2"].session != calls["outside"].session
    assert (calls["g1"].thread, calls["g2"].seq) == (0, 1)


async def test_a_decorated_async_generator_may_be_stepped_from_other_tasks(talk: Talk):
    """Each step in its own task: still one session, one thread, and an early close is clean."""

    @autellix.session
    async def agent():
        for turn in range(5):
            await talk.aask(f"turn{turn}")
            yield turn

    steps = agent()
    for _ in range(3):
        await asyncio.create_task(anext(steps))
    await asyncio.create_task(steps.aclose())
    assert len(talk.sessions) == 1
    assert talk.threads == {"turn0": (0, 0), "turn1": (0, 1), "turn2": (0, 2)}
    assert autellix.current_session() is None


def test_a_decorated_tool_that_is_a_generator_keeps_the_callers_session(talk: Talk):
    """A block that sets nothing takes nothing away."""

    @autellix.tool("pages")
    def pages():
        for page in range(2):
            yield talk.ask(f"page{page}")

    autellix.init(scope="explicit")
    steps = pages()
    next(steps)
    with autellix.session() as session:
        next(steps)
    assert talk.calls["page0"].session is None
    assert talk.calls["page1"].session == session.id


def test_after_shutdown_a_new_process_session_begins(talk: Talk):
    """The old one is over; nobody is late for it."""
    talk.ask("one")
    autellix.shutdown()
    talk.ask("two")
    assert len(talk.sessions) == 2
    assert talk.calls["two"].source == "process"


def test_a_nested_session_joins_or_is_new(talk: Talk):
    """Join: the outer one, ended by the outer only. New: its own, which names its parent."""
    with autellix.session("outer") as outer:
        with autellix.session("inner") as joined:
            assert joined is outer
            talk.ask("joined")
        assert outer.state == "open"
        with autellix.session("other", nested="new") as other:
            talk.ask("new")
        talk.ask("after")
    assert talk.calls["new"].session == other.id != outer.id
    assert talk.calls["new"].headers["x-autellix-parent-session"] == outer.id
    assert talk.calls["joined"].session == talk.calls["after"].session == outer.id


def test_the_end_is_sent_at_exit(server: FakeServer):
    """A script that just ends, or fails, says so within its exit."""
    program = ASK + ("import sys\nask()\nif len(sys.argv) > 1: raise SystemError('boom')\n")
    good = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert good.returncode == 0, good.stderr
    assert server.wait_event("DELETE").path.endswith("reason=atexit")
    server.clear()
    bad = subprocess.run([sys.executable, "-c", program, "x"], capture_output=True, timeout=60)
    assert bad.returncode == 1
    assert server.wait_event("DELETE").path.endswith("reason=error")


def test_disabled_means_nothing_at_all(server: FakeServer):
    """With AUTELLIX_ENABLED=0 no header and no message goes out, and blocks are plain blocks."""
    program = ASK + "with autellix.session('s'): ask()\n"
    env = {**os.environ, "AUTELLIX_ENABLED": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=env)
    assert len(server.calls) == 1
    assert server.calls[0].session is None
    assert not server.events

"""Sessions: as a block, a decorator, a handle, and by themselves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

import autellix
from autellix import wire
from autellix.runtime import get_runtime
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


def test_a_wrong_nested_is_complained_of_once_and_joins(talk: Talk, caplog):
    """A typing mistake opens no programs of its own."""
    caplog.set_level("WARNING", "autellix")
    with autellix.session("outer") as outer:
        for _ in range(2):
            with autellix.session("inner", nested="nwe") as inner:
                assert inner is outer
        run_nested = autellix.session(nested="nope")(autellix.current_session)
        assert run_nested() is outer
    said = [record.message for record in caplog.records if "nested" in record.message]
    assert said == ["nested='nwe' is taken for join: allowed are join and new"]


def test_a_handle_that_ends_while_a_call_looks_for_it_does_no_harm(talk: Talk, monkeypatch):
    """Another thread may end it, or begin one, between the count and the look."""

    class Emptied(dict[str, autellix.Session]):
        def __len__(self) -> int:
            return 1  # as it was a moment ago

    monkeypatch.setattr(get_runtime(), "handles", Emptied())
    assert autellix.current_session() is None
    talk.ask("one")
    assert talk.calls["one"].source == "process"
    monkeypatch.undo()

    stop = threading.Event()
    worker = threading.Thread(target=begin_and_end, args=(stop,))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        worker.start()
        for _ in range(3000):
            autellix.current_session()
            tags = autellix.headers()
            assert not tags or wire.SESSION in tags  # between two handles there is no session
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        worker.join()


def begin_and_end(stop: threading.Event) -> None:
    """Begin and end handles until told to stop."""
    while not stop.is_set():
        autellix.end_session(autellix.start_session("brief"))


def test_a_block_that_is_entered_again_ends_with_its_outer_exit(talk: Talk):
    """The same object, inside itself: the inner one joins, and ends nothing."""
    block = autellix.session("x")
    with block as session:
        with block as inner, block:
            assert inner is session
            talk.ask("inner")
        assert session.state == "open"
        assert autellix.current_session() is session
        talk.ask("outer")
    assert session.state == "ended"
    assert autellix.current_session() is None
    assert talk.threads == {"inner": (0, 0), "outer": (0, 1)}


async def test_tasks_that_share_a_block_end_their_own_sessions(talk: Talk):
    """One that joins ends none, whatever the others opened before and after it."""
    block, thread = autellix.session("shared"), autellix.thread("t")
    entered, leave = asyncio.Event(), {name: asyncio.Event() for name in "ajc"}
    seen: dict[str, autellix.Session] = {}

    async def agent(name: str) -> None:
        with thread, block as session:
            seen[name] = session
            entered.set()
            await leave[name].wait()
            await talk.aask(name)
        assert autellix.current_session() is not session or name == "j"

    async def joiner() -> None:
        with autellix.session("mine") as mine:
            await agent("j")
            assert autellix.current_session() is mine
            assert mine.state == "open"

    with autellix.session("outside"):
        pass  # so that no call goes to a session of the process
    tasks = {}
    for name, made in (("a", agent("a")), ("j", joiner()), ("c", agent("c"))):
        tasks[name] = asyncio.create_task(made)
        await entered.wait()
        entered.clear()
    for name in "jac":
        assert seen[name].state == "open"
        leave[name].set()
        await tasks[name]
        assert seen[name].state == "ended"
    assert {name: call.session for name, call in talk.calls.items()} == {
        name: session.id for name, session in seen.items()
    }


def test_threads_that_share_a_block_end_their_own_sessions(talk: Talk):
    """However they are interleaved, each session ends once, with its own block."""
    block = autellix.session("shared")
    wrong: list[str] = []

    def work() -> None:
        for _ in range(300):
            with block as session:
                if autellix.current_session() is not session or session.state != "open":
                    wrong.append("inside")
            if session.state != "ended" or autellix.current_session() is session:
                wrong.append("after")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_an_id_that_is_used_again_counts_on(talk: Talk):
    """One after the other goes on where the first was; two at once share no thread."""
    for text in ("one", "two"):
        with autellix.session(id="run-7"):
            talk.ask(text)
    first = autellix.start_session(id="run-8")
    with autellix.session(id="run-8", nested="new"):
        talk.ask("beside")
        assert first.run(autellix.headers)["X-Autellix-Thread"] == "0"
    first.end()
    assert (talk.threads["one"], talk.threads["two"]) == ((0, 0), (0, 1))
    thread, seq = talk.threads["beside"]
    assert (thread or 0) >= 10_000_000
    assert seq == 0


def test_what_is_no_text_loses_no_tags(talk: Talk, server: FakeServer):
    """Numbers become texts, and metadata that is no JSON is left out."""
    with autellix.session(7, id=8, conversation=42, metadata={(1, 2): 3}):  # type: ignore[call-overload]
        talk.ask("hi")
    start = server.wait_event("PUT", "8")
    assert (start.body["name"], start.body["conversation"]) == ("7", "42")
    assert "metadata" not in start.body
    assert server.calls[0].session == "8"
    assert server.calls[0].headers["x-autellix-conversation"] == "42"
    assert autellix.status().errors == 0


async def test_handles_of_requests_are_not_shared(talk: Talk):
    """Two threads or tasks that start under one name, or none, have a session each."""

    def request(name: str | None) -> autellix.Session:
        session = autellix.start_session(name)
        assert autellix.start_session(name) is session
        return session

    async def task(name: str | None) -> autellix.Session:
        return request(name)

    opened = [await asyncio.to_thread(request, name) for name in ("chat", "chat", None, None)]
    opened += await asyncio.gather(*map(task, ("chat", "chat")))
    assert len({session.id for session in opened}) == 6
    autellix.end_session()
    assert {session.state for session in opened} == {"open"}
    with_id = autellix.start_session("chat", id="run-7")
    assert await asyncio.to_thread(autellix.start_session, id="run-7") is with_id
    autellix.end_session()
    assert with_id.state == "ended"
    autellix.end_session()
    assert {session.state for session in opened} == {"open"}
    with autellix.session("users", nested="new"):
        for session in opened[1:]:
            session.end()
        autellix.end_session()
    assert opened[0].state == "open"
    opened[0].end()


def test_the_end_is_sent_at_exit(server: FakeServer):
    """A script that just ends, or fails, says so within its exit."""
    program = ASK + ("import sys\nask()\nif len(sys.argv) > 1: raise SystemError('boom')\n")
    good = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    assert good.returncode == 0, good.stderr
    assert server.wait_event("DELETE").path.endswith("reason=atexit")
    server.clear()
    bad = subprocess.run([sys.executable, "-c", program, "x"], capture_output=True, timeout=240)
    assert bad.returncode == 1
    assert server.wait_event("DELETE").path.endswith("reason=error")


def test_disabled_means_nothing_at_all(server: FakeServer):
    """With AUTELLIX_ENABLED=0 no header and no message goes out, and blocks are plain blocks."""
    program = ASK + "with autellix.session('s'): ask()\n"
    env = {**os.environ, "AUTELLIX_ENABLED": "0"}
    program += (
        "with autellix.session() as s:\n"
        "    carrier = {}\n"
        "    autellix.inject(carrier, baggage=True)\n"
        "    assert carrier == autellix.headers() == autellix.headers(s) == s.env() == {}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, env=env)
    assert len(server.calls) == 1
    assert server.calls[0].session is None
    assert not server.events

"""What a call carries beyond session and thread: roles, several parents, another dialect."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import autellix
from autellix import wire
from autellix.errors import ConfigError
from autellix.testing import FakeServer

from .happens_before import dag_of
from .talk import ASK, Talk


def test_a_thread_may_have_several_parents(talk: Talk):
    """The editor comes after writer and checker, whichever way they are named."""
    with autellix.session():
        talk.ask("plan")
        with autellix.thread("writer") as writer:
            talk.ask("write")
        with autellix.thread("checker") as checker:
            talk.ask("check")
        assert writer is not None
        assert checker is not None
        with autellix.thread("editor", parents=[writer, checker.number]):
            talk.ask("edit")
            talk.ask("edit more")
        talk.ask("end")
    assert talk.calls["edit"].parents == ((1, 1), (2, 1))
    assert talk.calls["edit"].parent == (1, 1)
    assert dag_of(talk.server) == {
        "plan": set(), "write": {"plan"}, "check": {"write"}, "edit": {"check"},
        "edit more": {"edit"}, "end": {"edit more"},
    }  # fmt: skip


async def test_parents_of_threads_side_by_side(talk: Talk):
    """Two named threads at once, then one that follows both, and again after they went on."""

    async def part(name: str, text: str) -> autellix.ThreadInfo | None:
        async with autellix.thread(name):
            await talk.aask(text)
            return autellix.current_thread()

    async with autellix.session():
        await talk.aask("plan")
        for turn in range(2):
            talk.server.together(f"a{turn}", f"b{turn}")
            both = await asyncio.gather(part("a", f"a{turn}"), part("b", f"b{turn}"))
            async with autellix.thread("judge", parents=[p for p in both if p is not None]):
                await talk.aask(f"judge{turn}")
    found = dag_of(talk.server)
    assert found["a0"] == found["b0"] == {"plan"}
    assert found["judge0"] == {"a0", "b0"}
    assert found["a1"] == found["b1"] == {"judge0"}
    assert found["judge1"] == {"a1", "b1"}


def test_more_parents_than_a_header_holds_are_left_out(talk: Talk):
    """At most 16, and 128 bytes; the call goes out."""
    with autellix.session():
        infos = []
        for number in range(40):
            with autellix.thread(f"t{number}"):
                talk.ask(f"t{number}")
                infos.append(autellix.current_thread())
        with autellix.thread("last", parents=[i for i in infos if i is not None]):
            talk.ask("last")
    assert len(talk.calls["last"].parents) == wire.PARENTS_MAX
    assert len(talk.calls["last"].headers["x-autellix-parent"]) <= wire.VALUE_BYTES_MAX


async def test_a_thread_without_a_call_says_where_it_was_forked(talk: Talk):
    """A task that only waits for a tool, and starts the calls elsewhere."""

    async def only_starts() -> None:
        with autellix.tool("search"):
            await asyncio.gather(talk.aask("a"), talk.aask("b"))
        await talk.aask("c")

    talk.server.together("a", "b")
    async with autellix.session():
        await talk.aask("plan")
        await asyncio.create_task(only_starts())
        await talk.aask("end")
    assert talk.calls["a"].parents == ((1, 0), (0, 1))
    assert dag_of(talk.server) == {
        "plan": set(), "a": {"plan"}, "b": {"plan"}, "c": {"a", "b"}, "end": {"c"},
    }  # fmt: skip


def test_a_role_is_sent_and_inherited(talk: Talk):
    """By the session, its children, and what a carrier takes along; none by default."""
    with autellix.session():
        talk.ask("none")
    with autellix.session(role="background") as session:
        talk.ask("outer")
        with autellix.session():
            talk.ask("joined")
        with autellix.session(nested="new"):
            talk.ask("child")
        with autellix.session(nested="new", role="delegated"):
            talk.ask("other")
        carrier: dict[str, str] = {}
        autellix.inject(carrier)
        assert session.env()["AUTELLIX_ROLE"] == "background"
    with autellix.attach({**carrier, "x-autellix-session": "elsewhere"}):
        talk.ask("attached")
    roles = {text: call.headers.get("x-autellix-role") for text, call in talk.calls.items()}
    assert roles == {
        "none": None, "outer": "background", "joined": "background", "child": "background",
        "other": "delegated", "attached": "background",
    }  # fmt: skip


def test_a_role_by_environment_and_a_wrong_one(server: FakeServer, talk: Talk):
    """``AUTELLIX_ROLE`` is for programs that say nothing; a wrong role is ignored, never raised."""
    code = ASK + "os.environ['AUTELLIX_ROLE'] == 'background' and ask('env')"
    env = {**__import__("os").environ, "AUTELLIX_ROLE": "background"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=240)
    assert talk.calls["env"].headers["x-autellix-role"] == "background"
    with autellix.session(role="urgent"):
        talk.ask("wrong")
    assert "x-autellix-role" not in talk.calls["wrong"].headers
    with pytest.raises(ConfigError, match="role='urgent': allowed are interactive"):
        autellix.init(role="urgent")


async def test_the_dialect_of_dynamo(talk: Talk, server: FakeServer):
    """Its three headers instead of ours: a session is a thread, and the last request is marked."""
    autellix.init(dialect="dynamo")
    server.together("a", "b")
    async with autellix.session() as session:
        await talk.aask("plan")
        await asyncio.gather(talk.aask("a"), talk.aask("b"))
        with autellix.tool("search"):  # no message of ours, as `events` shows below
            pass
        async with autellix.session(nested="new") as inner:
            await talk.aask("inner")
    assert await asyncio.to_thread(autellix.flush, 5)
    sent = {
        text: (call.headers["x-dynamo-session-id"], call.headers.get("x-dynamo-parent-session-id"))
        for text, call in talk.calls.items()
        if text != "."
    }
    children = {sent.pop("a"), sent.pop("b")}
    assert children == {(f"{session.id}.1", session.id), (f"{session.id}.2", session.id)}
    assert sent == {"plan": (session.id, None), "inner": (inner.id, session.id)}
    last = [c for c in server.calls if c.headers.get("x-dynamo-session-final")]
    assert {c.headers["x-dynamo-session-id"] for c in last} == {session.id, inner.id}
    assert last[0].body == {
        "model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "."}],
    }  # fmt: skip
    assert all(call.session is None for call in server.calls)
    assert not server.events
    with pytest.raises(ConfigError, match="dialect='other': allowed are autellix, dynamo"):
        autellix.init(dialect="other")


async def test_bind_and_propagate_hold_for_coroutines_and_generators(talk: Talk):
    """What is bound runs in its session to its end, not only until it first waits."""
    first, second = autellix.start_session("first"), autellix.start_session("second")

    async def later(text: str) -> None:
        await asyncio.sleep(0)
        await talk.aask(text)

    def steps():
        talk.ask("step")
        yield autellix.current_session()

    class Later:
        async def __call__(self, text: str) -> None:
            await later(text)

    await first.bind(later)("bound")
    await first.bind(Later())("bound object")
    await first.bind(lambda: later("bound lambda"))()
    with autellix.session(nested="new") as third:
        carried = autellix.propagate(steps)
    assert list(carried()) == [third]
    for text in ("bound", "bound object", "bound lambda"):
        assert talk.calls[text].session == first.id
    assert talk.calls["step"].session == third.id
    first.end()
    second.end()

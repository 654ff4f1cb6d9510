"""The rows of the context table that need nothing but Python and the OpenAI client."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import autellix
from autellix import branches
from autellix.testing import FakeServer

from .happens_before import is_one_fork_and_join
from .talk import ASK, Talk, run

MESSAGES = [{"role": "user", "content": "hi"}]


def _call_every_way(client: openai.OpenAI) -> int:
    """Make one call in every way of the sync client; returns how many."""
    chat = client.chat.completions
    chat.create(model="fake", messages=MESSAGES)
    chat.with_raw_response.create(model="fake", messages=MESSAGES).parse()
    with chat.with_streaming_response.create(model="fake", messages=MESSAGES) as response:
        response.read()
    list(chat.create(model="fake", messages=MESSAGES, stream=True))
    client.with_options(timeout=5).chat.completions.create(model="fake", messages=MESSAGES)
    client.completions.create(model="fake", prompt="hi")
    client.embeddings.create(model="fake", input="hi", encoding_format="float")
    if hasattr(client, "responses"):  # not before 1.66
        client.responses.create(model="fake", input="hi")
    parse = getattr(chat, "parse", None) or client.beta.chat.completions.parse
    parse(model="fake", messages=MESSAGES)
    stream = getattr(chat, "stream", None) or client.beta.chat.completions.stream
    with stream(model="fake", messages=MESSAGES) as events:
        list(events)
    return 10 if hasattr(client, "responses") else 9


def test_every_way_to_call_is_tagged_and_other_paths_are_not(talk: Talk, server: FakeServer):
    """Raw, streaming, parsed, embeddings, responses: one session, numbered in order."""
    with autellix.session() as session:
        count = _call_every_way(talk.client)
        talk.client.models.list()
    assert [c.session for c in server.calls] == [session.id] * count
    assert [c.seq for c in server.calls] == list(range(count))
    assert {c.thread for c in server.calls} == {0}


def test_the_module_client_is_tagged(server: FakeServer):
    """``openai.chat`` without a client object."""
    openai.api_key = "sk-fake"
    try:
        with autellix.session() as session:
            openai.chat.completions.create(model="fake", messages=MESSAGES)
    finally:
        openai._client.close() if hasattr(openai, "_client") else None
        openai._reset_client()
    assert server.calls[0].session == session.id


def test_a_client_made_before_is_tagged(server: FakeServer):
    """The hook sits on the class: a client from before ``init`` has it too."""
    autellix.uninstall()
    client = openai.OpenAI()
    autellix.init(enabled=True)
    with autellix.session() as session:
        client.chat.completions.create(model="fake", messages=MESSAGES)
    client.close()
    assert server.calls[0].session == session.id


def test_a_stream_may_be_read_after_the_end(talk: Talk, server: FakeServer):
    """The tag is set when the call is made."""
    with autellix.session() as session:
        stream = talk.ask("hi", stream=True)
    assert len(list(stream)) > 2
    assert server.calls[0].session == session.id
    assert server.calls[0].source == "ctx"


def test_a_retry_is_the_same_call(talk: Talk, server: FakeServer):
    """Both attempts carry one call id and one number; the client counts the attempts."""
    server.status_next.append(500)
    with autellix.session():
        talk.ask("hi")
        talk.ask("next")
    first, second, third = server.calls
    assert first.call == second.call != third.call
    assert (first.seq, second.seq, third.seq) == (0, 0, 1)
    assert second.headers["x-stainless-retry-count"] == "1"


@pytest.mark.skipif(
    "idempotency_key = self._idempotency_key()" not in inspect.getsource(openai._base_client),
    reason="this client gives each attempt an id of its own",
)
def test_a_retry_is_the_same_call_whatever_came_between(talk: Talk, server: FakeServer):
    """Other calls of its thread between two attempts change neither its id nor its number."""

    def answered(response: Any) -> None:
        if response.status_code == 500:
            for number in range(branches.CALLS_MAX // 3):
                talk.ask(f"between {number}")

    hooks = {"response": [answered]}
    with (
        openai.DefaultHttpxClient(event_hooks=hooks) as http,
        openai.OpenAI(max_retries=1, http_client=http) as client,
        autellix.session(),
    ):
        talk.ask("before")
        server.status_next.append(500)
        client.chat.completions.create(model="fake", messages=MESSAGES)
        talk.ask("after")
    attempts = [call for call in server.calls if call.text == "hi"]
    others = [call for call in server.calls if call.text.startswith(("between", "after"))]
    assert len({call.call for call in attempts}) == 1
    assert [call.seq for call in attempts] == [1, 1]
    assert [call.seq for call in others] == [*range(2, 3 + branches.CALLS_MAX // 3)]
    assert len({call.call for call in others}) == len(others)


def test_the_memory_of_a_threads_calls_is_bounded():
    """So many calls are known again; a client without stable ids means the latest."""
    branch = branches.Branch(0, threading.current_thread(), None, None)
    assert branch.retried("first") == ("first", 0)
    total = branches.CALLS_MAX * 5
    assert [branch.next_seq(f"c{n}") for n in range(1, total)] == list(range(1, total))
    for number in range(total - branches.CALLS_MAX // 2, total):
        assert branch.retried(f"c{number}") == (f"c{number}", number)
    assert branch.retried("unheard of") == (f"c{total - 1}", total - 1)
    assert len(branch.calls) <= branches.CALLS_MAX
    assert branch.next_seq("next") == total


async def test_tasks_fork_threads_and_their_parent_joins(talk: Talk):
    """gather: three child threads forked after the first call; the next call is the parent's."""
    async with autellix.session():
        await talk.aask("plan")
        talk.server.together("part0", "part1", "part2")
        await asyncio.gather(*(talk.aask(f"part{i}") for i in range(3)))
        await talk.aask("join")
    threads = talk.threads
    assert threads["plan"] == (0, 0)
    assert threads["join"] == (0, 1)
    assert sorted(threads[f"part{i}"] for i in range(3)) == [(1, 0), (2, 0), (3, 0)]
    assert {talk.calls[f"part{i}"].parent for i in range(3)} == {(0, 1)}
    assert talk.calls["plan"].parent is None
    assert is_one_fork_and_join(talk.server, "plan", "part0", "part1", "part2")


def test_the_main_task_of_a_loop_is_its_threads_thread(talk: Talk):
    """A script that calls, runs a loop, and calls again is one chain, also without a session."""

    async def main() -> None:
        await asyncio.gather(talk.aask("a"), talk.aask("b"))
        await talk.aask("in loop")

    talk.ask("before")
    talk.server.together("a", "b")
    run(main())
    talk.ask("after")
    assert talk.threads["before"] == (0, 0)
    assert talk.threads["in loop"] == (0, 1)
    assert talk.threads["after"] == (0, 2)
    assert {talk.threads["a"][0], talk.threads["b"][0]} == {1, 2}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TaskGroup is new in 3.11")
async def test_a_task_group_and_to_thread_and_call_later(talk: Talk, server: FakeServer):
    """What copies the context by itself is in the session."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    later: list[asyncio.Task[object]] = []

    def call_later() -> None:
        later.append(loop.create_task(talk.aask("later")))
        done.set()

    async with autellix.session() as session:
        async with asyncio.TaskGroup() as group:
            group.create_task(talk.aask("g1"))
            group.create_task(talk.aask("g2"))
        await asyncio.to_thread(talk.ask, "thread")
        loop.call_later(0.001, call_later)
        await done.wait()
        await later[0]
    assert len(server.calls) == 4
    assert talk.sessions == {session.id}


async def test_run_in_executor(talk: Talk):
    """Asyncio copies no context here; the thread patch does."""
    loop = asyncio.get_running_loop()
    async with autellix.session() as session:
        await loop.run_in_executor(None, talk.ask, "job")
    assert talk.calls["job"].session == session.id
    assert talk.calls["job"].parent == (0, 0)


def test_a_pool_and_a_thread(talk: Talk):
    """submit, map and Thread carry the session; each job is a thread of its own."""
    with autellix.session() as session:
        talk.ask("first")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(talk.ask, ["m1", "m2"]))
            pool.submit(talk.ask, "s").result()
        thread = threading.Thread(target=talk.ask, args=("t",))
        thread.start()
        thread.join()
        talk.ask("last")
    assert talk.sessions == {session.id}
    assert talk.threads["last"] == (0, 1)
    assert {talk.calls[t].parent for t in ("m1", "m2", "s", "t")} == {(0, 1)}
    assert 0 not in {talk.threads[t][0] for t in ("m1", "m2", "s", "t")}


def test_a_pools_worker_does_not_keep_the_session_it_was_born_in(talk: Talk):
    """Later jobs of the same workers belong to who submits them, or to nobody."""
    autellix.init(scope="explicit")
    with ThreadPoolExecutor(1) as pool:
        with autellix.session() as first:
            pool.submit(talk.ask, "in first").result()
        pool.submit(talk.ask, "in none").result()
        with autellix.session() as second:
            pool.submit(talk.ask, "in second").result()
        pool.submit(talk.ask, "in none again").result()
    calls = talk.calls
    assert calls["in first"].session == first.id
    assert calls["in second"].session == second.id
    assert calls["in none"].session is calls["in none again"].session is None


async def test_a_task_that_outlives_its_session_is_late(talk: Talk):
    """It keeps its session, and says that it is late."""
    go = asyncio.Event()

    async def background() -> None:
        await go.wait()
        await talk.aask("late")

    async with autellix.session() as session:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
    go.set()
    await task
    assert talk.calls["late"].session == session.id
    assert talk.calls["late"].source == "late"
    assert autellix.status().late == 1


async def test_a_worker_from_before_needs_propagate_or_the_single_session(talk: Talk):
    """A queue's worker started earlier: the only live session is taken; propagate is exact."""
    autellix.init(scope="auto")
    queue: asyncio.Queue[object] = asyncio.Queue()

    async def worker() -> None:
        for _ in range(2):
            job = await queue.get()
            await job()  # type: ignore[operator]
            queue.task_done()

    task = asyncio.create_task(worker())
    async with autellix.session() as session:

        async def plain() -> None:
            await talk.aask("plain")

        async def exact() -> None:
            await talk.aask("exact")

        queue.put_nowait(plain)
        queue.put_nowait(autellix.propagate(exact))
        await queue.join()
    await task
    assert talk.calls["plain"].session == talk.calls["exact"].session == session.id
    assert talk.calls["plain"].source == "single"
    assert talk.calls["exact"].source == "ctx"


def test_two_live_sessions_leave_a_lost_call_untagged(talk: Talk):
    """No guess is made when more than one session lives."""
    first = autellix.start_session("a")
    second = autellix.start_session("b")
    lost = threading.Thread(target=talk.ask, args=("lost",))
    from autellix.threads import start_plain

    start_plain(lost)
    lost.join()
    assert talk.calls["lost"].session is None
    assert autellix.status().untagged == 1
    first.end()
    second.end()


def _child(text: str) -> None:
    with openai.OpenAI() as client:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}])


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_child_inherits_and_never_ends(talk: Talk, server: FakeServer):
    """Same session, a thread number of its own range, no second end."""
    with autellix.session() as session:
        talk.ask("parent")
        process = multiprocessing.get_context("fork").Process(target=_child, args=("child",))
        process.start()
        process.join(120)
        assert process.exitcode == 0
        assert not [e for e in server.events if e.method == "DELETE"]
        talk.ask("parent again")
    child = talk.calls["child"]
    assert child.session == session.id
    assert child.thread is not None
    assert child.thread >= 10_000_000
    assert child.parent == (0, 1)
    assert talk.threads["parent again"] == (0, 1)
    autellix.flush()
    assert [e.method for e in server.events].count("DELETE") == 1


PROGRAM = ASK + "ask('child')"


def test_a_spawned_process_needs_the_carrier(talk: Talk, server: FakeServer):
    """Without it the child is a program of its own; with it, a thread of ours, and a guest."""
    with autellix.session() as session:
        talk.ask("parent")
        carried = {**os.environ, **session.env()}
        subprocess.run([sys.executable, "-c", PROGRAM], env=carried, check=True, timeout=240)
        subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=240)
        autellix.flush()
        with_carrier, without = list(server.calls)[1:]
        assert with_carrier.session == session.id
        assert with_carrier.parent == (0, 1)
        assert with_carrier.source == "process"
        assert without.session not in (None, session.id)
        assert not [e for e in server.events if e.method == "DELETE" and session.id in e.path]


SPAWNED = """
import autellix, openai
with autellix.attach({carrier!r}), openai.OpenAI() as client:
    client.completions.create(model="fake", prompt="spawned")
"""


def test_multiprocessing_spawn_with_attach(talk: Talk, server: FakeServer):
    """Inject here, attach there."""
    with autellix.session() as session:
        talk.ask("parent")
        carrier: dict[str, str] = {}
        autellix.inject(carrier)
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=exec, args=(SPAWNED.format(carrier=carrier),))
        process.start()
        process.join(240)
        assert process.exitcode == 0
    assert talk.calls["spawned"].session == session.id
    assert talk.calls["spawned"].parent == (0, 1)


def test_a_block_inside_a_generator_is_the_documented_limit(talk: Talk):
    """``with`` in a generator leaks between its steps; the decorator is the way."""
    autellix.init(scope="explicit")

    def steps():
        with autellix.session():
            talk.ask("in")
            yield

    generator = steps()
    next(generator)
    talk.ask("between")
    generator.close()
    talk.ask("after")
    assert talk.calls["between"].session == talk.calls["in"].session  # the leak
    assert talk.calls["after"].session is None  # ends with the block


def test_explicit_threads(talk: Talk):
    """A named thread is one chain wherever it is entered, labels its calls, may have parents."""

    @autellix.thread("planner")
    def plan(text: str) -> None:
        talk.ask(text)

    with autellix.session():
        plan("p1")
        talk.ask("main")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(plan, "p2").result()
        with autellix.thread("writer") as writer:
            talk.ask("w")
            info = autellix.current_thread()
        with autellix.thread("editor", parents=[writer] if writer else None):
            talk.ask("e")
    threads = talk.threads
    assert threads["p1"][0] == threads["p2"][0] == 1
    assert threads["p2"][1] == 1
    assert threads["main"] == (0, 0)
    assert info is not None
    assert (info.number, info.name) == (threads["w"][0], "writer")
    assert talk.calls["w"].node == "writer"
    assert talk.calls["e"].parent == (threads["w"][0], 1)

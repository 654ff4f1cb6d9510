"""Field reports about SDKs like this one, each with what ours does instead, by number."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import autellix
from autellix import arming, hooks, runtime
from autellix.testing import FakeServer

from .talk import ASK, Talk

SDK = Path(autellix.__file__).parent
MESSAGES = [{"role": "user", "content": "hi"}]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_report_01_context_in_thread_pool_jobs(talk: Talk):
    """A pool's job is in the submitter's session, by default."""
    with autellix.session() as session, ThreadPoolExecutor(1) as pool:
        pool.submit(talk.ask, "job").result()
    assert talk.calls["job"].session == session.id


def test_report_02_a_librarys_own_pool(talk: Talk):
    """A library that keeps a pool of its own produces no orphan calls."""

    class Memory:
        pool = ThreadPoolExecutor(1)

        def remember(self, text: str) -> None:
            self.pool.submit(talk.ask, text).result()

    memory = Memory()
    with autellix.session() as first:
        memory.remember("one")
    with autellix.session() as second:
        memory.remember("two")
    Memory.pool.shutdown()
    assert talk.calls["one"].session == first.id
    assert talk.calls["two"].session == second.id


def test_report_03_a_bare_thread(talk: Talk):
    """Thread.start carries the context, and ``run`` is the user's own again."""

    class Worker(threading.Thread):
        def run(self) -> None:
            self.saw = "run" in vars(self)
            talk.ask("bare")

    with autellix.session() as session:
        worker = Worker()
        worker.start()
        worker.join()
    assert talk.calls["bare"].session == session.id
    assert worker.saw is False


async def test_report_04_replies_in_an_executor(talk: Talk):
    """What AutoGen 0.2 does: an async reply runs the sync client in an executor."""

    async def a_generate_reply(text: str) -> None:
        await asyncio.get_running_loop().run_in_executor(None, lambda: talk.ask(text))

    async with autellix.session() as session:
        await a_generate_reply("reply")
    assert talk.calls["reply"].session == session.id


async def test_report_05_sync_tools_keep_context_as_async_ones_do(talk: Talk):
    """Sync and async tools of one agent are in one session."""
    async with autellix.session() as session:
        await asyncio.gather(
            talk.aask("async tool"),
            asyncio.get_running_loop().run_in_executor(None, talk.ask, "sync tool"),
        )
    assert talk.sessions == {session.id}
    assert len(talk.calls) == 2


def test_report_06_pool_workers_pin_no_session(talk: Talk):
    """A worker born inside a session holds neither its context nor the session itself."""
    import weakref

    autellix.init(scope="explicit")
    with ThreadPoolExecutor(1) as pool:
        with autellix.session() as session:
            pool.submit(talk.ask, "in").result()
            alive = weakref.ref(session)
        del session
        pool.submit(talk.ask, "out").result()
        autellix.flush()
        gc.collect()
        assert talk.calls["out"].session is None
        assert alive() is None or alive().state == "ended"  # type: ignore[union-attr]


async def test_report_07_a_decorated_async_generator_resets_no_token(talk: Talk):
    """Closed from another context, nothing is raised and nothing leaks."""

    @autellix.session
    async def agent():
        await talk.aask("a")
        yield 1
        await talk.aask("b")
        yield 2

    steps = agent()
    await contextvars.copy_context().run(lambda: asyncio.ensure_future(anext(steps)))
    await asyncio.create_task(anext(steps))
    await asyncio.create_task(steps.aclose())
    assert len(talk.sessions) == 1
    assert autellix.current_session() is None


async def test_report_08_a_generator_closed_from_another_task(talk: Talk, server: FakeServer):
    """Also by the collector; the session still ends."""

    @autellix.session
    async def agent():
        await talk.aask("a")
        yield 1

    steps = agent()
    await asyncio.create_task(anext(steps))
    del steps
    gc.collect()
    await asyncio.sleep(0)
    ended = await asyncio.to_thread(server.wait_event, "DELETE")
    assert ended.session == talk.calls["a"].session


def test_report_09_exit_in_a_foreign_context():
    """``__exit__`` in another context than ``__enter__`` raises nothing and ends the session."""
    block = autellix.session()
    session = contextvars.copy_context().run(block.__enter__)
    contextvars.copy_context().run(block.__exit__, None, None, None)
    assert session.state == "ended"


def test_report_10_a_streaming_response_is_one_session(talk: Talk):
    """Each step in a fresh copy of the context, as a web framework does: one session."""

    @autellix.session
    def body():
        for part in range(3):
            talk.ask(f"part{part}")
            yield part

    steps = body()
    for _ in range(3):
        contextvars.copy_context().run(next, steps)
    steps.close()
    assert len(talk.sessions) == 1
    assert talk.threads["part2"] == (0, 2)


def test_report_11_no_wrapt_and_uninstall_restores_the_right_class():
    """Only the standard library patches; every method is its original object afterwards."""
    import httpx2
    from openai._base_client import AsyncAPIClient, BaseClient, SyncAPIClient

    arming.arm()
    spots = [(BaseClient, "_build_request"), (httpx2.Client, "send"),
             (ThreadPoolExecutor, "submit"), (threading.Thread, "start")]  # fmt: skip
    originals = [getattr(vars(owner)[name], hooks.MARK) for owner, name in spots]
    autellix.uninstall()
    assert [vars(owner)[name] for owner, name in spots] == originals
    assert "_build_request" not in vars(SyncAPIClient)
    assert "_build_request" not in vars(AsyncAPIClient)
    sources = "".join(p.read_text() for p in SDK.glob("*.py"))
    assert "import wrapt" not in sources


async def test_report_12_aenter_sets_the_variable_in_the_caller(talk: Talk):
    """After ``async with`` the caller is in the session at once, and tasks nest."""
    async with autellix.session() as session:
        assert autellix.current_session() is session
        await asyncio.create_task(talk.aask("nested"))
    assert talk.calls["nested"].session == session.id


async def test_report_13_a_generator_stepped_by_create_task(talk: Talk):
    """Its state is in the generator, so each step finds its session and thread."""

    @autellix.session
    async def agent():
        for turn in range(3):
            yield await talk.aask(f"t{turn}")

    steps = agent()
    for _ in range(3):
        await asyncio.create_task(anext(steps))
    await steps.aclose()
    assert talk.threads == {"t0": (0, 0), "t1": (0, 1), "t2": (0, 2)}
    assert len(talk.sessions) == 1


def test_report_14_raw_responses_are_untouched(talk: Talk):
    """What comes back is exactly what the client makes."""
    with autellix.session():
        raw = talk.client.chat.completions.with_raw_response.create(model="fake", messages=MESSAGES)
        stream = talk.ask("s", stream=True)
    assert type(raw).__module__.startswith("openai.")
    assert raw.parse().choices[0].message.content == "echo: hi"
    assert type(stream) is openai.Stream
    stream.close()


def test_report_15_responses_streaming(talk: Talk):
    """The stream of the Responses API is the client's own object, event for event."""
    with autellix.session():
        stream = talk.client.responses.create(model="fake", input="hi", stream=True)
        kinds = [event.type for event in stream]
    assert type(stream) is openai.Stream
    assert kinds == ["response.created", "response.completed"]


def test_report_16_classes_are_never_replaced():
    """Isinstance and identity of the HTTP client's classes stay."""
    import httpx2

    before = httpx2.AsyncClient
    arming.arm()
    assert httpx2.AsyncClient is before
    assert isinstance(openai.DefaultHttpxClient(), httpx2.Client)


def test_report_17_a_renamed_private_method_falls_to_the_second_net(
    talk: Talk, server: FakeServer, caplog: pytest.LogCaptureFixture
):
    """Without ``_build_request`` there is one warning, and the calls are tagged all the same."""
    from openai._base_client import BaseClient

    autellix.uninstall()
    original = BaseClient._build_request
    renamed = {"openai._base_client": (("openai", "BaseClient", "_gone", hooks.wrap_send),)}
    targets = {**arming._TARGETS, **renamed}
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "autellix"):
        patch.setattr(arming, "_TARGETS", targets)
        autellix.init(enabled=True)
        with autellix.session() as session:
            talk.ask("hi")
        status = autellix.status()
        autellix.uninstall()
    assert BaseClient._build_request is original
    assert server.calls[0].session == session.id
    assert status.by_hook["httpx"] == 1
    assert status.hooks["openai._base_client.BaseClient._gone"] == "missing"
    assert sum("is not in this version" in r.message for r in caplog.records) == 1


def test_report_18_no_http_library_is_imported_and_doctor_proves_it():
    """The SDK imports no HTTP library itself, and ``doctor`` sends real calls."""
    done = python(
        "import sys, autellix\n"
        "with autellix.session(): pass\n"
        "assert not {'httpx', 'httpx2', 'openai', 'requests'} & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr
    report = autellix.doctor()
    assert report.is_good, str(report)
    assert {"openai": "openai", "httpx2": "httpx"}.items() <= {
        f.package: f.hook for f in report.findings
    }.items()


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_report_19_both_http_libraries_are_patched(library: str, server: FakeServer):
    """A call by hand through either is tagged."""
    module = pytest.importorskip(library)
    with autellix.session() as session, module.Client() as client:
        client.post(f"{server.base_url}/chat/completions", json={"messages": MESSAGES})
        client.get(f"{server.base_url}/models")
    assert [c.session for c in server.calls] == [session.id]


def test_report_20_a_foreign_origin_gets_no_header(server: FakeServer):
    """A public provider sees nothing of ours; a configured server is the only one that does."""
    client = openai.OpenAI(base_url="https://api.openai.com/v1", api_key="sk-x")
    options = openai._models.FinalRequestOptions(
        method="post", url="/chat/completions", json_data={"messages": MESSAGES}
    )
    with autellix.session():
        request = client._build_request(options)
    assert not [name for name in request.headers if "autellix" in name or "session" in name]
    assert autellix.status().foreign == 1
    autellix.init("http://other-host:8000")
    with autellix.session(), openai.OpenAI() as local:
        local.chat.completions.create(model="fake", messages=MESSAGES)
    assert server.calls[0].session is None
    client.close()


@pytest.mark.parametrize("number", [21, 22])
def test_report_21_22_the_body_is_never_touched(number: int, talk: Talk, server: FakeServer):
    """Strict servers refuse unknown fields, so the body is byte for byte what it was."""
    with autellix.session(conversation="c-1", metadata={"a": 1}):
        talk.ask("hi")
    tagged = server.calls[0].body
    autellix.uninstall()
    talk.ask("hi")
    assert server.calls[1].session is None
    assert tagged == server.calls[1].body


def test_report_23_instrumenting_twice_wraps_once(talk: Talk):
    """Init again and again: one wrapper, one tag."""
    from openai._base_client import BaseClient

    for _ in range(3):
        autellix.init()
    wrapper = vars(BaseClient)["_build_request"]
    assert not hasattr(getattr(wrapper, hooks.MARK), hooks.MARK)
    with autellix.session():
        talk.ask("hi")
    assert talk.threads["hi"] == (0, 0)
    assert autellix.status().tagged == 1


def test_report_24_the_second_net_yields_to_the_first(talk: Talk):
    """Two layers, one tag."""
    with autellix.session():
        talk.ask("hi")
    assert autellix.status().by_hook == {"openai": 1, "httpx": 0, "event": 0}


def test_report_25_no_global_switch_on_the_call_path(talk: Talk):
    """Sessions in many threads at once never see each other."""

    def agent(name: str) -> str:
        with autellix.session(name) as session:
            for turn in range(3):
                talk.ask(f"{name}{turn}")
            return session.id

    with ThreadPoolExecutor(4) as pool:
        ids = dict(zip("abcd", pool.map(agent, "abcd"), strict=True))
    assert len(set(ids.values())) == 4
    assert all(call.session == ids[text[0]] for text, call in talk.calls.items())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_report_26_after_a_fork(server: FakeServer):
    """The child's flush does not hang, its own session works, the parent's is left alone."""
    code = (
        ASK + "import os\n"
        "with autellix.session('parent'):\n"
        "    ask('parent')\n"
        "    assert autellix.flush(5)\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        with autellix.session('own', nested='new'):\n"
        "            ask('child')\n"
        "        assert autellix.flush(5)\n"
        "        os._exit(0)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "    ask('parent2')\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    server.wait_event("DELETE", server.calls[0].session or "")
    starts = [e.body.get("name") for e in server.events if e.method == "PUT"]
    ends = [e.session for e in server.events if e.method == "DELETE"]
    assert sorted(map(str, starts)) == ["own", "parent"]
    assert len(ends) == len(set(ends)) == 2


def test_report_27_nothing_happens_at_import():
    """No thread, no lock-bearing client, no exit handler until the first session is sent."""
    done = python(
        "import sys, threading, atexit\n"
        "before = atexit._ncallbacks()\n"
        "import autellix\n"
        "assert threading.active_count() == 1\n"
        "assert atexit._ncallbacks() == before\n"
        "with autellix.session(): pass\n"
        "assert threading.active_count() == 1\n"
    )
    assert done.returncode == 0, done.stderr


def test_report_28_context_lost_between_notebook_cells(talk: Talk):
    """A session started in one cell is found in the next, though the variable is gone."""
    session = contextvars.copy_context().run(autellix.start_session, "notebook")
    contextvars.copy_context().run(talk.ask, "cell 2")
    contextvars.copy_context().run(autellix.end_session)
    assert talk.calls["cell 2"].session == session.id
    assert session.state == "ended"


def test_report_29_running_a_cell_again(talk: Talk):
    """Start and end are idempotent, and two sessions at once are no error."""
    first = autellix.start_session("cell")
    assert autellix.start_session("cell") is first
    autellix.end_session()
    autellix.end_session()
    first.end()
    again = autellix.start_session("cell")
    other = autellix.start_session("other")
    assert len({first.id, again.id, other.id}) == 3
    other.end()
    again.end()


def test_report_30_only_the_opener_ends(talk: Talk, server: FakeServer):
    """A framework's own block inside the user's session joins it and does not end it."""
    with autellix.session("users") as session:
        for run_ in range(2):
            with autellix.session("kickoff"):
                talk.ask(f"run{run_}")
            autellix.end_session()
            assert session.state == "open"
    assert talk.sessions == {session.id}
    server.wait_event("DELETE")
    assert [e.method for e in server.events].count("DELETE") == 1


def test_report_31_work_at_interpreter_shutdown(server: FakeServer):
    """A call in an exit handler is served, and the exit neither hangs nor prints."""
    done = python(
        ASK + "import atexit, time\nask()\natexit.register(ask)\nprint(time.monotonic())\n"
    )
    exit_s = time.monotonic() - float(done.stdout)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(server.calls) == 2
    assert exit_s < 10  # of the exit alone: a call, and at most half a second for the messages


async def test_report_32_no_io_on_the_callers_thread(server: FakeServer):
    """With the server's session messages stuck, opening and ending a session waits for nothing."""
    opened = threading.Event()

    def stuck(*_: object) -> tuple[int, bytes]:
        assert threading.current_thread().name == "autellix"
        opened.wait(10)
        return 200, b"{}"

    sender = runtime.get_runtime().lifecycle
    sender._exchange = stuck
    async with autellix.session(), openai.AsyncOpenAI() as client:
        await client.completions.create(model="fake", prompt="hi")
    assert len(server.calls) == 1
    assert not autellix.flush(0.01)
    opened.set()
    assert await asyncio.to_thread(autellix.flush, 5)


def test_report_33_requests_that_are_no_calls(talk: Talk, server: FakeServer):
    """models.list passes; and whatever our hook raises, the call goes out untagged."""
    with autellix.session():
        assert [m.id for m in talk.client.models.list()] == ["fake"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime.Runtime, "tag", lambda *_, **__: 1 / 0)
            talk.ask("hi")
    assert server.calls[0].session is None
    assert autellix.status().errors == 2  # both nets tried


def test_report_34_a_client_that_dies_at_once(server: FakeServer):
    """The start goes out with the first call, so the lease runs from there: no separate grace."""
    done = python(
        ASK + "import os, signal\n"
        "ask()\n"
        "assert autellix.flush(5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert done.returncode == -9
    assert server.wait_event("PUT").session == server.calls[0].session
    assert not [e for e in server.events if e.method == "DELETE"]


def test_every_report_has_its_test():
    """Thirty-four reports, thirty-four tests."""
    tree = ast.parse(Path(__file__).read_text())
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    numbers = {
        int(part)
        for name in names
        if name.startswith("test_report_")
        for part in name.split("_")[2:4]
        if part.isdigit()
    }
    assert numbers == set(range(1, 35))

"""What a user can see: nothing changed, everything restored, nothing loaded, names that exist."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import autellix
from autellix import cli, config
from autellix.branches import Branch, foreign_number
from autellix.testing import FakeServer

from .talk import ASK, Talk


def _surface() -> dict[str, object]:
    """Return what can be seen of everything that we touch."""
    import httpx2
    from openai._base_client import AsyncAPIClient, BaseClient, SyncAPIClient

    spots = [
        (BaseClient, "_build_request"), (SyncAPIClient, "_build_request"),
        (AsyncAPIClient, "_build_request"), (openai.OpenAI, "_build_request"),
        (openai.AzureOpenAI, "_build_request"), (httpx2.Client, "send"),
        (httpx2.AsyncClient, "send"), (ThreadPoolExecutor, "submit"), (threading.Thread, "start"),
    ]  # fmt: skip
    seen: dict[str, object] = {}
    for owner, name in spots:
        method = getattr(owner, name)
        seen[f"{owner.__name__}.{name}"] = (
            inspect.signature(method), method.__name__, method.__qualname__, method.__doc__,
            inspect.iscoroutinefunction(method), method.__module__,
        )  # fmt: skip
    for owner in (BaseClient, openai.OpenAI, httpx2.Client, httpx2.AsyncClient):
        seen[owner.__name__] = (owner.__mro__, sorted(vars(owner)))
    return seen


def test_signatures_classes_and_objects_look_the_same(server: FakeServer):
    """With and without us: the same signatures, names, docs, members and hierarchy."""
    with_us = _surface()
    autellix.uninstall()
    assert _surface() == with_us


def test_clients_copy_and_compare_as_before(talk: Talk):
    """copy, with_options and isinstance; the client holds nothing of ours."""
    with autellix.session():
        talk.ask("hi")
    assert not [name for name in vars(talk.client) if "autellix" in name]
    assert isinstance(copy.copy(talk.client), openai.OpenAI)
    assert isinstance(talk.client.with_options(timeout=1), openai.OpenAI)
    assert "autellix" not in str(talk.client.default_headers).lower()


def test_the_users_headers_win_and_are_not_mutated(talk: Talk, server: FakeServer):
    """A header that the user sets stays; the mapping that the user passes stays as it was."""
    mine = {"X-Session-ID": "mine"}
    with autellix.session() as session:
        talk.ask("a", extra_headers=mine)
        talk.ask("b", extra_headers={"X-Autellix-Session": "by-hand"})
    assert mine == {"X-Session-ID": "mine"}
    assert server.calls[0].headers["x-session-id"] == "mine"
    assert server.calls[0].session == session.id
    assert server.calls[1].session == "by-hand"


def test_uninstall_restores_and_init_comes_back(talk: Talk, server: FakeServer):
    """Off: no header. On again: tagged."""
    autellix.uninstall()
    talk.ask("off")
    autellix.init(enabled=True)
    with autellix.session():
        talk.ask("on")
    assert talk.calls["off"].session is None
    assert talk.calls["on"].session is not None


def test_somebody_elses_wrapper_over_ours_survives(talk: Talk, server: FakeServer):
    """We take nothing away that is not ours, and ours below it goes silent."""
    from openai._base_client import BaseClient

    ours = vars(BaseClient)["_build_request"]
    seen = []

    def theirs(self, *args, **kwargs):
        seen.append(1)
        return ours(self, *args, **kwargs)

    BaseClient._build_request = theirs
    try:
        autellix.uninstall()
        assert vars(BaseClient)["_build_request"] is theirs
        talk.ask("hi")
    finally:
        BaseClient._build_request = getattr(ours, autellix.hooks.MARK)
    assert seen == [1]
    assert server.calls[0].session is None


def test_importing_loads_no_library_and_does_no_io():
    """A fresh interpreter: only the standard library, and only a little of it; no socket."""
    code = (
        "import sys, json\n"
        "before = set(sys.modules)\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: opened.append(e) if e.startswith('socket.') else None)\n"
        "import autellix\n"
        "print(json.dumps([sorted(set(sys.modules) - before), opened]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, opened = json.loads(done.stdout)
    assert not opened
    roots = {name.partition(".")[0] for name in loaded} - {"autellix"}
    assert roots <= sys.stdlib_module_names
    assert not roots & {"asyncio", "http", "ssl", "socket", "logging", "typing"}


def test_every_public_name_exists_and_has_a_docstring():
    """What ``__all__`` says is there, is there."""
    assert set(dir(autellix)) == set(autellix.__all__)
    for name in autellix.__all__:
        value = getattr(autellix, name)
        assert name.startswith("__") or value.__doc__, name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = autellix.nonsense
    assert Path(autellix.__file__).with_name("py.typed").exists()


def test_the_version_is_the_projects():
    """One version, in one more place than it should be."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{autellix.__version__}"' in text


def test_misuse_of_init_names_field_value_and_what_is_allowed():
    """Errors are for misuse only, and say what to do."""
    with pytest.raises(autellix.ConfigError, match="scope='all': allowed are auto"):
        autellix.init(scope="all")
    with pytest.raises(autellix.ConfigError, match="'nowhere' is no URL"):
        autellix.init("nowhere")
    with pytest.raises(ValueError, match="timeout=0"):
        autellix.init(timeout=0)
    with pytest.raises(autellix.CarrierError, match="AUTELLIX_SESSION"):
        autellix.attach({"AUTELLIX_SESSION": "no good"})


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Arguments beat the environment, but for off; a bad value counts as absent."""
    env = {"AUTELLIX_BASE_URL": "http://a:1", "AUTELLIX_SCOPE": "bogus",
           "AUTELLIX_ORIGINS": "http://b:2, *", "AUTELLIX_ENABLED": "off"}  # fmt: skip
    read = config.from_environment(env)
    assert (read.base_url, read.scope, read.enabled) == ("http://a:1", "auto", False)
    assert read.origins == ("http://b:2", "*")
    monkeypatch.setenv("AUTELLIX_ENABLED", "0")
    assert not autellix.init(enabled=True).config.enabled
    monkeypatch.delenv("AUTELLIX_ENABLED")
    assert autellix.init(enabled=True).config.enabled


@pytest.mark.parametrize(
    ("base_url", "origins", "url", "allowed"),
    [
        (None, (), "http://127.0.0.1:8000", True),
        (None, (), "http://[::1]:8000", True),
        (None, (), "http://192.168.1.5", True),
        (None, (), "https://vllm", True),
        (None, (), "https://api.openai.com", False),
        (None, (), "http://8.8.8.8", False),
        (None, ("https://llm.acme.com",), "https://llm.acme.com", True),
        (None, ("https://llm.acme.com",), "http://llm.acme.com", False),
        ("http://host:8000/v1", (), "http://host:8000", True),
        ("http://host:8000/v1", (), "http://127.0.0.1:8000", False),
        (None, ("*",), "https://api.openai.com", True),
    ],
)
def test_which_origins_get_tags(base_url, origins, url: str, allowed: bool):
    """Configured ones; without any, those that cannot be a public provider."""
    origin = config.origin_of(url)
    assert origin is not None
    rules = config.Origins(config.Config(base_url=base_url, origins=origins))
    assert (rules.allow(origin.scheme, origin.host, origin.port) == origin) is allowed


def test_event_hooks_and_wrap_need_no_patch(server: FakeServer):
    """The mode without a patch: a wrapped client is tagged, another is not."""
    import httpx2

    autellix.init(patch=(), threads=False)
    with autellix.session() as session:
        with openai.OpenAI() as wrapped, openai.OpenAI() as plain:
            assert autellix.wrap(wrapped) is wrapped
            autellix.wrap(wrapped)
            wrapped.completions.create(model="fake", prompt="wrapped")
            plain.completions.create(model="fake", prompt="plain")
        with httpx2.Client(event_hooks=autellix.event_hooks()) as client:
            client.post(f"{server.base_url}/completions", json={"prompt": "by hand"})
    by_text = {c.text: c.session for c in server.calls}
    assert by_text == {"wrapped": session.id, "plain": None, "by hand": session.id}
    assert [c.seq for c in server.calls if c.session] == [0, 1]


async def test_wrap_of_an_async_client(server: FakeServer):
    """The same for a coroutine client."""
    autellix.init(patch=(), threads=False)
    async with autellix.session() as session, openai.AsyncOpenAI() as client:
        await autellix.wrap(client).completions.create(model="fake", prompt="a")
    assert server.calls[0].session == session.id


def test_a_redirect_to_a_stranger_loses_our_headers(server: FakeServer):
    """The event hook runs at every hop."""
    import httpx2

    autellix.init(server.url)
    hook = autellix.event_hooks()["request"][0]
    with autellix.session() as session:
        hop = httpx2.Request("POST", "https://stranger.com/v1/completions",
                             headers=session.headers())  # fmt: skip
        hook(hop)
    assert not [name for name in hop.headers if "autellix" in name or "session" in name]


def test_headers_by_hand_and_the_carriers(talk: Talk):
    """headers() for any client; inject and attach across processes."""
    assert autellix.init(scope="explicit").config.scope == "explicit"
    assert autellix.headers() == {}
    with autellix.session() as session:
        by_hand = autellix.headers()
        carrier: dict[str, str] = {}
        autellix.inject(carrier, baggage=True)
        bound = session.bind(talk.ask)
    assert by_hand["X-Autellix-Session"] == by_hand["X-Session-ID"] == session.id
    assert carrier["x-autellix-session"] == session.id
    assert carrier["baggage"] == f"autellix.session={session.id}"
    with autellix.attach(carrier) as attached:
        assert attached is not None
        talk.ask("attached")
    with autellix.attach({}) as nothing:
        assert nothing is None
    bound("bound")
    assert session.run(len, "abc") == 3
    assert talk.calls["attached"].session == talk.calls["bound"].session == session.id
    assert autellix.current_session() is None


def test_threads_of_a_session_that_is_picked_up_often_differ():
    """Each attach counts on, and a fork begins elsewhere, within the nine digits of the wire."""
    carrier, numbers = {"x-autellix-session": "elsewhere", "x-autellix-parent": "0:3"}, []
    for _ in range(3):
        with autellix.attach(carrier):
            sent = autellix.headers()
            assert (sent["X-Autellix-Seq"], sent["X-Autellix-Parent"]) == ("0", "0:3")
            numbers.append(int(sent["X-Autellix-Thread"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 7)
        numbers.append(foreign_number())
    numbers.append(foreign_number())
    assert len(set(numbers)) == 5
    assert all(10_000_000 <= number < 10**9 for number in numbers)


def test_open_telemetry_attributes_on_the_current_span(talk: Talk):
    """Session and thread on the span; a conversation id that is there stays."""
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    tracer = sdk.TracerProvider().get_tracer("test")
    assert trace is not None
    with autellix.session(conversation="c1") as session:
        with tracer.start_as_current_span("one") as span:
            talk.ask("hi")
        with tracer.start_as_current_span("two") as taken:
            taken.set_attribute("gen_ai.conversation.id", "theirs")
            talk.ask("ho")
    assert span.attributes["autellix.session.id"] == session.id
    assert span.attributes["autellix.thread.id"] == 0
    assert span.attributes["gen_ai.conversation.id"] == "c1"
    assert taken.attributes["gen_ai.conversation.id"] == "theirs"
    assert "baggage" not in talk.calls["hi"].headers


def test_an_id_that_no_header_may_carry_is_hashed(talk: Talk):
    """The same text gives the same id, and nothing is raised."""
    with autellix.session(id="user 7 / run ü") as first:
        talk.ask("hi")
    with autellix.session(id="user 7 / run ü") as second:
        pass
    assert first.id == second.id == talk.calls["hi"].session


def test_threads_of_a_long_chat_do_not_pile_up():
    """Ten thousand turns, each in its own task: one thread; wide fan-out costs no scan."""
    from autellix.branches import Job
    from autellix.runtime import get_runtime

    session = get_runtime().new_session()
    root = session.root
    numbers = set()
    for _ in range(10_000):
        job = Job()
        numbers.add(session.fork(root, job).number)
        job.finish()
    assert len(numbers) == 1
    jobs = [Job() for _ in range(2_000)]
    looked_at = 0
    plain = Branch.has_ended

    def counting(self: Branch) -> bool:
        nonlocal looked_at
        looked_at += 1
        return plain(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Branch, "has_ended", counting)
        wide = {session.fork(root, job).number for job in jobs}
    assert len(wide) == 2_000
    assert looked_at <= 3 * len(jobs)
    del jobs
    assert len(root.children) <= 1


def test_wrap_of_something_else_warns_and_returns_it():
    """No guess is made."""
    thing = object()
    with pytest.warns(autellix.AutellixWarning, match="no way to tag a object"):
        assert autellix.wrap(thing) is thing


def test_the_log_can_be_printed(server: FakeServer):
    """AUTELLIX_LOG shows the SDK's lines, one per cause; by default there is silence."""
    code = ASK + "autellix.init('http://elsewhere:1')\nask()\nask()\n"
    command = [sys.executable, "-c", code]
    loud = subprocess.run(
        command, env={**os.environ, "AUTELLIX_LOG": "info"}, capture_output=True, text=True
    )
    assert loud.stderr.splitlines() == ["127.0.0.1 gets no tags: it is not a configured server"]
    quiet = subprocess.run(command, capture_output=True, text=True, check=True)
    assert quiet.stderr == ""


USERS_TEST = """
import openai
pytest_plugins = ["autellix.testing"]

def test_agent(autellix_server):
    autellix_server.answers["question"] = "answer"
    reply = openai.OpenAI().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "question"}]
    )
    assert reply.choices[0].message.content == "answer"
    assert autellix_server.calls[0].session
    assert autellix_server.wait_event("PUT").session == autellix_server.calls[0].session
"""


def test_users_can_test_their_agents(tmp_path: Path):
    """The fixture works in a project of its own."""
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "test_agent.py").write_text(USERS_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_agent.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_command_line(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """--version, run, an unknown command; a program's arguments are its own."""
    program = tmp_path / "agent.py"
    program.write_text(
        "import os, sys, httpx\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/completions'\n"
        "httpx.post(url, json={'prompt': ' '.join(sys.argv[1:])})\n"
    )
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"autellix {autellix.__version__}\n"
    assert cli.main(["no-such-thing"]) == 2
    assert cli.main(["run"]) == 2
    command = [sys.executable, "-m", "autellix", "run", "--base-url", server.base_url,
               str(program), "--flag", "x"]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != "OPENAI_BASE_URL"}
    subprocess.run(command, check=True, env=env, timeout=240)
    assert server.calls[0].text == "--flag x"
    assert server.calls[0].source == "process"
    assert server.wait_event("PUT").body["name"] == "agent.py"


def test_doctor_on_the_command_line(server: FakeServer, capsys: pytest.CaptureFixture[str]):
    """A table of what is installed, the hook that works, and the server."""
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "openai" in printed
    assert "an autellix server" in printed
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["server"] == "an autellix server"


def test_modules_import_alone():
    """Every module of the SDK can be the first that is imported."""
    folder = Path(autellix.__file__).parent
    names = [p.stem for p in folder.glob("*.py") if p.stem not in ("__init__", "__main__")]
    for name in names:
        importlib.import_module(f"autellix.{name}")
    assert len(names) > 15

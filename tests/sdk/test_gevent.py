"""gevent: greenlets of a patched process.

A greenlet starts with an empty context unless gevent copies it, so what is certain is this: a block
inside a greenlet holds, greenlets do not mix, and ``propagate`` carries a session into one.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("gevent")

from autellix.testing import FakeServer

PROGRAM = """
from gevent import monkey; monkey.patch_all()
import gevent, autellix, openai
autellix.init(scope="explicit")
client = openai.OpenAI()
def ask(text):
    client.completions.create(model="fake", prompt=text)
def agent(name):
    with autellix.session(name, id=name):
        for turn in range(2):
            ask(f"{name}{turn}")
gevent.joinall([gevent.spawn(agent, n) for n in "abc"], raise_error=True)
with autellix.session(id="outer"):
    gevent.spawn(autellix.propagate(ask), "carried").get()
    gevent.spawn(ask, "inherited").get()
autellix.shutdown()
"""


@pytest.fixture
def calls(server: FakeServer):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return {c.text: c for c in server.calls}


def test_a_block_in_a_greenlet_holds_and_greenlets_do_not_mix(calls):
    """Three agents at once, switching at each call."""
    for name in "abc":
        assert [calls[f"{name}{turn}"].session for turn in range(2)] == [name, name]


def test_propagate_carries_a_session_into_a_greenlet(calls):
    """The explicit way works whatever gevent does."""
    assert calls["carried"].session == "outer"


def test_a_plain_spawn_is_the_documented_limit(calls):
    """Inherited or untagged, by gevent's version; never another session's."""
    assert calls["inherited"].session in ("outer", None)


def test_the_background_sender_lives_in_a_patched_process(calls, server: FakeServer):
    """Starts and ends arrive."""
    kinds = [e.method for e in server.events]
    assert kinds.count("PUT") == kinds.count("DELETE") == 4

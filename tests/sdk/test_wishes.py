"""Weight, deadline and kind of a session, as its calls carry them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import autellix
from autellix import wire
from autellix.config import from_environment
from autellix.errors import ConfigError
from autellix.testing import FakeServer

from .talk import ASK, Talk


def said(talk: Talk, header: str) -> dict[str, str | None]:
    """Return what each call said under a header."""
    return {text: call.headers.get(header.lower()) for text, call in talk.calls.items()}


def test_a_weight_is_sent_and_inherited(talk: Talk):
    """By the session, what joins it, and its children; none by default, and none by a guest."""
    with autellix.session():
        talk.ask("none")
    with autellix.session(weight=2.5) as session:
        talk.ask("outer")
        with autellix.session(weight=9):
            talk.ask("joined")
        with autellix.session(nested="new"):
            talk.ask("child")
        with autellix.session(nested="new", weight=100):
            talk.ask("other")
        carrier: dict[str, str] = {}
        autellix.inject(carrier)
    with autellix.attach({**carrier, "x-autellix-session": f"{session.id}-elsewhere"}):
        talk.ask("guest")
    assert said(talk, wire.WEIGHT) == {
        "none": None, "outer": "2.5", "joined": "2.5", "child": "2.5", "other": "100",
        "guest": None,
    }  # fmt: skip


def test_a_deadline_is_told_as_the_seconds_left(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    """Counted from the opening; a child has its parent's; one that is over is negative."""
    now_s = [1000.0]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with autellix.session(deadline_s=60):
        now_s[0] += 12.5
        first = autellix.headers()[wire.DEADLINE]
        with autellix.session(nested="new") as child:
            inherited = child.headers()[wire.DEADLINE]
        with autellix.session(nested="new", deadline_s=5) as child:
            own = child.headers()[wire.DEADLINE]
        now_s[0] += 50
        over = autellix.headers()[wire.DEADLINE]
    monkeypatch.setattr(time, "monotonic", real)
    assert (first, inherited, own, over) == ("47.500", "47.500", "5.000", "-2.500")
    with autellix.session(deadline_s=60):
        talk.ask("hi")
    left_s = wire.parse_deadline(talk.calls["hi"].headers["x-autellix-deadline"])
    assert left_s is not None
    assert 0 < left_s <= 60


def test_a_kind_is_the_name_that_the_user_gives(talk: Talk):
    """Not that of a function or a process, and none if the user says so; any text can be sent."""

    @autellix.session
    def plain() -> None:
        talk.ask("function")

    @autellix.session("tour")
    def named() -> None:
        talk.ask("decorator")

    plain()
    named()
    with autellix.session("trip to Köln"):
        talk.ask("block")
    with autellix.session("user 4711", kind="trip"):
        talk.ask("kind")
    with autellix.session("user 4712", kind=""):
        talk.ask("no kind")
    with autellix.session("é" * 100):
        talk.ask("too long")
    with autellix.session(b"caf\xe9".decode(errors="surrogateescape")):
        talk.ask("half a character")
    handle = autellix.start_session("notebook")
    talk.ask("handle")
    handle.end()
    assert said(talk, wire.KIND) == {
        "function": None, "decorator": "tour", "block": "trip%20to%20K%C3%B6ln", "kind": "trip",
        "no kind": None, "too long": None, "half a character": "caf%3F", "handle": "notebook",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 0}, "weight=0: allowed is a number from 0.01 to 100; it is ignored"),
        ({"weight": float("nan")}, "weight=nan: allowed is"),
        ({"weight": "2"}, "weight='2': allowed is"),
        ({"weight": True}, "weight=True: allowed is"),
        ({"deadline_s": 0}, "deadline_s=0: allowed is a number of seconds above 0, up to 604800"),
        ({"deadline_s": float("inf")}, "deadline_s=inf: allowed is"),
    ],
)
def test_a_wrong_value_is_complained_of_and_left_out(
    talk: Talk, caplog: pytest.LogCaptureFixture, options: dict[str, object], message: str
):
    """At the session, with the field, the value and what is allowed; the call goes out."""
    with autellix.session(**options):  # type: ignore[call-overload]
        talk.ask("wrong")
    assert message in caplog.text
    headers = talk.calls["wrong"].headers
    assert not {"x-autellix-weight", "x-autellix-deadline"} & set(headers)


def test_settings_are_for_sessions_that_do_not_say(server: FakeServer, talk: Talk):
    """By ``init`` or the environment, also of a script without a session; a wrong one is named."""
    code = ASK + "ask('env')"
    env = {**os.environ, "AUTELLIX_WEIGHT": "0.5", "AUTELLIX_DEADLINE_S": "90"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=240)
    assert talk.calls["env"].headers["x-autellix-weight"] == "0.5"
    assert 0 < float(talk.calls["env"].headers["x-autellix-deadline"]) <= 90
    wrong = from_environment({"AUTELLIX_WEIGHT": "heavy", "AUTELLIX_DEADLINE_S": "-1"})
    assert (wrong.weight, wrong.deadline_s) == (None, None)
    with pytest.raises(ConfigError, match=r"weight=1000: allowed is a number from 0\.01 to 100"):
        autellix.init(weight=1000)
    with pytest.raises(ConfigError, match="deadline_s=-1: allowed is a number of seconds above 0"):
        autellix.init(deadline_s=-1)
    autellix.init(weight=3)
    with autellix.session():
        talk.ask("init")
    with autellix.session(weight=0.01):
        talk.ask("own")
    assert (said(talk, wire.WEIGHT)["init"], said(talk, wire.WEIGHT)["own"]) == ("3", "0.01")

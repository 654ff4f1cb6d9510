"""``autellix programs`` and ``show``, against a real admin site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from autellix.server import views_cli, views_text
from autellix.server.admin_cli import ENV_KEY, ENV_URL
from tests.gateway.dashboard.scene import KEY, Scene, add_story
from tests.gateway.dashboard.shown import shown


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of a dashboard with some programs."""
    scene = Scene()
    scene.fill(60)
    with shown(scene) as served:
        served.do(lambda: add_story(scene))
        yield served.url.removesuffix("/dashboard")


@pytest.fixture(autouse=True)
def environment(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address and the key, as a user sets them."""
    monkeypatch.setenv(ENV_URL, site)
    monkeypatch.setenv(ENV_KEY, KEY)


def test_programs_are_listed(capsys: pytest.CaptureFixture[str]):
    """The latest first; words narrow; a limit is a limit."""
    assert views_cli.programs(["--limit", "5"]) == 0
    text = capsys.readouterr().out
    assert "research_agent" in text
    assert "LangGraph" in text
    assert "5 of 61 programs" in text
    assert views_cli.programs(["dspy", "--open"]) == 0
    text = capsys.readouterr().out
    assert "browser-task" in text
    assert "sql-analyst" not in text
    assert "ended" not in text


def test_programs_as_json(capsys: pytest.CaptureFixture[str]):
    """Every field with its name, sorted as asked."""
    assert views_cli.programs(["--json", "--sort", "service", "--limit", "10"]) == 0
    document = json.loads(capsys.readouterr().out)
    services = [row["service_s"] for row in document["programs"]]
    assert services == sorted(services, reverse=True)
    assert len(services) == 10
    assert {"name", "framework", "state", "level", "wait_s", "slowdown"} <= set(
        document["programs"][0]
    )


def test_a_program_is_shown(capsys: pytest.CaptureFixture[str]):
    """Its calls with parents, and a bar of what each did; by any of its names."""
    assert views_cli.show(["story"]) == 0
    text = capsys.readouterr().out
    for words in ("research_agent", "critic", "engine_died", "preempted", "swapped"):
        assert words in text
    for glyph, _ in (views_text.PHASES[state] for state in ("queued", "running", "swapped")):
        assert glyph in text
    assert views_cli.show(["research_agent", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["calls"]) == 9
    assert document["row"]["threads"] == 4


def test_top_as_json(capsys: pytest.CaptureFixture[str]):
    """One snapshot of programs, engines and queues."""
    assert views_cli.top(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["programs"]) == 61
    assert [engine["engine"] for engine in document["engines"]] == ["e0", "e1"]
    assert views_cli.top([]) == 2, "a pipe is no screen"


def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An unknown program, a wrong key, none, a server that is not there, a bad limit."""
    cases = [
        (lambda: views_cli.show(["nobody"]), 2, "'nobody' is not in the table"),
        (lambda: views_cli.programs(["--limit", "0"]), 2, "limit: 0 is not allowed"),
        (lambda: views_cli.show(["x", "--admin-url", "ftp://h"]), 2, "admin-url: 'ftp://h'"),
        (lambda: views_cli.show(["x", "--admin-url", "http://127.0.0.1:1"]), 1, "does not answer"),
        (lambda: views_cli.show(["x", "--key-file", str(tmp_path / "no")]), 2, "key-file"),
    ]
    for run, status, words in cases:
        assert run() == status, words
        assert words in capsys.readouterr().err
    for key, words in (("wrong", "admin key is missing or wrong"), ("", "no key is given")):
        monkeypatch.setenv(ENV_KEY, key)
        assert views_cli.programs([]) == 2
        assert words in capsys.readouterr().err


def test_a_terminal_is_not_commanded():
    """Names go to it without control characters."""
    assert views_text.plain("a\x1b[2Jb\r\n") == "a·[2Jb··"
    assert views_text.plain("x\u202ey") == "x·y"


def test_durations_and_ages():
    """As people read them."""
    assert [views_text.seconds(v) for v in (0.0, 0.25, 9.9, 75, 7300)] == [
        "0 ms", "250 ms", "9.90 s", "1m 15s", "2h 01m",
    ]  # fmt: skip
    assert [views_text.ago(v) for v in (0.2, 30, 90, 7300)] == ["now", "30 s", "1 min", "2 h"]

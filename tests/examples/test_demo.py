"""The demo's own logic: who finished first, what it prints, and that nothing outlives it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples import demo

OWNER = """
import sys, time
from pathlib import Path
from examples.demo import Children
children = Children()
try:
    command = ["/bin/sh", "-c", "sleep 60 & echo $! > {pid}; wait"]
    sleeper = children.start(command, Path("{log}"), {{}})
    while not Path("{pid}").exists() or not Path("{pid}").read_text().strip():
        time.sleep(0.01)
    print(sleeper.pid, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pass
finally:
    children.stop()
"""


def row(name: str, response_s: float, age_s: float, **more: Any) -> dict[str, Any]:
    """A program as the server shows it."""
    return {
        "name": name,
        "response_s": response_s,
        "age_s": age_s,
        "wait_s": 1.25,
        "service_s": 2.5,
        "calls": 4,
        "calls_in_flight": 0,
        "calls_by_wall_time": 0,
        "threads": [{}, {}],
        "output_tokens": 40,
        "level": 1,
        "state": "ended",
        **more,
    }


ROWS = [
    row("autogen_team.py", 9.0, 12.0),  # finished 3 s ago
    row("langgraph_agent.py", 9.0, 11.0, level=None),
    row("loop_agent.py", 9.0, 10.0),
    row("short_agent.py", 2.0, 7.0),  # finished 5 s ago
]


def test_places_are_by_the_time_of_the_last_answer():
    """Who answered longest ago finished first, whenever it began."""
    ranks = {name: place.rank for name, place in demo.places(ROWS).items()}
    assert ranks == {
        "short_agent.py": 1,
        "autogen_team.py": 2,
        "langgraph_agent.py": 3,
        "loop_agent.py": 4,
    }


def test_the_tables_show_every_program():
    """Framework, level, wait, service and place are there, and the policies side by side."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=120)
    console.print(demo.table_of(ROWS, "plas"))
    console.print(demo.comparison({"fcfs": demo.places(ROWS), "plas": demo.places(ROWS)}))
    text = out.getvalue()
    for part in ("AutoGen", "LangGraph", "openai", "level", "1.2", "2.5", "#4", "fcfs", "plas"):
        assert part in text


def test_what_no_engine_reported_is_not_shown_as_zero():
    """A dash stands for an unknown level and wait; service by the clock is marked."""
    assert demo.measured(ROWS[0]) == ("40", "1", "1.2", "2.5")
    assert demo.measured(ROWS[1]) == ("40", "-", "1.2", "2.5")
    by_clock = row("loop_agent.py", 1, 1, calls_by_wall_time=3)
    assert demo.measured(by_clock) == ("40", "-", "-", "~2.5")  # tokens are in the answers


def test_an_open_or_missing_program_is_an_error():
    """The demo fails if anything is left open, or if the server never saw an agent."""
    demo.check(ROWS)
    with pytest.raises(demo.DemoError, match="does not know short_agent"):
        demo.check(ROWS[:3])
    with pytest.raises(demo.DemoError, match=r"still open .*loop_agent"):
        demo.check([*ROWS[:2], row("loop_agent.py", 1, 1, calls_in_flight=1), ROWS[3]])


def test_a_slow_step_tells_how_it_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A wait prints lines while it lasts, and ends in an error at its limit."""
    monkeypatch.setattr(demo, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(demo, "POLL_S", 0.001)
    with pytest.raises(demo.DemoError, match="the start took longer"):
        demo.wait_for(lambda: False, 0.02, lambda s: f"at {s:.0f}", "the start")
    assert "at 0" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_demo(number: signal.Signals, tmp_path: Path):
    """Whatever ends the demo, its child ends; after Ctrl-C the child's children too."""
    pid_file = tmp_path / "pid"
    code = OWNER.format(pid=pid_file, log=tmp_path / "log")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    grandchild = int(pid_file.read_text())
    owner.send_signal(number)
    owner.wait(30)
    owner.stdout.close()
    try:
        wanted = [child] if number == signal.SIGKILL else [child, grandchild]
        deadline_s = time.monotonic() + 20
        while any(is_alive(pid) for pid in wanted):
            assert time.monotonic() < deadline_s, f"still there: {wanted}"
            time.sleep(0.01)
    finally:
        if is_alive(grandchild):
            os.kill(grandchild, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a dead one nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Ctrl-C in the real demo, while its engine loads, leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import children_of, is_alive

ROOT = Path(__file__).parents[2]


def wait_until(done, limit_s: float, what: str) -> None:
    """Poll until ``done``."""
    deadline_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


@pytest.mark.live
def test_ctrl_c_while_the_engine_loads_leaves_no_process(tmp_path: Path):
    """The server, vLLM and what they started are gone when the demo is."""
    log = tmp_path / "demo.log"
    with log.open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", "--policy", "adaptive"],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: len(children_of(demo.pid)) >= 3, 90, "no engine was started")
        processes = children_of(demo.pid)
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(60) == 130, log.read_text()
        wait_until(lambda: not any(map(is_alive, processes)), 10, f"left: {processes}")
    finally:
        for pid in [demo.pid, *children_of(demo.pid)]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        demo.wait(10)

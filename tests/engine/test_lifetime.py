"""An engine core ends with its parent, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import multiprocessing, signal, sys, time

def child(pipe):
    from autellix.server.engine.lifetime import die_with_parent
    assert die_with_parent() is not None
    pipe.send(True)
    signal.pause()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,))
    process.start()
    ours.recv()
    print(process.pid, flush=True)
    signal.pause()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_parent_takes_the_child_with_it(tmp_path: Path):
    """SIGKILL of the parent, who can do nothing about it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    deadline_s = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline_s:
        os.sched_yield()
    assert not is_alive(pid)


def test_a_process_of_ones_own_is_left_alone():
    """Whoever runs the scheduler in his own process keeps it."""
    from autellix.server.engine.lifetime import die_with_parent

    assert die_with_parent() is None

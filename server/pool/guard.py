"""The process between the pool and one engine: it sees to it that nothing of the engine survives.

vLLM's engine core and worker outlive a killed API server, and nothing of vLLM notices that the
gateway is gone. The guard is the leader of the engine's session and the adopter of its orphans, and
holds the reading end of a pipe whose other end only the gateway has:

* the pipe ends (the gateway is gone, however it went): everything is stopped, the private folder
  is removed;
* ``stop`` or ``now`` comes through the pipe, or SIGTERM arrives: the same, with or without a
  grace, but the folder stays;
* the API server ends: what is left of the engine is killed, and the guard ends with its status;
* the guard itself is killed: the API server dies with it, by the kernel; the rest the pool finds
  by the session and by the mark in its environment.

Run as a plain file with the standard library only, so that it starts fast and costs little:
``python -I -S guard.py FOLDER GRACE_S MARK COMMAND…``, death pipe on standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_GRACE_ALONE_S = 1.0  # the gateway is gone, so nobody waits for an answer
_RESOURCE_TRACKER_S = 1.0  # it unlinks the shared memory of killed processes, then ends by itself


def engine_pids(session: int, mark: str) -> list[int]:
    """Return the living processes of one engine, without the guard that leads its session.

    Args:
        session: The guard's process id.
        mark: ``NAME=value`` in the environment of everything the guard started; it finds even a
            process that left the session.
    """
    needle = mark.encode()
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names only, and this file stays light
        if not entry.isdigit() or int(entry) == session:
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            state, _, _, of_session = _read(f"/proc/{entry}/stat").rpartition(b")")[2].split()[:4]
            if state not in (b"Z", b"X") and (
                int(of_session) == session or needle in _read(f"/proc/{entry}/environ").split(b"\0")
            ):
                found.append(int(entry))
    return found


def kill_engine(session: int, mark: str) -> int:
    """Kill what lives of an engine whose guard is gone; return how many processes that were."""
    return sum(_send(pid, signal.SIGKILL) for pid in engine_pids(session, mark))


def _read(path: str) -> bytes:
    """Return the content of a small file of the kernel."""
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib is not worth its import here
        return file.read()


def _is_tracker(pid: int) -> bool:
    """Return whether the process only cleans up after others."""
    with contextlib.suppress(OSError):
        return b"resource_tracker" in _read(f"/proc/{pid}/cmdline")
    return False


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether there was somebody to take it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Guard:
    """One engine's guard; `run` is its life."""

    def __init__(self, folder: str, grace_s: float, mark: str, command: list[str]) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._mark = mark
        self._command = command
        self._child = 0
        self._status: int | None = None
        self._asked_to_stop = False
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> int:
        """Start the engine, wait until it or the gateway ends, leave nothing; return its status."""
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._note_stop)
        signal.signal(signal.SIGINT, self._note_stop)
        self._child = self._spawn(prctl)
        gateway_lives = self._wait()
        if self._status is None:
            self._stop_child()
        self._clear()
        if not gateway_lives:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._status if self._status is not None else 1

    def _note_stop(self, *_: object) -> None:
        self._asked_to_stop = True

    def _spawn(self, prctl: object) -> int:
        """Start the command as a child that dies with this process."""
        assert callable(prctl)
        guard = os.getpid()
        # Until the child has its own handlers, a signal to it would be taken by a copy of ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return pid
        try:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # it died before the line above
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)  # the death pipe is the guard's alone
            os.execvp(self._command[0], self._command)
        except OSError as error:
            os.write(2, f"{self._command[0]}: {error}\n".encode())
        os._exit(127)

    def _wait(self) -> bool:
        """Wait until one of the ends comes; return whether the gateway lives."""
        while self._status is None and not self._asked_to_stop:
            readable, _, _ = select.select([0, self._wake_read], [], [])
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
                self._reap()
            if 0 in readable:
                word = os.read(0, 4096)
                if not word:
                    self._grace_s = min(self._grace_s, _GRACE_ALONE_S)
                    return False
                if word.startswith(b"now"):
                    self._grace_s = 0.0
                self._asked_to_stop = True
        return True

    def _reap(self) -> None:
        """Collect every child that ended, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = os.waitstatus_to_exitcode(status)

    def _stop_child(self) -> None:
        """Ask the API server to end in good order, for as long as the grace lasts."""
        _send(self._child, signal.SIGTERM)
        _send(self._child, signal.SIGCONT)  # a stopped process takes no SIGTERM
        end_s = time.monotonic() + self._grace_s
        while self._status is None and (left_s := end_s - time.monotonic()) > 0:
            readable, _, _ = select.select([self._wake_read], [], [], min(left_s, 0.1))
            if readable:
                os.read(self._wake_read, 4096)
            self._reap()

    def _clear(self) -> None:
        """Kill what is left of the engine, until nothing is."""
        end_s = time.monotonic() + _RESOURCE_TRACKER_S
        while pids := engine_pids(os.getpid(), self._mark):
            late = time.monotonic() >= end_s
            for pid in pids:
                if late or not _is_tracker(pid):
                    _send(pid, signal.SIGKILL)
            self._reap()
            if time.monotonic() >= end_s + 5:  # unkillable: in the kernel; its parent is gone
                break
            select.select([self._wake_read], [], [], 0.02)
            with contextlib.suppress(BlockingIOError):
                os.set_blocking(self._wake_read, False)
                os.read(self._wake_read, 4096)
        self._reap()


def main(argv: list[str]) -> int:
    """Run ``FOLDER GRACE_S MARK COMMAND…``."""
    folder, grace_s, mark, *command = argv
    status = Guard(folder, float(grace_s), mark, command).run()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A child process as the pool needs it: its end is known though its children live on.

asyncio's own subprocess reports an end only when the pipes are closed, and an orphan of a killed
guard holds them open. So the end is read from a pidfd, and the output is read beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

_READ_BYTES: Final = 1 << 16
_LINE_BYTES_MAX: Final = 1 << 14


class ChildProcess:
    """One running child, leader of a session of its own.

    Args:
        argv: What to execute.
        env: Its whole environment.
        on_line: Called for every line it or its children write.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_line = on_line
        self._rest = b""
        self._popen = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        self.pid: Final = self._popen.pid
        #: The exit status, negative for a signal.
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._note_end)
        assert self._popen.stdout is not None
        self._output = self._popen.stdout.fileno()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read)

    def ask_to_stop(self, *, now: bool = False) -> None:
        """Write to the death pipe: end in good order, or at once."""
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            with contextlib.suppress(OSError):  # it ended; that is as good
                self._popen.stdin.write(b"now\n" if now else b"stop\n")

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of the pipes; the process has ended."""
        assert self.ended.done()
        self._read()  # what was written last
        self._loop.remove_reader(self._output)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _note_end(self) -> None:
        status = self._popen.poll()
        if status is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if not self.ended.done():
            self.ended.set_result(status)

    def _read(self) -> None:
        """Hand on the lines that have come."""
        while True:
            try:
                chunk = os.read(self._output, _READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self._loop.remove_reader(self._output)
                return
            *lines, rest = (self._rest + chunk).split(b"\n")
            self._rest = rest[-_LINE_BYTES_MAX:]
            for line in lines:
                self._on_line(line.decode("utf-8", "replace"))
            if len(chunk) < _READ_BYTES:
                return

"""A real Redis server for tests: on a unix socket or a free port, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = "redis-server is not installed; `make system` says how"


class RedisServer:
    """One server: `start` it, `stop` it, start it again; what it held is gone then."""

    def __init__(self, folder: Path, *, tcp: bool = False) -> None:
        program = shutil.which("redis-server")
        if program is None:
            if os.environ.get("CI") == "true":
                pytest.fail(MISSING)
            pytest.skip(MISSING)
        self._program: str = program
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        if tcp:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0" if tcp else f"unix://{folder}/redis.sock?db=0"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._process = subprocess.Popen(
            [
                self._program, "--port", str(self.port), "--unixsocket", "redis.sock",
                "--save", "", "--appendonly", "no", "--daemonize", "no",
            ],
            cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end_s = time.monotonic() + 20
        while True:
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.connect(str(self._folder / "redis.sock"))
                probe.sendall(b"PING\r\n")
                if probe.recv(16) == b"+PONG\r\n":
                    return
            assert time.monotonic() < end_s, "redis-server does not answer"
            time.sleep(0.02)

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it hold its connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(*, tcp: bool = False) -> Iterator[RedisServer]:
    """Run a server for as long as the block."""
    with tempfile.TemporaryDirectory(prefix="ax-redis") as folder:
        server = RedisServer(Path(folder), tcp=tcp)
        server.start()
        try:
            yield server
        finally:
            server.stop()

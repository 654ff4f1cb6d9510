"""A process that looks like vLLM to the pool: a front end on a unix socket, and a child of its own.

Run as a plain file: ``python -I -S fake_engine.py UDS MODE``. Modes:

* ``good``: answers at once; its child lives until it is killed, as vLLM's engine core does;
* ``never``: starts, never answers;
* ``dies``: ends at once with status 3;
* ``leaver``: as good, but its child goes to a session of its own;
* ``stubborn``: as good, but does not end on SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time


def make_child(leaves: bool) -> None:
    """Fork a child that sleeps for ever and takes no SIGTERM."""
    if os.fork() == 0:
        if leaves:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)


def answer(connection: socket.socket, steps: int) -> None:
    """Answer one HTTP request."""
    request = connection.recv(65536)
    path = request.split(b" ")[1]
    body = b"ok"
    if path == b"/metrics":
        body = b'vllm:iteration_tokens_total_count{engine="0"} %d\n' % steps
    with contextlib.suppress(OSError):  # whoever asked may have given up
        connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    connection.close()


def main() -> None:
    """Serve until killed."""
    uds, mode = sys.argv[1:]
    print("the engine speaks", flush=True)  # noqa: T201
    if mode == "dies":
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    make_child(leaves=mode == "leaver")
    if mode == "never":
        time.sleep(600)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(uds)
    listener.listen(64)
    steps = 0
    while True:
        connection, _ = listener.accept()
        steps += 1
        answer(connection, steps)


if __name__ == "__main__":
    main()

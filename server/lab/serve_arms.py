"""Starts one ``autellix serve`` per policy for the live bench, and ends all of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from .replay import Target

START_S_MAX = 300.0
STOP_S_MAX = 30.0
_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """A server did not come up."""


@contextlib.contextmanager
def started(policies: Sequence[str], model: str, vllm_args: str) -> Iterator[list[Target]]:
    """Run a server per policy for the length of a block.

    Args:
        policies: As ``autellix serve --policy`` takes them.
        model: What to serve.
        vllm_args: More arguments for vLLM, in one string.

    Raises:
        ServerError: a server ended, or was not ready in time.
    """
    processes: list[subprocess.Popen[bytes]] = []
    libc = ctypes.CDLL(None)
    try:
        targets = []
        for policy in policies:
            port = _free_port()
            command = [sys.executable, "-m", "autellix", "serve", model, "--policy", policy]
            command += ["--port", str(port), "--", *shlex.split(vllm_args)]
            environment = {**os.environ, "AUTELLIX_ENABLED": "0"}
            process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                # a bench that is killed takes its servers with it, and they their engines
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
            processes.append(process)
            url = f"http://127.0.0.1:{port}/v1"
            _wait(process, url, policy)
            targets.append(Target(name=policy, url=url, model=_model_name(url)))
        yield targets
    finally:
        for process in processes:
            _end(process)


def _wait(process: subprocess.Popen[bytes], url: str, policy: str) -> None:
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise ServerError(f"the server of {policy} ended with status {process.returncode}")
        try:
            _model_name(url)
            return
        except (urllib.error.URLError, OSError, KeyError, ValueError, IndexError):
            time.sleep(_POLL_S)  # between two looks; the deadline bounds them
    raise ServerError(f"the server of {policy} was not ready in {START_S_MAX:.0f} s")


def _model_name(url: str) -> str:
    import json

    with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

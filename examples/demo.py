"""The main job, as `make demo` runs it: four agents at the same time on one real vLLM engine.

It starts `autellix serve` with SmolLM2-135M on the CPU twice, once first come, first served
(`fcfs`) and once program-aware (`adaptive`), runs the same agents against each, and prints what the
server knows of them and who finished first. Every process it starts ends with it, whatever ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "out"
POLICIES = ("fcfs", "adaptive")
AGENTS = {  # file → the framework in it; the last one starts when the others are under way
    "autogen_team.py": "AutoGen",
    "langgraph_agent.py": "LangGraph",
    "loop_agent.py": "openai",
    "short_agent.py": "openai",
}
ENGINE_ARGS = ("--max-num-seqs", "2", "--max-model-len", "2048")  # two slots: so that calls queue
API_KEY = "none"  # whose programs we ask for: the server shows everyone their own
ADMIN_KEY = secrets.token_urlsafe(9)  # of the dashboard, for as long as the demo runs
START_LIMIT_S = 300.0
AGENTS_LIMIT_S = 240.0
STOP_LIMIT_S = 20.0
TELL_EVERY_S = 5.0
POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


class Place(NamedTuple):
    """How one program fared under one policy."""

    rank: int  # 1: finished first
    response_s: float
    wait_s: float


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


class Children:
    """The processes the demo started; each leads a group of its own."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], output: Path, env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process that ends when this one does, with its output in a file."""
        libc = ctypes.CDLL(None)
        with output.open("wb") as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                cwd=HERE.parent,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends the rest
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        self._all.append(child)
        return child

    def stop(self) -> None:
        """End them all, the youngest first: politely, then by force, with all their children."""
        for child in reversed(self._all):
            if child.poll() is None:
                child.terminate()
        for child in reversed(self._all):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_LIMIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._all.clear()


def get_json(url: str, limit_s: float = 5.0) -> Any:
    """Return the JSON at ``url``, or None if there is none now."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {API_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            body = answer.read()
    except (urllib.error.URLError, OSError):
        return None
    try:
        return json.loads(body)
    except ValueError:
        return {}


def wait_for(
    done: Callable[[], bool], limit_s: float, state: Callable[[float], str], what: str
) -> float:
    """Poll until ``done``; print ``state`` every few seconds; return how long it took.

    Raises:
        DemoError: it took longer than ``limit_s``.
    """
    begun_s = told_s = time.monotonic()
    while not done():
        now_s = time.monotonic()
        if now_s - begun_s > limit_s:
            raise DemoError(f"{what} took longer than {limit_s:.0f} s")
        if now_s - told_s >= TELL_EVERY_S:
            told_s = now_s
            say(f"    {state(now_s - begun_s)}")
        time.sleep(POLL_S)
    return time.monotonic() - begun_s


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def last_lines(path: Path, count: int) -> str:
    """Return the end of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


@contextlib.contextmanager
def server(policy: str, children: Children) -> Iterator[str]:
    """Run `autellix serve` with one engine, and yield its URL once it is ready."""
    port, admin_port = free_port(), free_port()
    digest = hashlib.sha256(ADMIN_KEY.encode()).hexdigest()
    log = LOGS / f"serve-{policy}.log"
    command = [str(Path(sys.executable).with_name("autellix")), "serve", "smollm2"]
    command += ["--port", str(port), "--policy", policy]
    command += ["--admin-port", str(admin_port), "--admin-keys", f"demo:{digest}"]
    command += ["--", *ENGINE_ARGS]
    say(f"· autellix serve smollm2 --policy {policy} -- {' '.join(ENGINE_ARGS)}")
    say(f"  starting one vLLM engine, about 30 s (log: {log.relative_to(HERE.parent)})")
    child = children.start(command, log, {"HF_HUB_OFFLINE": "1"})
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        if child.poll() is not None:
            raise DemoError(f"the server ended with {child.returncode}:\n{last_lines(log, 20)}")
        return get_json(f"{url}/health") is not None

    took_s = wait_for(is_ready, START_LIMIT_S, lambda s: f"still starting, {s:.0f} s", "the start")
    say(f"  ready after {took_s:.0f} s")
    say(f"  watch it: http://127.0.0.1:{admin_port}/dashboard  key: {ADMIN_KEY}")
    try:
        yield url
    finally:
        child.terminate()  # it ends in the background; `main` waits for it


def programs_of(url: str) -> list[dict[str, Any]]:
    """Return what the server knows of the demo's programs."""
    answer = get_json(f"{url}/autellix/v1/sessions") or []
    rows = answer.get("sessions", []) if isinstance(answer, dict) else answer
    return [row for row in rows if row.get("name") in AGENTS]


def run_agents(url: str, policy: str, children: Children) -> list[dict[str, Any]]:
    """Run all agents at the same time, and return the server's rows when they have ended."""
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": API_KEY, "OPENAI_MODEL": "smollm2"}
    outputs = {name: LOGS / f"{Path(name).stem}-{policy}.log" for name in AGENTS}
    running = {}

    def start(name: str) -> None:
        running[name] = children.start([sys.executable, str(HERE / name)], outputs[name], env)

    def state(_: float) -> str:
        rows = programs_of(url)
        calls = sum(row["calls_ended"] for row in rows)
        in_flight = sum(row["calls_in_flight"] for row in rows)
        return f"{len(rows)} programs, {calls} calls ended, {in_flight} in flight"

    *first, last = AGENTS
    say(f"· running {len(AGENTS)} agents at the same time")
    for name in first:
        start(name)
    wait_for(
        lambda: len(programs_of(url)) == len(first) or not_all_run(running),
        AGENTS_LIMIT_S,
        state,
        "the agents' first calls",
    )
    start(last)
    wait_for(
        lambda: all(child.poll() is not None for child in running.values()),
        AGENTS_LIMIT_S,
        state,
        "the agents",
    )
    for name, child in running.items():
        text = last_lines(outputs[name], 1 if child.returncode == 0 else 20)
        say(f"  {text[:160] if child.returncode == 0 else text}")
        if child.returncode != 0:
            raise DemoError(f"{name} ended with {child.returncode}")
    return programs_of(url)


def not_all_run(running: dict[str, subprocess.Popen[bytes]]) -> bool:
    """Return whether one of the agents has ended already."""
    return any(child.poll() is not None for child in running.values())


def places(rows: Sequence[dict[str, Any]]) -> dict[str, Place]:
    """Return how each program fared, in the order in which they finished.

    A row's ``age_s`` counts from the program's arrival to now and ``response_s`` to its last
    answer, so the larger ``age_s − response_s`` is, the longer ago it finished.
    """
    order = sorted(rows, key=lambda row: row["response_s"] - row["age_s"])
    return {
        row["name"]: Place(rank, row["response_s"], row["wait_s"])
        for rank, row in enumerate(order, start=1)
    }


def table_of(rows: Sequence[dict[str, Any]], policy: str) -> Table:
    """Return what the server knows, as a table."""
    table = Table(
        title=f"What the server knows (policy {policy}; times in seconds)", box=box.SIMPLE_HEAD
    )
    table.padding = (0, 1, 0, 0)  # so that it fits 100 columns
    table.title_justify = table.caption_justify = "left"
    if any(row["calls_by_wall_time"] for row in rows):
        table.caption = "-: stock vLLM does not report it; ~: from a call's start to its end"
    table.add_column("program", no_wrap=True)
    table.add_column("framework", no_wrap=True)
    for title in ("calls", "threads", "tokens", "level", "wait", "service", "answer"):
        table.add_column(title, justify="right")
    table.add_column("finished", justify="right")
    ranks = places(rows)
    for row in sorted(rows, key=lambda row: ranks[row["name"]].rank):
        table.add_row(
            row["name"],
            AGENTS[row["name"]],
            str(row["calls"]),
            str(len(row["threads"])),
            *measured(row),
            f"{row['response_s']:.1f}",
            f"#{ranks[row['name']].rank}",
        )
    return table


def measured(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return tokens, level, wait and service; a dash for what no engine has reported.

    Where the engine reports nothing, the tokens are what its answers say, and the service is the
    time from a call's start to its end, queue included, and is marked with a tilde.
    """
    tokens = str(row["output_tokens"]) if row["output_tokens"] else "-"
    if row.get("calls_without_tokens") and row["output_tokens"]:
        tokens = f"≥{tokens}"  # a streamed answer may not say
    if row["calls_by_wall_time"]:
        return tokens, "-", "-", f"~{row['service_s']:.1f}"
    level = "-" if row["level"] is None else str(row["level"])
    return tokens, level, f"{row['wait_s']:.1f}", f"{row['service_s']:.1f}"


def comparison(results: dict[str, dict[str, Place]]) -> Table:
    """Return how each program fared under each policy, as a table."""
    table = Table(title="Seconds to the last answer, and place", box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("program", no_wrap=True)
    for policy in results:
        table.add_column(policy, justify="right")
    for name in AGENTS:
        cells = [result[name] for result in results.values()]
        table.add_row(name, *(f"{cell.response_s:.1f}  #{cell.rank}" for cell in cells))
    return table


def check(rows: Sequence[dict[str, Any]]) -> None:
    """Make sure that nothing is left open once all agents have ended.

    Raises:
        DemoError: a program is missing, or one has not ended.
    """
    missing = set(AGENTS) - {row["name"] for row in rows}
    if missing:
        raise DemoError(f"the server does not know {', '.join(sorted(missing))}")
    left = [row["name"] for row in rows if row["state"] != "ended" or row["calls_in_flight"]]
    if left:
        raise DemoError(f"still open after its end: {', '.join(left)}")


def run(policies: Sequence[str], children: Children) -> None:
    """Run the whole demo."""
    console = Console(width=100)
    results = {}
    for policy in policies:
        with server(policy, children) as url:
            rows = run_agents(url, policy, children)
            check(rows)
            results[policy] = places(rows)
            console.print(table_of(rows, policy))
            left = get_json(f"{url}/autellix/v1/programs")
            if not left:
                raise DemoError("the server does not say what is open")
            still = sum(row["state"] != "ended" for row in left["programs"])
            say(f"  open sessions: {still}, calls in flight: {left['calls_in_flight']}")
    if len(results) > 1:
        console.print(comparison(results))


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--policy", nargs="+", default=POLICIES, help="default: fcfs adaptive")
    options = parser.parse_args()
    LOGS.mkdir(exist_ok=True)
    children = Children()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        run(options.policy, children)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("· interrupted")
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the cleaning up
        children.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

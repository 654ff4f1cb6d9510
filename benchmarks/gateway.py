r"""The gateway against the Rust routers vllm-router and sglang-router, on one fake engine.

Every arm relays the same bytes from the same client to the same engine; rounds are interleaved.
What counts is the CPU time of the relay's own processes, which a busy machine hardly moves; added
latency moves with whatever else runs: it is printed, and worth something on an idle machine only.

    python -m venv .venv-peers && .venv-peers/bin/pip install \
        vllm-router==0.1.17 sglang-router==0.3.2 setproctitle
    python -m benchmarks.gateway --peers .venv-peers/bin

Without ``--peers`` only this project's gateway is measured, beside direct access.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from autellix.server import types
from benchmarks.gateway_latency import run_gateway
from benchmarks.gateway_load import Load, TickingEngine, percentile

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass
class Arm:
    """One way to the engine: a port, and the processes whose time and memory count."""

    name: str
    port: int
    pids: list[int] = field(default_factory=list)

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far by its processes."""
        return sum(_cpu_ticks(pid) for pid in self.pids) / TICKS_PER_S

    def resident_kib(self) -> int:
        """Return the resident memory of its processes, KiB."""
        return sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB for pid in self.pids
        )


def _cpu_ticks(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(after_name[11]) + int(after_name[12])


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine() -> Iterator[int]:
    """Run the fake engine in a process of its own; give its port."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Queue()
    process = spawn.Process(target=_run_engine, args=(ready,), daemon=True)
    process.start()
    try:
        yield ready.get(timeout=60)
    finally:
        process.kill()
        process.join()


def _run_engine(ready: Any) -> None:
    async def main() -> None:
        server = await TickingEngine.serve()
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(main())


@contextlib.contextmanager
def ours(engine_port: int) -> Iterator[Arm]:
    """Run this project's gateway with its real table, balancer and guards."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Queue()
    address = types.EngineAddress(None, "127.0.0.1", engine_port)
    process = spawn.Process(target=run_gateway, args=(address, ready), daemon=True)
    process.start()
    try:
        port = ready.get(timeout=60)
        yield Arm("autellix", port, [process.pid or 0])
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def peer(name: str, command: list[str], engine_port: int) -> Iterator[Arm]:
    """Run a Rust router from its wheel."""
    port, metrics_port = free_port(), free_port()
    process = subprocess.Popen(
        [
            *command,
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", f"http://127.0.0.1:{engine_port}", "--policy", "round_robin"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--log-level", "error"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_answers(port, process)
        yield Arm(name, port, [process.pid])
    finally:
        process.kill()
        process.wait()


def _wait_answers(port: int, process: subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SystemExit(f"the router ended with status {process.returncode}")
        try:
            asyncio.run(Load(port).calls(1, 1))
        except (OSError, EOFError, RuntimeError):
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"nothing answered on port {port}")


Figures = dict[str, dict[str, list[float]]]


def saturated(arm: Arm, calls: int, figures: dict[str, list[float]]) -> None:
    """CPU per call with 32 connections that never pause."""
    used_s = arm.cpu_s()
    took_s = uvloop.run(Load(arm.port).calls(calls, 32))
    if arm.pids:
        figures.setdefault("CPU µs per call", []).append((arm.cpu_s() - used_s) / calls * 1e6)
    figures.setdefault("calls per s", []).append(calls / took_s)


def paced(arm: Arm, seconds: float, figures: dict[str, list[float]]) -> None:
    """Latency at 100 calls per second."""
    taken_s = uvloop.run(Load(arm.port).paced(100.0, seconds))
    figures.setdefault("p50 µs at 100/s", []).append(percentile(taken_s, 50) * 1e6)
    figures.setdefault("p99 µs at 100/s", []).append(percentile(taken_s, 99) * 1e6)


def streams(arm: Arm, count: int, seconds: float, figures: dict[str, list[float]]) -> None:
    """CPU per 100,000 chunks, with so many streams at 30 chunks a second each."""
    used_s, before_kib = (arm.cpu_s(), arm.resident_kib()) if arm.pids else (0.0, 0)
    seen = uvloop.run(Load(arm.port).streams(count, round(seconds * 30), arm.resident_kib))
    if not arm.pids:
        return
    per_s = (arm.cpu_s() - used_s) / seen.chunks * 1e5
    figures.setdefault(f"CPU-s per 100k chunks, {count} streams", []).append(per_s)
    kib = (seen.resident_kib - before_kib) / count
    figures.setdefault(f"KiB per stream, {count} streams", []).append(kib)


def large(arm: Arm, calls: int, figures: dict[str, list[float]]) -> None:
    """CPU and latency of bodies of 1 MB, one after the other."""
    used_s = arm.cpu_s()
    taken_s = uvloop.run(Load(arm.port).large(calls))
    figures.setdefault("p50 ms, 1 MB body", []).append(statistics.median(taken_s) * 1e3)
    if arm.pids:
        figures.setdefault("CPU ms per call, 1 MB body", []).append(
            (arm.cpu_s() - used_s) / calls * 1e3
        )


def show(figures: Figures) -> None:
    """Print the medians over the rounds, and ours ÷ the better peer's."""
    arms = list(figures)
    peers = [arm for arm in arms if arm not in ("direct", "autellix")]
    print(
        f"{'median over rounds':36}" + "".join(f"{arm:>16}" for arm in arms) + f"{'÷ better':>10}"
    )
    for name in dict.fromkeys(name for rows in figures.values() for name in rows):
        cells = {arm: statistics.median(figures[arm][name]) for arm in arms if name in figures[arm]}
        line = "".join(f"{cells[arm]:16.1f}" if arm in cells else f"{'':16}" for arm in arms)
        print(f"{name:36}{line}{_against(name, cells, peers):>10}")


def _against(name: str, cells: dict[str, float], peers: list[str]) -> str:
    theirs = [cells[arm] for arm in peers if arm in cells]
    if not theirs or "autellix" not in cells:
        return ""
    if name == "calls per s":
        return f"{cells['autellix'] / max(theirs):.2f}"
    if name.startswith("p"):  # latency: what is added to direct access
        base = cells["direct"]
        return f"{(cells['autellix'] - base) / max(1e-9, min(theirs) - base):.2f}"
    return f"{cells['autellix'] / min(theirs):.2f}"


def main() -> None:
    """Start all arms, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with vllm-router and sglang-router")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10_000, help="of one saturated round")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one paced or streamed round")
    parser.add_argument("--streams", default="400,800")
    parser.add_argument("--parts", default="saturated,paced,streams,large")
    args = parser.parse_args()
    parts = args.parts.split(",")
    counts = [int(count) for count in args.streams.split(",")]
    with contextlib.ExitStack() as stack:
        engine_port = stack.enter_context(engine())
        arms = [Arm("direct", engine_port), stack.enter_context(ours(engine_port))]
        if args.peers:
            for name, more in (("vllm-router", []), ("sglang-router", ["launch"])):
                command = [str(args.peers / name), *more]
                arms.append(stack.enter_context(peer(name, command, engine_port)))
        figures: Figures = {arm.name: {} for arm in arms}
        steps: dict[str, list[Callable[[Arm, dict[str, list[float]]], None]]] = {
            "saturated": [lambda arm, into: saturated(arm, args.calls, into)],
            "paced": [lambda arm, into: paced(arm, args.seconds, into)],
            "streams": [
                lambda arm, into, n=count: streams(arm, n, args.seconds, into) for count in counts
            ],
            "large": [lambda arm, into: large(arm, 100, into)],
        }
        for number in range(args.rounds + 1):  # the first one warms up and is not kept
            for part in parts:
                for step in steps[part]:
                    for arm in arms if number % 2 else reversed(arms):
                        step(arm, figures[arm.name] if number else {})
            print(f"round {number} of {args.rounds}", file=sys.stderr)
        show(figures)
    print(json.dumps(figures), file=sys.stderr)


if __name__ == "__main__":
    main()

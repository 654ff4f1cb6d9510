"""What two gateway processes of one server lose against two servers of one process each.

On two cores the client and the fake engine take as much CPU as what is measured, so the calls a
second of two processes say nothing. What does is the CPU that gateways use for a call, all their
processes together, hand-offs and the pool's owner included: a process with a core of its own serves
as many calls as fit into a second of it. Twice as many as one process serve two servers of one
process each, with half of the programs; that is linear, and cannot be had on one address. So

    linear = CPU a call of two servers of one process ÷ CPU a call of one server of two

and 0.9 is asked for. In both arms two processes relay at once and share one core, so that they push
each other out of its cache alike; client and engine have the other core.

All are real servers (``autellix serve``) before one fake engine, and rounds are taken in turn, the
order changing. Three loads:

* *agents*: each program has a connection of its own and makes ten calls on it;
* *streams*: each program has a connection of its own and reads 30 chunks a second for some seconds;
* *mixed*: the next call on a connection is of any program, as behind a proxy, so that every second
  one is at the wrong process. It is printed and asked for nothing: give programs connections.

    python -m benchmarks.gateway_processes --rounds 9
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from autellix.server.ownership import owner_of_session
from benchmarks.gateway import engine
from benchmarks.gateway_latency import cpu_of
from benchmarks.gateway_load import Load

LINEAR_MIN = 0.9
CALLS_A_PROGRAM = 10
AT_ONCE = 32  # connections
CORES = sorted(os.sched_getaffinity(0))
GATEWAYS_ON, OTHERS_ON = {CORES[0]}, set(CORES[1:2] or CORES)


@dataclass
class Arm:
    """What relays: a port for the programs of each owner, and the processes behind."""

    ports: tuple[int, ...]
    pids: list[int]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes so far."""
        return sum(map(cpu_of, self.pids))


@contextlib.contextmanager
def serving(gateways: int, engine_port: int, log: Path) -> Iterator[tuple[int, list[int]]]:
    """Run a server of so many gateway processes; yield its port and its processes."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "import sys; from autellix.cli import main; main()"),
                *("serve", "--engine-url", f"http://127.0.0.1:{engine_port}", "--port", "0"),
                *("--admin-port", "0", "--gateways", str(gateways), "--policy", "program"),
            ],
            stdout=output,
            stderr=output,
        )
    try:
        end_s = time.monotonic() + 60
        while (found := re.search(r"ready: \S+:(\d+)/v1", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"no server:\n{log.read_text()}")
            time.sleep(0.05)
        below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        pids = [process.pid, *map(int, below)]
        for pid in pids:
            os.sched_setaffinity(pid, GATEWAYS_ON)
        yield int(found[1]), pids
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class Programs(Load):
    """Calls of programs of one owner, or of any; a new program every so many calls."""

    def __init__(self, port: int, name: str, owner: int | None) -> None:
        super().__init__(port)
        self._name, self._owner = name, owner
        self._session = b""
        self._made = 0

    def _request(self, chunks: int = 0, words: str = "y" * 800) -> bytes:
        request = super()._request(chunks, words)
        if self._made % CALLS_A_PROGRAM == 0:
            self._session = self._new_session()
        self._made += 1
        start = request.index(b"x-autellix-session: ") + 20
        return request[:start] + self._session + request[request.index(b"\r\n", start) :]

    def _new_session(self) -> bytes:
        for number in itertools.count(self._made):
            session = f"{self._name}-{number}"
            if self._owner in (None, owner_of_session("", session, 2)):
                break
        return session.encode()


Step = Callable[[Arm, str], int]


def agents(arm: Arm, name: str, calls: int) -> int:
    """Make calls as agents do; return how many."""

    async def one(load: Programs, left: Iterator[int]) -> int:
        made = 0
        for _ in left:
            await load.calls(CALLS_A_PROGRAM, 1)
            made += CALLS_A_PROGRAM
        return made

    async def all_of_them() -> int:
        running = []
        for owner, port in enumerate(arm.ports):
            left = iter(range(calls // len(arm.ports) // CALLS_A_PROGRAM))
            loads = (Programs(port, f"{name}-{n}", owner) for n in range(AT_ONCE))
            running += [one(load, left) for load in loads]
        return sum(await asyncio.gather(*running))

    return uvloop.run(all_of_them())


def streams(arm: Arm, name: str, count: int, seconds: float) -> int:
    """Read so many streams of each owner at once; return the chunks."""

    async def all_of_them() -> int:
        loads = [
            Programs(port, f"{name}-{number}", owner)
            for number in range(count)  # in turn, so that the engine writes to both in turn
            for owner, port in enumerate(arm.ports)
        ]
        seen = await asyncio.gather(
            *(load.streams(1, round(seconds * 30), lambda: 0) for load in loads)
        )
        return sum(each.chunks for each in seen)

    return uvloop.run(all_of_them())


class Mixed(Programs):
    """Each call is of another program than the one before."""

    def _new_session(self) -> bytes:
        self._made = -1
        return f"{self._name}-{self._number % 64}".encode()


def mixed(arm: Arm, name: str, calls: int) -> int:
    """Make calls of any program on any connection; return how many."""

    async def all_of_them() -> None:
        loads = [Mixed(port, f"{name}-{port}-{at}", None) for at, port in enumerate(arm.ports)]
        await asyncio.gather(*(load.calls(calls // len(loads), AT_ONCE) for load in loads))

    uvloop.run(all_of_them())
    return calls


def measure(arm: Arm, step: Step, name: str) -> float:
    """Run a step and return the CPU of all processes for a call, or a chunk, µs."""
    before_s = arm.cpu_s()
    count = step(arm, name)
    return (arm.cpu_s() - before_s) / count * 1e6


def show(what: str, unit: str, apart: list[float], together: list[float], *, asked: bool) -> bool:
    """Print one load's line; return whether the gate holds."""
    ratios = sorted(a / b for a, b in zip(apart, together, strict=True))
    linear = statistics.median(ratios)
    print(
        f"{what}: CPU a {unit}: two servers {statistics.median(apart):.1f} us, two processes of "
        f"one {statistics.median(together):.1f} us; linear {linear:.2f}, {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f} in {len(ratios)} rounds ({LINEAR_MIN if asked else 'nothing'} is asked)"
    )
    return linear >= LINEAR_MIN or not asked


def main() -> int:
    """Start both servers, run the rounds, print the ratios; return 1 if a gate does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=6400, help="of one round")
    parser.add_argument("--streams", type=int, default=200, help="at once")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round of streams")
    parser.add_argument("--loads", default="agents,streams,mixed")
    options = parser.parse_args()
    steps: dict[str, tuple[str, Step]] = {
        "agents": ("call", lambda s, name: agents(s, name, options.calls)),
        "mixed": ("call", lambda s, name: mixed(s, name, options.calls)),
        "streams": ("chunk", lambda s, name: streams(s, name, options.streams, options.seconds)),
    }
    os.sched_setaffinity(0, OTHERS_ON)  # the engine, which is a child, and the client
    figures: dict[str, tuple[list[float], list[float]]] = {}
    loads = options.loads.split(",")
    with tempfile.TemporaryDirectory(prefix="ax") as folder, contextlib.ExitStack() as stack:
        engine_port = stack.enter_context(engine())
        (first, first_pids), (second, second_pids), (port, pids) = [
            stack.enter_context(serving(count, engine_port, Path(folder) / f"log{number}"))
            for number, count in enumerate((1, 1, 2))
        ]
        arms = (Arm((first, second), first_pids + second_pids), Arm((port, port), pids))
        for number in range(options.rounds + 1):  # the first one warms up and is not kept
            for what in loads:
                kept = figures.setdefault(what, ([], []))
                for at in (0, 1) if number % 2 else (1, 0):
                    found = measure(arms[at], steps[what][1], f"{os.getpid()}-{number}")
                    if number:
                        kept[at].append(found)
            print(f"round {number} of {options.rounds}", file=sys.stderr)
    held = [show(w, steps[w][0], *figures[w], asked=w != "mixed") for w in loads]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())

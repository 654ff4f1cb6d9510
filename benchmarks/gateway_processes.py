"""What a second gateway process brings: CPU of the gateways for a call, of one process and of two.

On two cores the client and the fake engine take as much CPU as what is measured, so the calls a
second of two processes say nothing. What does is the CPU that the server's processes use for a
call, all of them together, hand-offs between them and the pool's owner included. A process of its
own core serves as many calls as fit into a second of it; so two serve

    scaling = 2 × (CPU a call with one process) ÷ (CPU a call with two)

times as many, if the programs are spread evenly: ``linear`` is half of that, and 0.9 is asked for.
``busiest`` says how even they were: the CPU of the process that had most, against its fair share;
it depends on how many programs there are.

All processes of a server share one core, and client and engine another one: so two processes are as
busy as one is, and each takes as many events at once. On cores of their own they would idle here,
as the client cannot ask so much, and a process that is woken for each event uses more CPU for it.

Both servers are real ones (``autellix serve --gateways N``) before the same fake engine, and rounds
are taken in turn, the order changing. Three loads: *agents* (each program has a connection of its
own and makes ten calls), *mixed* (any connection carries any program, as behind a proxy: every
second call is at the wrong process), and *streams* (30 chunks a second each).

    python -m benchmarks.gateway_processes --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

from benchmarks.gateway import engine
from benchmarks.gateway_latency import cpu_of
from benchmarks.gateway_load import Load

LINEAR_MIN = 0.9
CALLS_A_PROGRAM = 10
AGENTS = 32  # at once, for each process
CORES = sorted(os.sched_getaffinity(0))
GATEWAYS_ON, OTHERS_ON = {CORES[0]}, set(CORES[1:2] or CORES)


@dataclass
class Server:
    """A running server and its processes: the one that owns the pool first."""

    port: int
    pids: list[int]
    count: int  # of processes that relay

    def cpu_s(self) -> list[float]:
        """Return the CPU seconds of each process so far."""
        return [cpu_of(pid) for pid in self.pids]


@contextlib.contextmanager
def serving(gateways: int, engine_port: int, folder: Path) -> Iterator[Server]:
    """Run a server of so many gateway processes."""
    log = folder / f"log{gateways}"
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
        yield Server(int(found[1]), pids, gateways)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class Agents(Load):
    """Programs with a connection of their own, one after the other."""

    def __init__(self, port: int, name: str) -> None:
        super().__init__(port)
        self._name = name.encode()

    def _request(self, chunks: int = 0, words: str = "y" * 800) -> bytes:
        return super()._request(chunks, words).replace(b"bench-", b"bench-%s-" % self._name, 1)


async def _agents(server: Server, programs: int, name: str) -> None:
    left = iter(range(programs))

    async def one(number: int) -> None:
        load = Agents(server.port, f"{name}-{number}")
        for _ in left:
            await load.calls(CALLS_A_PROGRAM, 1)

    await asyncio.gather(*map(one, range(AGENTS * server.count)))


Step = Callable[[Server, str], int]


def agents(server: Server, name: str, calls: int) -> int:
    """Make calls as agents do; return how many."""
    uvloop.run(_agents(server, calls // CALLS_A_PROGRAM, name))
    return calls // CALLS_A_PROGRAM * CALLS_A_PROGRAM


def mixed(server: Server, name: str, calls: int) -> int:
    """Make calls of any program on any connection; return how many."""
    uvloop.run(Agents(server.port, name).calls(calls, AGENTS * server.count))
    return calls


def streams(server: Server, name: str, count: int, seconds: float) -> int:
    """Read so many streams at once; return the chunks."""

    async def all_of_them() -> int:
        loads = [Agents(server.port, f"{name}-{n}") for n in range(count * server.count)]
        seen = await asyncio.gather(
            *(load.streams(1, round(seconds * 30), lambda: 0) for load in loads)
        )
        return sum(each.chunks for each in seen)

    return uvloop.run(all_of_them())


@dataclass
class Figures:
    """One round of one server."""

    per_unit_us: float  # all processes
    busiest: float  # the busiest gateway process against its fair share
    pool_share: float  # of the process that relays nothing, of all CPU


def measure(server: Server, step: Step, name: str) -> Figures:
    """Run a step and return what it cost."""
    before = server.cpu_s()
    count = step(server, name)
    used_s = [now_s - then_s for now_s, then_s in zip(server.cpu_s(), before, strict=True)]
    relays = used_s[1:] or used_s
    return Figures(
        sum(used_s) / count * 1e6,
        max(relays) / (sum(relays) / len(relays)),
        used_s[0] / sum(used_s) if len(used_s) > 1 else 0.0,
    )


def show(what: str, unit: str, one: list[Figures], two: list[Figures]) -> bool:
    """Print one load's line; return whether the gate holds."""
    ratios = [a.per_unit_us / b.per_unit_us for a, b in zip(one, two, strict=True)]
    linear = statistics.median(ratios)
    print(
        f"{what}: CPU of the gateways a {unit}: one process "
        f"{statistics.median(f.per_unit_us for f in one):.1f} us, two together "
        f"{statistics.median(f.per_unit_us for f in two):.1f} us; linear {linear:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds; asked: {LINEAR_MIN}), "
        f"busiest {statistics.median(f.busiest for f in two):.2f} of its share, "
        f"pool's owner {statistics.median(f.pool_share for f in two):.1%} of the CPU"
    )
    return linear >= LINEAR_MIN


def main() -> int:
    """Start both servers, run the rounds, print the ratios; return 1 if a gate does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=6400, help="of one round")
    parser.add_argument("--streams", type=int, default=100, help="at once, for each process")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round of streams")
    parser.add_argument("--loads", default="agents,mixed,streams")
    options = parser.parse_args()
    steps: dict[str, tuple[str, Step]] = {
        "agents": ("call", lambda s, name: agents(s, name, options.calls)),
        "mixed": ("call", lambda s, name: mixed(s, name, options.calls)),
        "streams": ("chunk", lambda s, name: streams(s, name, options.streams, options.seconds)),
    }
    os.sched_setaffinity(0, OTHERS_ON)  # the engine, which is a child, and the client
    figures: dict[tuple[str, int], list[Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="ax") as folder, contextlib.ExitStack() as stack:
        engine_port = stack.enter_context(engine())
        servers = {
            count: stack.enter_context(serving(count, engine_port, Path(folder)))
            for count in (1, 2)
        }
        for number in range(options.rounds + 1):  # the first one warms up and is not kept
            for what in options.loads.split(","):
                for count in (1, 2) if number % 2 else (2, 1):
                    found = measure(servers[count], steps[what][1], f"{os.getpid()}-{number}")
                    if number:
                        figures.setdefault((what, count), []).append(found)
            print(f"round {number} of {options.rounds}", file=sys.stderr)
    held = [
        show(what, steps[what][0], figures[what, 1], figures[what, 2])
        for what in options.loads.split(",")
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())

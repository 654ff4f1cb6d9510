"""What the SDK costs: per call, per submit, per import, and when the server is a black hole.

    python -m benchmarks.sdk_cost [--rounds N]

Each figure is a difference or a share within one run, from interleaved rounds of the same work with
the SDK on and off. The best round of each counts, of a call and a submit in several processes, for
noise only ever adds. Processor time is taken, so that a busy machine does not count against either;
but for the black hole, where waiting is the point. The limits are those of the project; the exit
status says whether they hold.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import openai
from openai._models import FinalRequestOptions

import autellix
from autellix import arming, hooks, runtime
from autellix.config import Config

CALL_LIMIT_US = 25.0
SUBMIT_LIMIT_US = 3.0
IMPORT_LIMIT_MS = 15.0
BLACK_HOLE_LIMIT_US = 100.0
WIDE = 2_000
PROCESSES = 5


def per_call_us(work: Callable[[], object], count: int) -> float:
    """Return the processor time of one of ``count`` runs of ``work``, in microseconds."""
    started = time.thread_time()
    for _ in range(count):
        work()
    return (time.thread_time() - started) / count * 1e6


def difference_us(
    off: Callable[[], object], on: Callable[[], object], rounds: int, count: int
) -> tuple[float, float]:
    """Return the best round of each, interleaved."""
    pairs = [(per_call_us(off, count), per_call_us(on, count)) for _ in range(rounds)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def best_of_processes(
    measure: Callable[[int], tuple[float, float]], rounds: int
) -> tuple[float, float]:
    """Return the best of each in several fresh processes: where code lies in memory differs too."""
    pairs = []
    for _ in range(PROCESSES):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pairs.append(pool.submit(measure, rounds).result())
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def arm() -> None:
    """Put the hooks in place, with no message to any server."""
    arming.arm()
    autellix.init(lifecycle=False)


def call_times_us(rounds: int) -> tuple[float, float]:
    """Build and send chat requests, bare and in a session, through both nets; the times of one.

    What sends them does nothing: only what the hooks add counts.
    """
    arm()
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="sk")
    hooked = vars(openai._base_client.BaseClient)["_build_request"]
    bare = getattr(hooked, hooks.MARK)
    made = itertools.cycle(
        FinalRequestOptions(
            method="post",
            url="/chat/completions",
            json_data={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
            idempotency_key=f"stainless-python-retry-{uuid.uuid4()}",
        )
        for _ in range(50)
    )

    def sent(_client: object, request: object) -> object:
        return request

    hooked_send = hooks.wrap_send(sent)
    with autellix.session():
        times = difference_us(
            lambda: sent(client, bare(client, next(made))),
            lambda: hooked_send(client, hooked(client, next(made))),
            rounds * 40,
            20,
        )
    client.close()
    return times


def call_cost(rounds: int) -> float:
    """Return what a session adds to a call, in microseconds."""
    off, on = best_of_processes(call_times_us, rounds)
    print(f"call       {off:8.1f} µs bare, {on:8.1f} in a session: +{on - off:5.1f} µs")
    return on - off


def wide_cost(rounds: int) -> float:
    """A call with one live branch and with 2,000 under one parent; returns the second ÷ first."""

    async def measure(width: int) -> float:
        done = asyncio.Event()
        costs: list[float] = []
        ready = asyncio.Event()
        started = 0

        async def branch() -> None:
            nonlocal started
            autellix.headers()
            started += 1
            if started == width:
                ready.set()
            await done.wait()
            begun = time.perf_counter()
            autellix.headers()
            costs.append(time.perf_counter() - begun)

        async with autellix.session(nested="new"):
            tasks = [asyncio.create_task(branch()) for _ in range(width)]
            await ready.wait()
            done.set()
            await asyncio.gather(*tasks)
        return statistics.median(costs) * 1e6

    narrow = min(asyncio.run(measure(20)) for _ in range(rounds))
    wide = min(asyncio.run(measure(WIDE)) for _ in range(rounds))
    print(f"wide       {narrow:8.1f} µs of 20, {wide:8.1f} of {WIDE:,}: {wide / narrow:.2f} times")
    return wide / narrow


def submit_times_us(rounds: int) -> tuple[float, float]:
    """Submit to a pool, with and without the patch; returns the times of one."""
    arm()
    patched = vars(ThreadPoolExecutor)["submit"]
    bare = getattr(patched, hooks.MARK)

    def nothing() -> None:
        return None

    # A pool whose worker is busy: only the submitting side is timed.
    def measure(submit: Callable[..., object]) -> float:
        gate = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            bare(pool, gate.wait)
            cost = per_call_us(lambda: submit(pool, nothing), 500)
            gate.set()
        return cost

    with autellix.session():
        pairs = [(measure(bare), measure(patched)) for _ in range(rounds * 3)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def submit_cost(rounds: int) -> float:
    """Return what a session adds to a submit, in microseconds."""
    off, on = best_of_processes(submit_times_us, rounds)
    print(f"submit     {off:8.1f} µs bare, {on:8.1f} with us:      +{on - off:5.1f} µs")
    return on - off


def import_cost(rounds: int) -> float:
    """Import the SDK in fresh interpreters; returns the best in milliseconds."""
    code = (
        "import time; a = time.process_time(); import autellix; "
        "print((time.process_time() - a) * 1e3)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(max(rounds, 7))
    ]
    print(f"import     {min(times):8.1f} ms best, {statistics.median(times):8.1f} median")
    return statistics.median(times)


def black_hole_cost(rounds: int) -> float:
    """Tag calls of many sessions while the server accepts nothing; returns the added p99 in µs."""

    def measure(lifecycle: bool, port: int) -> float:
        config = Config(base_url=f"http://127.0.0.1:{port}", lifecycle=lifecycle, timeout_s=0.5)
        runtime.set_runtime(runtime.Runtime(config))
        origin = autellix.config.Origin("http", "127.0.0.1", port)
        costs = []
        for _ in range(1_000):
            begun = time.perf_counter()
            with autellix.session(nested="new"):
                runtime.get_runtime().tag(origin, None, "openai", None)
            costs.append(time.perf_counter() - begun)
        autellix.shutdown(0.0)
        return statistics.quantiles(costs, n=100)[98] * 1e6

    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        port = hole.getsockname()[1]
        pairs = [(measure(False, port), measure(True, port)) for _ in range(rounds)]
    off, on = min(a for a, _ in pairs), min(b for _, b in pairs)
    print(f"black hole {off:8.1f} µs p99 alone, {on:8.1f} with it: +{on - off:5.1f} µs")
    return on - off


def main() -> int:
    """Print every figure; returns 0 if all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    arm()
    held = [
        ("call", call_cost(rounds), CALL_LIMIT_US, "µs"),
        ("submit", submit_cost(rounds), SUBMIT_LIMIT_US, "µs"),
        ("wide ÷ narrow", wide_cost(3), 3.0, "times"),
        ("import", import_cost(rounds), IMPORT_LIMIT_MS, "ms"),
        ("black hole, p99", black_hole_cost(7), BLACK_HOLE_LIMIT_US, "µs"),
    ]
    for name, value, limit, unit in held:
        print(f"{'ok  ' if value <= limit else 'OVER'} {name}: {value:.1f} ≤ {limit:g} {unit}")
    return 0 if all(value <= limit for _, value, limit, _ in held) else 1


if __name__ == "__main__":
    raise SystemExit(main())

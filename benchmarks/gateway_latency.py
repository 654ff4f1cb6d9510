"""What the gateway adds to a call, one call at a time: medians, interleaved, and their ratio.

The engine is a fake one in a process of its own, or a real one with ``--engine-url``; the gateway
is in a process of its own; the client asks engine and gateway in turn, so that whatever else the
machine does is the same for both.

    python -m benchmarks.gateway_latency
    python -m benchmarks.gateway_latency --engine-url http://127.0.0.1:8001 --model smollm2
    python -m benchmarks.gateway_latency --views    # two gateways in turn: with the book of calls
                                                    # (receipts, explanations, metrics) and without
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

from autellix.server import types
from autellix.server.clock import SystemClock
from autellix.server.gateway.app import create_app, make_runner
from autellix.server.gateway.config import GatewayConfig
from autellix.server.process_table import ProcessTable

GATE_MS = 3.0
VIEWS_SHARE_MAX = 1.02
PAIRS = 50  # calls of each arm in one block; a block's ratio is of its medians


class OneEngine:
    """A pool of one engine that is always ready."""

    engine_id = "e0"
    api_key = None
    state = types.EngineState.READY

    def __init__(self, address: types.EngineAddress) -> None:
        self.address = address

    def all(self) -> Sequence[types.Engine]:
        """Return the engine."""
        return [self]

    def note_failure(self, engine_id: str) -> None:
        """Nothing can be done about it here."""
        print(f"engine {engine_id} broke", file=sys.stderr)


class FakeAnswers(asyncio.Protocol):
    """An engine without a model: reads a request to its end, answers about 1 KB."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the client."""
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        """Answer when the request is whole."""
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        if len(body) < length:
            return
        self.buffer = b""
        answer = json.dumps({"choices": [{"message": {"content": "x" * 900}}]}).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(answer), answer)
        )


def run_engine(path: str) -> None:
    """Serve fake answers on a unix socket until killed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(FakeAnswers, path)
        await server.serve_forever()

    uvloop.run(main())


def run_gateway(address: types.EngineAddress, ready: Any, views: bool = True) -> None:
    """Serve the gateway on a free port until killed."""
    without = {} if views else {"calls_remembered": 0, "receipts": "off"}

    async def main() -> None:
        clock = SystemClock()
        app = create_app(
            config=GatewayConfig(**without),  # type: ignore[arg-type]
            table=ProcessTable(now_s=clock.now_s()),
            engines=OneEngine(address),
            place=lambda _call, engines: engines[0],
            clock=clock,
            key=b"benchmark",
            forget_programs=lambda _programs: None,
            engine_views=list,
        )
        runner = make_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(main())


class Asker:
    """A client with one connection: writes a request, waits for the end of the answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, address: types.EngineAddress) -> Asker:
        """Return a client of the address."""
        if address.uds is not None:
            return cls(*await asyncio.open_unix_connection(address.uds))
        return cls(*await asyncio.open_connection(address.host, address.port))

    async def ask(self, body: bytes, headers: bytes) -> float:
        """Make one call and return how long it took, seconds."""
        request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"%scontent-length: %d\r\n\r\n%s" % (headers, len(body), body)
        )
        start_s = time.perf_counter()
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"not answered: {head[:80]!r}")
        lower = head.lower()
        at = lower.find(b"content-length:")
        await self.reader.readexactly(int(lower[at + 15 : lower.find(b"\r\n", at)]))
        return time.perf_counter() - start_s


async def measure(
    direct: types.EngineAddress, port: int, body: bytes, calls: int
) -> tuple[list[float], list[float]]:
    """Return the times of calls to the engine and through the gateway, taken in turn."""
    arms = (
        await Asker.connect(direct),
        await Asker.connect(types.EngineAddress(None, "127.0.0.1", port)),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(calls + 5):
        for arm, asker in enumerate(arms):
            headers = (
                b"x-autellix-session: bench-%d\r\nx-autellix-thread: 0\r\nx-autellix-seq: %d\r\n"
                b"x-autellix-call: call-%d\r\n" % (number // 10, number % 10, number)
            )
            took_s = await asker.ask(body, headers)
            if number >= 5:  # the first ones open connections
                times[arm].append(took_s)
    for asker in arms:
        asker.writer.close()
    return times


async def measure_views(ports: Sequence[int], body: bytes, calls: int) -> list[list[float]]:
    """Return the times of calls through each gateway, taken in turn, the order changing."""
    arms = [await Asker.connect(types.EngineAddress(None, "127.0.0.1", port)) for port in ports]
    times: list[list[float]] = [[] for _ in arms]
    for number in range(calls + 20):
        order = range(len(arms)) if number % 2 else reversed(range(len(arms)))
        for arm in order:
            headers = (
                b"x-autellix-session: bench-%d\r\nx-autellix-thread: 0\r\nx-autellix-seq: %d\r\n"
                b"x-autellix-call: call-%d\r\n" % (number // 10, number % 10, number)
            )
            took_s = await arms[arm].ask(body, headers)
            if number >= 20:
                times[arm].append(took_s)
    for asker in arms:
        asker.writer.close()
    return times


def show_views(times: Sequence[Sequence[float]], cpu_s: Sequence[float]) -> bool:
    """Print what the views cost: the median, the median of the blocks' ratios, and CPU time."""
    on, off = times
    p50 = [statistics.median(arm) * 1e6 for arm in times]
    ratios = [
        statistics.median(on[start : start + PAIRS]) / statistics.median(off[start : start + PAIRS])
        for start in range(0, len(on), PAIRS)
    ]
    ratio = statistics.median(ratios)
    cpu_us = [seconds / len(on) * 1e6 for seconds in cpu_s]
    print(
        f"views on {p50[0]:.0f} us, off {p50[1]:.0f} us at p50, {p50[0] / p50[1]:.3f} x; blocks of "
        f"{PAIRS}: {ratio:.3f} x (asked: {VIEWS_SHARE_MAX}); CPU of the gateway a call "
        f"{cpu_us[0]:.0f} and {cpu_us[1]:.0f} us, {len(on)} calls each"
    )
    return ratio <= VIEWS_SHARE_MAX


def cpu_of(pid: int) -> float:
    """Return the CPU time that a process has used, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(what: str, direct: list[float], relayed: list[float]) -> bool:
    """Print one line of figures; return whether the gate holds."""
    base_ms = statistics.median(direct) * 1000
    full_ms = statistics.median(relayed) * 1000
    added_ms = full_ms - base_ms
    print(
        f"{what}: engine p50 {base_ms:.3f} ms, through the gateway {full_ms:.3f} ms, "
        f"added {added_ms:.3f} ms (gate {GATE_MS:g} ms, {added_ms / GATE_MS:.2f} of it), "
        f"ratio {full_ms / base_ms:.3f}, {len(direct)} calls each"
    )
    return added_ms <= GATE_MS


def main() -> int:
    """Run the benchmark; return 1 if the gate does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine-url", help="a real engine, http://HOST:PORT")
    parser.add_argument("--model", default="m")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--views", action="store_true", help="compare with and without the views")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    processes = []
    with tempfile.TemporaryDirectory(prefix="ax") as folder:
        if options.engine_url:
            url = urlsplit(options.engine_url)
            address = types.EngineAddress(None, url.hostname or "127.0.0.1", url.port or 80)
        else:
            address = types.EngineAddress(str(Path(folder) / "engine.sock"), "", 0)
            processes.append(spawn.Process(target=run_engine, args=(address.uds,), daemon=True))
        ready, bare = spawn.Queue(), spawn.Queue()
        gateways = [spawn.Process(target=run_gateway, args=(address, ready), daemon=True)]
        if options.views:
            without = (address, bare, False)
            gateways.append(spawn.Process(target=run_gateway, args=without, daemon=True))
        processes += gateways
        for process in processes:
            process.start()
        try:
            port = ready.get(timeout=60)
            if address.uds is not None:
                wait_for(Path(address.uds).exists)
            message = {"role": "user", "content": "Say one word. " + "y" * 800}
            body = json.dumps(
                {"model": options.model, "messages": [message], "max_tokens": options.max_tokens,
                 "temperature": 0}
            ).encode()  # fmt: skip
            if options.views:
                ports = (port, bare.get(timeout=60))
                before = [cpu_of(process.pid or 0) for process in gateways]
                times = uvloop.run(measure_views(ports, body, options.calls))
                cpu_s = [cpu_of(p.pid or 0) - s for p, s in zip(gateways, before, strict=True)]
                return 0 if show_views(times, cpu_s) else 1
            direct, relayed = uvloop.run(measure(address, port, body, options.calls))
        finally:
            for process in processes:
                process.terminate()
                process.join()
    engine = options.engine_url or "fake engine"
    return 0 if show(f"chat, {len(body)} bytes, {engine}", direct, relayed) else 1


def wait_for(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait until another process has come so far."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit("the fake engine did not start")
        time.sleep(0.01)


if __name__ == "__main__":
    raise SystemExit(main())

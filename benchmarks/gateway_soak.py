"""A soak of the gateway on fake engines: many programs at once, rude clients, memory and leaks.

Programs of 20 calls each run side by side for the given time, then some clients never read and
some hang up in mid-stream. After a third of the time the gateway is killed and started again on its
journal: the programs try their calls again, and so do agents with the real SDK and the official
client, by themselves. At the end no call may be in flight, begun and ended must agree, the
table must be sound, and the memory after warm-up must have stayed flat. The table's bounds are set
so low that warm-up reaches them: what is measured then is what stays.

    python -m benchmarks.gateway_soak --seconds 600 --programs 4000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

from autellix.server import types
from autellix.server.clock import SystemClock
from autellix.server.gateway.app import create_app, make_runner
from autellix.server.gateway.config import GatewayConfig
from autellix.server.gateway.state import GATEWAY
from autellix.server.process_table import ProcessTable

CALLS = 20
ENGINES = 2
FLAT = 0.05
RESTART_AT = 0.35  # of the time
WARM_AT = 0.65
TRIES_MAX = 60
CHUNK = b'data: {"text": "%s"}\n\n' % (b"w" * 180)


class FakeStream(asyncio.Protocol):
    """An engine without a model: streams some chunks, a few milliseconds apart."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the client."""
        self.transport: Any = transport
        self.loop = asyncio.get_running_loop()
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Stop."""
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Begin to answer when the request is whole."""
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET "):  # asked for its models: it serves any
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
            return
        at = head.find(b"content-length:")
        if len(body) < int(
            head[at + 15 : head.find(b"\r\n", at) if b"\r\n" in head[at:] else None]
        ):
            return
        self.buffer = b""
        chunks = 20_000 if b"endless" in body else 5
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        self.step(chunks, 32 if chunks > 5 else 1)

    def step(self, left: int, burst: int) -> None:
        """Send a chunk, or the end."""
        if self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK) * burst)
        if left > burst:
            self.timer = self.loop.call_later(0.02, self.step, left - burst, burst)
        else:
            self.transport.write(b"0\r\n\r\n")


class Pool:
    """Some engines that are always ready."""

    def __init__(self, addresses: Sequence[types.EngineAddress]) -> None:
        self.engines = [PoolEngine(f"e{i}", a) for i, a in enumerate(addresses)]

    def all(self) -> Sequence[types.Engine]:
        """Return the engines."""
        return self.engines

    def note_failure(self, engine_id: str) -> None:
        """Say so."""
        print(f"engine {engine_id} broke")


class PoolEngine:
    """One of them."""

    api_key = None
    state = types.EngineState.READY

    def __init__(self, engine_id: str, address: types.EngineAddress) -> None:
        self.engine_id, self.address = engine_id, address


def run_engines(paths: Sequence[str]) -> None:
    """Serve on unix sockets until killed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        servers = [await loop.create_unix_server(FakeStream, p, backlog=8192) for p in paths]
        await asyncio.gather(*(server.serve_forever() for server in servers))

    uvloop.run(main())


def run_agents(port: int, count: int, seconds: float, pipe: Any) -> None:
    """Run agents with the SDK and the official client; then tell the calls made and lost."""
    import openai

    import autellix

    base_url = f"http://127.0.0.1:{port}"
    autellix.init(base_url)
    calls, lost = 0, 0
    end_s = time.monotonic() + seconds

    async def agent(client: openai.AsyncOpenAI, number: int) -> None:
        nonlocal calls, lost
        async with autellix.session(f"agent-{number}"):
            while time.monotonic() < end_s:
                try:
                    stream = await client.completions.create(model="m", prompt="hi", stream=True)
                    async for _ in stream:
                        pass
                    calls += 1
                except openai.OpenAIError:
                    lost += 1
                except Exception as error:  # the HTTP client's, of a stream that breaks off
                    if not type(error).__module__.startswith(("httpx", "httpcore", "h11")):
                        raise
                    lost += 1
                await asyncio.sleep(0.2)

    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="k", max_retries=12
        ) as client:
            await asyncio.gather(*(agent(client, number) for number in range(count)))

    asyncio.run(main())
    autellix.shutdown()
    pipe.send((calls, lost))


def run_gateway(paths: Sequence[str], programs: int, state: str, port: int, pipe: Any) -> None:
    """Serve the gateway; answer each message on the pipe with the state of the process."""

    async def main() -> None:
        clock = SystemClock()
        table = ProcessTable(
            now_s=clock.now_s(), programs_max=programs * 5 // 4, closed_calls_max=4096
        )
        app = create_app(
            config=GatewayConfig(
                slow_client_s=3.0, connect_s=60.0, state=state, calls_remembered=1000
            ),
            table=table,
            engines=Pool([types.EngineAddress(p, "", 0) for p in paths]),
            place=lambda call, engines: min(engines, key=lambda e: call.loads.get(e.engine_id, 0)),
            clock=clock,
            key=b"soak",
            forget_programs=lambda _programs: None,
            engine_views=list,
        )
        runner = make_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=8192, reuse_address=True).start()
        pipe.send(runner.addresses[0][1])
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()

        def answer() -> None:
            try:
                pipe.recv()
            except EOFError:
                gone.set()
                return
            usage = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(
                {
                    "rss_mb": rss_mb(),
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "in_flight": table.in_flight,
                    "programs": len(table),
                    "loads": table.loads(),
                    "wrong": table.check_integrity(),
                    **table.counts,
                    **{f"gateway {k}": v for k, v in app[GATEWAY].counts.items()},
                }
            )

        loop.add_reader(pipe.fileno(), answer)
        await gone.wait()

    uvloop.run(main())


def rss_mb() -> float:
    """Return the resident memory of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def request_bytes(session: str, thread: int, seq: int, prompt: str, tries: int = 0) -> bytes:
    """Return a tagged call."""
    body = json.dumps({"model": "m", "prompt": prompt, "stream": True}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-autellix-session: {session}\r\nx-autellix-thread: {thread}\r\n"
        f"x-autellix-seq: {seq}\r\nx-autellix-call: {session}-{seq}\r\n"
        f"x-stainless-retry-count: {tries}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


class Crowd:
    """Programs side by side, each on a connection of its own."""

    def __init__(self, port: int, seconds: float, think_s: float) -> None:
        self.port = port
        self.think_s = think_s
        self.end_s = time.monotonic() + seconds
        self.made = 0
        self.calls = 0
        self.failed = 0
        self.retried = 0

    async def member(self) -> None:
        """Run one program after the other."""
        chance = random.Random(self.made)
        while time.monotonic() < self.end_s:
            self.made += 1
            session = f"soak-{self.made}"
            connection = None
            for seq in range(CALLS):
                for tries in range(TRIES_MAX):
                    try:
                        if connection is None:
                            connection = await asyncio.open_connection("127.0.0.1", self.port)
                        reader, writer = connection
                        writer.write(request_bytes(session, 0, seq, "go on " * 20, tries))
                        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
                        break
                    except (ConnectionError, asyncio.IncompleteReadError):
                        if connection is not None:
                            connection[1].close()
                        connection = None
                        self.retried += 1
                        await asyncio.sleep(chance.uniform(0.2, 1.0))
                else:
                    raise TimeoutError(f"{session} has tried {TRIES_MAX} times")
                self.calls += 1
                self.failed += not answer.startswith(b"HTTP/1.1 200")
                await asyncio.sleep(chance.uniform(0, 2 * self.think_s))
            if connection is not None:
                connection[1].close()

    async def rude(self, number: int, reads: bool) -> None:
        """Begin an endless stream; hang up after the first byte, or stop reading."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request_bytes(f"rude-{number}", 0, 0, "endless"))
        await reader.readuntil(b"\r\n\r\n")
        if not reads:
            writer.transport.pause_reading()
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(12):
                    while not writer.transport.is_closing():
                        await asyncio.sleep(0.5)
                        writer.write(b" ")  # only so can a client that never reads see the end
                        await writer.drain()
        writer.transport.abort()


class GatewayProcess:
    """The gateway, killed once and started again on its port and journal."""

    def __init__(self, paths: Sequence[str], programs: int, state: str) -> None:
        self.arguments = (paths, programs, state)
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it and wait until it listens."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=run_gateway, args=(*self.arguments, self.port, theirs), daemon=True
        )
        self.process.start()
        self.port = self.pipe.recv()

    def restart(self) -> None:
        """Kill it as a crash would."""
        self.process.kill()
        self.process.join()
        self.start()

    def ask(self) -> Any:
        """Return the state of the process."""
        self.pipe.send(None)
        return self.pipe.recv()


async def soak(options: argparse.Namespace, gateway: GatewayProcess) -> dict[str, Any]:
    """Run the crowd, then the rude clients; return the figures."""
    ask = gateway.ask
    crowd = Crowd(gateway.port, options.seconds, options.think)
    restored = None
    start_s = time.monotonic()
    members = [asyncio.create_task(crowd.member()) for _ in range(options.programs)]
    memory: list[tuple[float, float]] = []
    pending: set[asyncio.Task[None]] = set(members)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=5.0)
        at_s = time.monotonic() - start_s
        if restored is None and at_s > options.seconds * RESTART_AT:
            await asyncio.to_thread(gateway.restart)
            restored = (await asyncio.to_thread(ask))["programs"]
            print(f"{at_s:6.0f} s  killed and started again, {restored} programs are back")
        seen = await asyncio.to_thread(ask)
        at_s = time.monotonic() - start_s
        memory.append((at_s, seen["rss_mb"]))
        print(f"{at_s:6.0f} s  {seen['rss_mb']:7.1f} MB  {seen['in_flight']:5} in flight  "
              f"{seen['programs']:6} programs  {crowd.calls:8} calls", flush=True)  # fmt: skip
    failures = [m.exception() for m in members if m.exception() is not None]
    took_s = time.monotonic() - start_s
    seen = await asyncio.to_thread(ask)
    for reads in (True, False):
        await asyncio.gather(
            *(crowd.rude(n + 10_000 * reads, reads) for n in range(options.rude)),
        )
    for _ in range(40):
        after = await asyncio.to_thread(ask)
        if after["in_flight"] == 0:
            break
        await asyncio.sleep(0.5)
    warm = [mb for at_s, mb in memory if options.seconds * WARM_AT <= at_s <= options.seconds]
    return {
        "calls": crowd.calls, "retried": crowd.retried, "restored": restored,
        "failed": crowd.failed, "exceptions": len(failures),
        "calls_per_s": crowd.calls / took_s, "cpu_us_per_call": 1e6 * seen["cpu_s"] / crowd.calls,
        "warm_min_mb": min(warm), "warm_max_mb": max(warm), "after": after,
    }  # fmt: skip


def main() -> int:
    """Run the soak; return 1 if anything leaked or failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--programs", type=int, default=4000)
    parser.add_argument("--think", type=float, default=3.0, help="mean s between two calls")
    parser.add_argument("--agents", type=int, default=20, help="clients with the SDK")
    parser.add_argument("--rude", type=int, default=1000, help="clients of each rude kind")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ax") as folder:
        paths = [str(Path(folder) / f"e{i}.sock") for i in range(ENGINES)]
        engines = spawn.Process(target=run_engines, args=(paths,), daemon=True)
        engines.start()
        gateway = GatewayProcess(paths, options.programs, str(Path(folder) / "state.sqlite"))
        ours, theirs = spawn.Pipe()
        agents = spawn.Process(
            target=run_agents, args=(gateway.port, options.agents, options.seconds, theirs)
        )
        agents.start()
        try:
            figures = uvloop.run(soak(options, gateway))
            figures["sdk_calls"], figures["sdk_lost"] = ours.recv()
        finally:
            for process in (agents, gateway.process, engines):
                process.terminate()
                process.join()
    after = figures.pop("after")
    middle_mb = (figures["warm_min_mb"] + figures["warm_max_mb"]) / 2
    spread = (figures["warm_max_mb"] - figures["warm_min_mb"]) / 2 / middle_mb
    print({k: round(v, 1) for k, v in figures.items()})
    print(after)
    good = {
        "every call answered": figures["failed"] == figures["exceptions"] == 0,
        "begun - ended = 0": after["calls_begun"] == after["calls_ended"],
        "agents with the SDK went on by themselves": figures["sdk_calls"] > 0
        and figures["sdk_lost"] <= options.agents,
        "no call in flight": after["in_flight"] == 0 and after["loads"] == {},
        "table sound": after["wrong"] == [],
        f"memory flat after warm-up (± {spread:.1%} of ± {FLAT:.0%})": spread <= FLAT,
    }
    for what, holds in good.items():
        print(f"{'ok  ' if holds else 'FAIL'} {what}")
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

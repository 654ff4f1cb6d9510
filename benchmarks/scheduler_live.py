"""Live: two long programs hold both slots, then three short ones come; stock vLLM against ours.

Two real engines on this machine, one stock, one with the autellix scheduler, idle but for the one
under test. The scene is played on both in turn, ``--pairs`` times; ratios are taken inside a pair.
What is asked for: mean latency of the short programs ≤ 0.5 ×, total time ≤ 1.15 ×, and
greedy answers identical, or different first where the two best tokens are within 1e-3.

    python -m benchmarks.scheduler_live --model models/smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

LONG_TOKENS, SHORT_TOKENS, SLOTS = 100, 8, 2
SHORT_AFTER_S = 1.5
START_S_MAX = 240.0
NEAR_TIE = 1e-3
PR_SET_PDEATHSIG = 1


@dataclass
class Answer:
    """One call's tokens, the two best log-probabilities at each, and its latency."""

    tokens: list[str]
    gaps: list[float]
    latency_s: float


@dataclass
class Round:
    """One play of the scene."""

    total_s: float
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def short_s(self) -> float:
        """Return the mean latency of the short programs."""
        return statistics.mean(a.latency_s for n, a in self.answers.items() if n[0] == "s")


def engine_command(model: str, socket: Path, policy: str | None) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "m", "--uds", str(socket), "--dtype", "float32"]
    command += ["--enforce-eager", "--gpu-memory-utilization", "0.3", "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(SLOTS), "--shutdown-timeout", "5"]
    if policy is not None:  # the rest as shipped
        command += ["--scheduler-cls", "autellix.server.engine.scheduler.AutellixScheduler"]
        command += ["--scheduling-policy", "priority"]
        command += ["--additional-config", json.dumps({"autellix": {"policy": policy}})]
    return command


@contextlib.asynccontextmanager
async def engine(
    model: str, folder: Path, policy: str | None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Start an engine; yield a client of it; stop it and everything it started."""
    socket = folder / (policy or "stock")
    libc = ctypes.CDLL(None)  # an engine ends with the benchmark, however that ends
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / f"{socket.name}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            engine_command(model, socket, policy),
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    try:
        connector = aiohttp.UnixConnector(str(socket))
        async with aiohttp.ClientSession("http://engine", connector=connector) as client:
            await until_ready(client, process, folder / f"{socket.name}.log")
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def until_ready(client: aiohttp.ClientSession, process, log: Path) -> None:
    async with asyncio.timeout(START_S_MAX):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the engine ended, see {log}")
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with client.get("/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.5)


async def call(client: aiohttp.ClientSession, name: str, round_: int, tokens: int) -> Answer:
    body = {
        "model": "m",
        "prompt": f"Program {name}, round {round_}. Once upon a time there was a scheduler that",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    start = time.perf_counter()
    async with client.post(
        "/v1/completions", json=body, headers={"X-Session-ID": f"{name}-{round_}"}
    ) as reply:
        reply.raise_for_status()
        choice = (await reply.json())["choices"][0]
    latency_s = time.perf_counter() - start
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    gaps = [two[0] - two[1] if len(two) > 1 else float("inf") for two in best]
    return Answer(choice["logprobs"]["tokens"], gaps, latency_s)


async def scene(client: aiohttp.ClientSession, round_: int) -> Round:
    start = time.perf_counter()
    calls = {
        name: asyncio.create_task(call(client, name, round_, LONG_TOKENS)) for name in ("l1", "l2")
    }
    await asyncio.sleep(SHORT_AFTER_S)
    for name in ("s1", "s2", "s3"):
        calls[name] = asyncio.create_task(call(client, name, round_, SHORT_TOKENS))
    answers = {name: await task for name, task in calls.items()}
    return Round(time.perf_counter() - start, answers)


def first_differences(stock: Round, ours: Round) -> list[float]:
    """Return the gap between the two best tokens where each differing answer first differs."""
    gaps = []
    for name, answer in stock.answers.items():
        pairs = zip(answer.tokens, ours.answers[name].tokens, strict=True)
        different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if different is not None:
            gaps.append(answer.gaps[different])
    return gaps


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--policy", choices=("mlfq", "plas", "atlas", "adaptive"), default="plas")
    arguments = parser.parse_args()
    short, total, gaps, calls = [], [], [], 0
    with tempfile.TemporaryDirectory(prefix="autellix-") as name:
        folder = Path(name)
        async with contextlib.AsyncExitStack() as stack:
            starts = [
                stack.enter_async_context(engine(arguments.model, folder, policy))
                for policy in (None, arguments.policy)
            ]
            stock, ours = [await start for start in starts]
            await scene(stock, 0)
            await scene(ours, 0)
            for number in range(1, arguments.pairs + 1):
                arms = [("stock", stock), ("ours", ours)]
                rounds = {arm: await scene(c, number) for arm, c in arms[:: (-1) ** number]}
                a, b = rounds["stock"], rounds["ours"]
                short.append(b.short_s / a.short_s)
                total.append(b.total_s / a.total_s)
                gaps += first_differences(a, b)
                calls += len(a.answers)
                print(
                    f"pair {number}: short {a.short_s:.2f} s to {b.short_s:.2f} s "
                    f"({short[-1]:.2f} x), total {a.total_s:.2f} s to {b.total_s:.2f} s "
                    f"({total[-1]:.2f} x)",
                    flush=True,
                )
    wrong = [gap for gap in gaps if gap >= NEAR_TIE]
    print(f"short programs: median {statistics.median(short):.2f} x stock (asked: ≤ 0.5)")
    print(f"total time:     median {statistics.median(total):.2f} x stock (asked: ≤ 1.15)")
    print(f"answers: {calls} calls, {len(gaps)} differ at a near-tie or worse, {len(wrong)} wrong")
    for gap in gaps:
        print(f"  first difference at a gap of {gap:.2g} between the two likeliest tokens")
    passed = statistics.median(short) <= 0.5 and statistics.median(total) <= 1.15
    passed = passed and not wrong and len(gaps) <= 0.01 * calls
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

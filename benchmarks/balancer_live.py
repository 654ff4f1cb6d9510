"""Live: chat and LATS programs through the SDK on two CPU replicas, under one rule after another.

Two real engines of this machine under one gateway. The rule is changed between the arms, on warm
engines; each arm of a round replays the same programs at the same times, with token ids of its own,
so that no arm finds what another one left in the caches. From long traces the first calls are taken
and their answers are cut, as two engines on two cores make a few dozen tokens a second together.

It shows what issue 7 asks: the share of prompt tokens found in a cache, as the engines report it,
under ``autellix`` and ``locality`` above ``round-robin``; and what two replicas make a second.

    python -m benchmarks.balancer_live --model smollm2
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from autellix.server.balancing import EngineBalancer
from autellix.server.clock import SystemClock
from autellix.server.config import PoolConfig, ServeConfig
from autellix.server.fleet import Fleet
from autellix.server.gateway.app import make_runner
from autellix.server.gateway.state import GATEWAY
from autellix.server.lab import cost_model, trace, workload
from autellix.server.lab.replay import Replay, Target
from autellix.server.lab.trace import Call, Program
from autellix.server.lab.workload import Waits
from autellix.server.server_config import ServerConfig, effective
from autellix.server.types import EngineState

SLOTS, CONTEXT = 8, 2560
READY_S_MAX = 600.0
MODEL_NAME = "smollm2"


class Arm(NamedTuple):
    """What one arm of one round came to."""

    rule: str
    hit_share: float
    prompt_tokens: int
    output_tokens_per_s: float
    response_s: float
    moved: float  # engines a program used, mean
    lost: int


def cut(program: Program, calls: int, output_tokens: int) -> Program:
    """Return the first calls of a program, with shorter answers."""
    kept: dict[int, Call] = {}
    for call in program.calls[:calls]:
        prefix = call.prefix_tokens
        if call.cached_prefix_of is not None:
            prefix = min(prefix, kept[call.cached_prefix_of].tokens)
        kept[call.id] = call._replace(
            output_tokens=max(1, min(call.output_tokens, output_tokens)), prefix_tokens=prefix
        )
    return program._replace(calls=tuple(kept.values()))


def programs_of(arguments: argparse.Namespace) -> list[Program]:
    """Return the programs of every round, chat and LATS in turns."""
    chosen = []
    for name, count in (("lats", arguments.lats), ("chat-real", arguments.chat)):
        fitting = [
            cut(program, arguments.calls, arguments.output)
            for program in workload.fitting(trace.load(name), 1 << 20)
        ]
        chosen.append([p for p in fitting if p.largest_tokens <= CONTEXT - 64][:count])
    longest = max(map(len, chosen))
    return [part[n] for n in range(longest) for part in chosen if n < len(part)]


async def play(fleet: Fleet, app: Any, url: str, rule: str, seed: int, order: Sequence[Any]) -> Arm:
    """Run one arm."""
    fleet.balancer = EngineBalancer(rule, fleet.clock)
    app[GATEWAY].place = fleet.balancer.place
    app[GATEWAY].call_over = fleet.balancer.call_over
    await asyncio.sleep(1.0)  # a few heartbeats: the new rule learns the engines' sizes
    before = {p.program_id for p in fleet.table.programs()}
    target = Target(name=rule, url=url, model=MODEL_NAME)
    profile = cost_model.load("this-cpu-smollm2")
    waits = Waits(null="zero", scale=0.2, cap_s=2.0, seed=seed)
    began_s = time.monotonic()
    done = await Replay(target, profile, waits, seed=seed).run(order)
    took_s = time.monotonic() - began_s
    async with asyncio.timeout(30):
        mine = [p for p in fleet.table.programs() if p.program_id not in before]
        while any(p.calls_reported < p.calls_ended for p in mine):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    prompt = sum(p.prompt_tokens for p in mine)
    return Arm(
        rule,
        sum(p.hit_tokens for p in mine) / max(1, prompt),
        prompt,
        sum(p.output_tokens for p in mine) / took_s,
        statistics.mean(p.ended_s - p.arrival_s for p in done if p.ended_s is not None),
        statistics.mean(len(p.engines) for p in mine),
        sum(len(p.lost_calls) for p in done) + fleet.balancer.leaks,
    )


async def bench(arguments: argparse.Namespace) -> list[Arm]:
    """Start the engines and run every round."""
    serve = ServeConfig(replicas=2, policy="plas", balancer="round-robin")
    config = effective(
        ServerConfig(serve=serve, pool=PoolConfig(kv_cache_gib=1, stagger_s=1.0)), arguments.model
    )
    vllm_args = ("--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT))
    arms = []
    with tempfile.TemporaryDirectory(prefix="autellix-") as folder:
        fleet = Fleet(config, Path(folder), arguments.model, vllm_args, SystemClock())
        app = fleet.create_app()
        runner = make_runner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            await fleet.start()
            async with asyncio.timeout(READY_S_MAX):
                while any(  # noqa: ASYNC110
                    e.state is not EngineState.READY for e in fleet.pool.all()
                ):
                    await asyncio.sleep(0.2)
            print("engines are ready", flush=True)
            programs = programs_of(arguments)
            for number in range(arguments.rounds):
                gap_s = 1 / arguments.rate
                order = [
                    workload.Arrival(n * gap_s, n, program) for n, program in enumerate(programs)
                ]
                for place, rule in enumerate(arguments.rules[:: (-1) ** number]):
                    seed = 100 * (number + 1) + place
                    arms.append(await play(fleet, app, url, rule, seed, order))
                    print(line(arms[-1]), flush=True)
        finally:
            await runner.cleanup()
            await fleet.stop()
    return arms


def line(arm: Arm) -> str:
    """Return one arm for people."""
    return (
        f"{arm.rule:13} hits {arm.hit_share:6.1%} of {arm.prompt_tokens} prompt tokens, "
        f"{arm.output_tokens_per_s:5.1f} output tokens/s, mean response {arm.response_s:6.1f} s, "
        f"{arm.moved:.2f} engines a program, {arm.lost} lost"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default=MODEL_NAME)
    add("--rules", type=lambda t: t.split(","), default=["round-robin", "autellix", "locality"])
    add("--rounds", type=int, default=2)
    add("--lats", type=int, default=4, help="LATS programs in a round")
    add("--chat", type=int, default=8, help="chat programs in a round")
    add("--calls", type=int, default=12, help="of each program, at most")
    add("--output", type=int, default=12, help="tokens of an answer, at most")
    add("--rate", type=float, default=1.0, help="programs a second")
    arguments = parser.parse_args()
    arms = asyncio.run(bench(arguments))
    shares = {
        rule: statistics.mean(a.hit_share for a in arms if a.rule == rule)
        for rule in arguments.rules
    }
    for rule, share in shares.items():
        print(f"{rule:13} mean hit share {share:.1%}")
    plain = shares.get("round-robin", 0.0)
    above = all(share > plain for rule, share in shares.items() if rule != "round-robin")
    print(f"above round-robin: {'yes' if above else 'no'}")
    return 0 if above and not any(a.lost for a in arms) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Chaos on a whole fleet: engines are killed, frozen and slow to start, clients leave at random.

Time is compressed: every time of the pool is ``squeeze`` times shorter than in production, so that
a minute of chaos is worth ``squeeze`` minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from autellix.server import CallError, Generation, MultiEngine
from autellix.server.config import PoolConfig
from autellix.server.gateway.config import GatewayConfig
from autellix.server.pool import guard
from autellix.server.pool.local import LocalEngine
from autellix.server.server_config import ServerConfig
from autellix.server.types import EngineState

ANSWER_LIMIT_S = 120.0  # a call that has neither answer nor error by then has been forgotten


def squeezed(squeeze: float) -> ServerConfig:
    """Return settings whose times are so many times shorter."""
    return ServerConfig(
        pool=PoolConfig(
            stagger_s=2 / squeeze,
            probe_period_s=max(0.05, 1 / squeeze),
            probe_deadline_s=max(0.5, 4 / squeeze),
            frozen_floor_s=max(1.0, 15 / squeeze),
            frozen_cap_s=max(1.5, 25 / squeeze),
            frozen_kill_s=60 / squeeze,
            restart_limit=100_000,
            healthy_after_s=60 / squeeze,
            backoff_s_min=1 / squeeze,
            backoff_s_max=30 / squeeze,
            stop_grace_s=1.0,
        ),
        gateway=GatewayConfig(lease_s=max(1.0, 60 / squeeze)),
    )


@dataclass
class Tally:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    forgotten: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """The calls that were made."""
        return sum(self.outcomes.values())


async def rage(
    engine: MultiEngine, seed: int, *, clients: int, duration_s: float, squeeze: float
) -> Tally:
    """Let clients work and faults happen for a time; return when every client is done."""
    tally = Tally()
    choice = random.Random(seed)
    over = asyncio.Event()
    faults = asyncio.create_task(_make_faults(engine, choice, tally, over, squeeze))
    working = [
        asyncio.create_task(_client(engine, random.Random(f"{seed}/{n}"), n, tally, over))
        for n in range(clients)
    ]
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(faults, duration_s)  # raises what goes wrong in it
    finally:
        over.set()
        await asyncio.gather(*working)
    return tally


async def _client(
    engine: MultiEngine, choice: random.Random, number: int, tally: Tally, over: asyncio.Event
) -> None:
    """Run one program after the other."""
    run = 0
    while not over.is_set():
        run += 1
        session = f"client-{number}-{run}"
        for _ in range(choice.randrange(1, 6)):
            fan = choice.choice((1, 1, 1, 3))
            await asyncio.gather(*(_call(engine, choice, session, tally) for _ in range(fan)))
            if over.is_set():
                break
        if choice.random() < 0.9:  # the others are left to their leases
            await engine.end_session(session)


async def _call(engine: MultiEngine, choice: random.Random, session: str, tally: Tally) -> None:
    """Make a call; it ends with a right answer, an error, or by our own leaving."""
    count = choice.randrange(1, 80)
    fields: dict[str, Any] = {"max_tokens": count, "ignore_eos": True}
    if choice.random() < 0.3:
        fields["stream"] = False
    call = engine.generate("x", fields, session=session)
    leaves_s = choice.random() * 0.5 if choice.random() < 0.25 else None
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            if leaves_s is not None:
                await asyncio.sleep(leaves_s)
                call.cancel()
            output = await call
    except asyncio.CancelledError:
        if leaves_s is None:
            raise
        tally.outcomes["left"] += 1
    except CallError as error:
        tally.outcomes[f"error {error.code}"] += 1
        await asyncio.sleep(choice.random() * 0.3)  # as Retry-After asks for, squeezed
    except TimeoutError:
        tally.outcomes["forgotten"] += 1
        tally.forgotten.append(f"{session}: {_where(call)}")
    else:
        tally.outcomes["answered"] += 1
        made = (output.usage or {}).get("completion_tokens") or len(output.token_ids)
        if made != count:
            tally.wrong.append(f"{session}: {made} tokens of {count}: {output.text[:200]!r}")


def _where(call: Generation) -> str:
    return f"{len(call.output.token_ids)} tokens so far"


async def _make_faults(
    engine: MultiEngine,
    choice: random.Random,
    tally: Tally,
    over: asyncio.Event,
    squeeze: float,
) -> None:
    """Do something bad every so often, in production a few times a minute."""
    thaws: set[asyncio.Task[None]] = set()
    try:
        while not over.is_set():
            await asyncio.sleep(choice.expovariate(1.0) * 15 / squeeze)
            os.environ["FAKE_START_S"] = str(choice.choice((0, 0, 0, 30 / squeeze)))
            members = [e for e in engine.fleet.pool.all() if isinstance(e, LocalEngine)]
            alive = [e for e in members if e.session is not None and e.state is EngineState.READY]
            if not alive:
                continue
            victim = choice.choice(alive)
            assert victim.session is not None
            pids = [victim.session, *guard.engine_pids(victim.session, "-")]
            what = choice.choice(("kill guard", "kill", "kill", "terminate", "freeze", "hiccup"))
            tally.faults[what] += 1
            with contextlib.suppress(ProcessLookupError):
                if what in ("freeze", "hiccup"):
                    for pid in pids[1:]:
                        os.kill(pid, signal.SIGSTOP)
                if what == "hiccup":
                    thaw = asyncio.create_task(_thaw(pids[1:], choice.random() * 40 / squeeze))
                    thaws.add(thaw)
                    thaw.add_done_callback(thaws.discard)
                elif what != "freeze":
                    number = signal.SIGTERM if what == "terminate" else signal.SIGKILL
                    os.kill(pids[0 if what == "kill guard" else -1], number)
    finally:
        for thaw in thaws:
            thaw.cancel()
        os.environ.pop("FAKE_START_S", None)


async def _thaw(pids: list[int], after_s: float) -> None:
    """Let stopped processes go on."""
    await asyncio.sleep(after_s)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

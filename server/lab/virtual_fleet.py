"""Several engines of the simulation, and the balancer of the real server in front of them.

The balancer is told here what it is told there: that calls are over, what they took, and a few
times a second what each engine says of itself. It sees nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..policy.balancer import Balancer, build
from ..policy.placement import Usage
from ..types import CallInfo
from . import arms
from .coarse_engine import ORDERS, CoarseEngine
from .cost_model import CONSTANTS, Profile
from .run_state import CallRun, ProgramRun
from .virtual_engine import VirtualEngine

HEARTBEAT_S: Final = 0.25  # as the engines send them

CHUNK: Final = 128  # tokens

SomeEngine = VirtualEngine | CoarseEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with engines, by their number.

    Attributes:
        slow: So many times as slow as the profile says.
        dead_s: When an engine dies; its calls begin again elsewhere.
    """

    slow: tuple[tuple[int, float], ...] = ()
    dead_s: tuple[tuple[int, float], ...] = ()


NO_FAULTS: Final = Faults()


class VirtualFleet:
    """See the module.

    Args:
        profile: Of each engine.
        arm: What orders the calls in each.
        count: How many.
        rule: Which engine gets a call; not asked if there is one.
        faults: Of the engines.
    """

    def __init__(
        self, profile: Profile, arm: str, count: int, rule: str, faults: Faults = NO_FAULTS
    ) -> None:
        slow = dict(faults.slow)
        self.engines = [
            _engine(arm, _slowed(profile, slow.get(index, 1.0)), index) for index in range(count)
        ]
        self.dead: set[int] = set()
        self.balancer = Balancer(build(rule))
        self._by_id = {f"e{engine.index}": engine for engine in self.engines}
        self._said_s = float("-inf")
        for name in self._by_id:
            self.balancer.size_of(name, slots=profile.slots, kv_tokens=profile.kv_tokens)

    def place(self, run: CallRun, now_s: float) -> SomeEngine:
        """Return the engine for a call."""
        if len(self.engines) == 1:
            return self.engines[0]
        alive = [name for name, engine in self._by_id.items() if engine.index not in self.dead]
        if now_s - self._said_s >= HEARTBEAT_S:
            self._said_s = now_s
            self._listen(alive, now_s)
        prefix: tuple[int, ...] | None = None
        if self.balancer.placement.wants_prefix:
            prefix = _prefix(run)
        name = self.balancer.place(_info(run), alive, now_s, prefix=prefix)
        run.engine = self._by_id[name].index
        return self._by_id[name]

    def call_over(self, run: CallRun, now_s: float) -> None:
        """Tell the balancer, as gateway and engine do."""
        if len(self.engines) == 1:
            return
        self.balancer.end(_call_id(run), now_s)
        usage = Usage(run.call.prompt_tokens, run.hit_tokens, run.call.output_tokens, run.service_s)
        self.balancer.measured(f"e{run.engine}", _call_id(run), usage, now_s)

    def program_over(self, program: ProgramRun) -> None:
        """Tell the balancer."""
        self.balancer.forget_program(str(program.number))

    def kill(self, index: int) -> list[CallRun]:
        """An engine dies; return the calls that were in it."""
        self.dead.add(index)
        self.balancer.forget_engine(f"e{index}")
        runs = list(self.engines[index].runs.values())
        self.engines[index].runs.clear()
        return runs

    def _listen(self, names: Sequence[str], now_s: float) -> None:
        for name in names:
            engine = self._by_id[name]
            self.balancer.said(
                name,
                running=engine.calls - engine.waiting,
                waiting=engine.waiting,
                now_s=now_s,
            )


def _engine(arm: str, profile: Profile, index: int) -> SomeEngine:
    if arm in ORDERS:
        return CoarseEngine(profile, ORDERS[arm], index)
    return VirtualEngine(arms.build(arm, profile), profile, index)


def _slowed(profile: Profile, factor: float) -> Profile:
    if factor == 1.0:
        return profile
    costs: Mapping[str, float] = {name: getattr(profile, name) * factor for name in CONSTANTS}
    return replace(profile, **costs)  # type: ignore[arg-type]


def _call_id(run: CallRun) -> str:
    return f"{run.program.number}/{run.place}"


def _prefix(run: CallRun) -> tuple[int, ...]:
    """Return a number for each whole chunk of the prompt, the same for the same beginning.

    A segment follows one beginning only, so it stands for everything before it.
    """
    found: list[int] = []
    at = 0
    for segment, _, count in run.prompt.pieces:
        end = min(at + count, run.call.prompt_tokens)
        found += (segment << 24 | chunk for chunk in range(at // CHUNK + 1, end // CHUNK + 1))
        at += count
    return tuple(found)


def _info(run: CallRun) -> CallInfo:
    return CallInfo(
        call_id=_call_id(run),
        program_id=str(run.program.number),
        thread=0,
        path="/v1/completions",
        model=None,
        prompt_bytes=0,
        prompt_tokens=run.call.prompt_tokens,
        home=None,
        loads={},
    )

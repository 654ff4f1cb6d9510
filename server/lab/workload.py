"""When programs arrive, which ones, and how long their tools take: the same for every arm.

Everything here is a function of a seed. A wait is drawn per (program, call), so that arms which
finish calls in another order still see the same waits.
"""

from __future__ import annotations

import itertools
import json
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, NamedTuple

from .trace import FOLDER, Call, Program, TraceError

WAIT_CAP_S: Final = 300.0
_DISTRIBUTIONS: Final = {
    "human": "human_seconds/mooncake-conversation",
    "tool": "tool_seconds/mini-swe",
}


class Arrival(NamedTuple):
    """A program that begins; ``number`` counts arrivals of the run and seeds its waits."""

    at_s: float
    number: int
    program: Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How tool and human times of a trace are replayed.

    Attributes:
        null: What a wait that was not recorded counts: ``zero`` as in the paper's figures, or
            ``drawn`` from the distributions of other traces.
        scale: Multiplies every wait.
        cap_s: No wait is longer, after scaling.
        seed: Of the drawn ones.
    """

    null: Literal["zero", "drawn"] = "zero"
    scale: float = 1.0
    cap_s: float = WAIT_CAP_S
    seed: int = 0

    def before(self, arrival_number: int, call: Call) -> float:
        """Return the seconds between a call's last parent and the call."""
        recorded_s = call.tool_s
        if recorded_s is None:
            if self.null == "zero" or not call.parents:
                return 0.0
            recorded_s = self._drawn_s(arrival_number, call)
        return min(recorded_s * self.scale, self.cap_s)

    def _drawn_s(self, arrival_number: int, call: Call) -> float:
        curve = _curve(_DISTRIBUTIONS[call.interrupt or "tool"])
        place = random.Random(f"{self.seed}/{arrival_number}/{call.id}").random() * (len(curve) - 1)
        low = int(place)
        high = min(low + 1, len(curve) - 1)
        return curve[low] + (curve[high] - curve[low]) * (place - low)


@cache
def _curve(name: str) -> tuple[float, ...]:
    table = json.loads((FOLDER / "distributions.json").read_text(encoding="utf-8"))
    return tuple(table[name]["curve"])


CROWD_FROM: Final = 10_000_000  # numbers of programs that come all at once


def fitting(programs: Sequence[Program], context_tokens_max: int) -> tuple[Program, ...]:
    """Return the programs whose largest call fits an engine; prompts are never cut."""
    return tuple(p for p in programs if p.largest_tokens <= context_tokens_max)


def poisson(
    programs: Sequence[Program], rate_per_s: float, until_s: float, seed: int, start_s: float = 0.0
) -> Iterator[Arrival]:
    """Yield Poisson arrivals in [start, until): the open loop.

    Programs are taken in a shuffled order, each once before any comes again: the trace's own mix
    at any length of run. The gaps and the order depend on the seed alone, so the same seed at
    another rate is the same sequence, stretched.
    """
    gaps = random.Random(f"gaps/{seed}")
    at_s = start_s
    for number, program in enumerate(shuffled(programs, seed)):
        at_s += gaps.expovariate(1.0) / rate_per_s
        if at_s >= until_s:
            return
        yield Arrival(at_s, number, program)


def burst(
    programs: Sequence[Program], phases: Sequence[tuple[float, float]], seed: int
) -> Iterator[Arrival]:
    """Yield arrivals whose rate changes: ``phases`` are (programs per second, seconds)."""
    gaps = random.Random(f"gaps/{seed}")
    sequence = shuffled(programs, seed)
    start_s, number = 0.0, 0
    for rate_per_s, seconds in phases:
        at_s = start_s + gaps.expovariate(1.0) / rate_per_s if rate_per_s else float("inf")
        while at_s < start_s + seconds:
            yield Arrival(at_s, number, next(sequence))
            number += 1
            at_s += gaps.expovariate(1.0) / rate_per_s
        start_s += seconds


def crowd(
    programs: Sequence[Program],
    rate_per_s: float,
    until_s: float,
    seed: int,
    at_s: float,
    size: int,
) -> Iterator[Arrival]:
    """Yield Poisson arrivals in [0, until), and ``size`` programs more at once at ``at_s``.

    The crowd's programs have the numbers from ``CROWD_FROM`` on; the others are those of
    ``poisson`` at the same seed.
    """
    others = shuffled(programs, seed + 1)
    numbers = iter(range(CROWD_FROM, CROWD_FROM + size))
    for arrival in poisson(programs, rate_per_s, until_s, seed):
        if arrival.at_s >= at_s:
            yield from (Arrival(at_s, number, next(others)) for number in numbers)
        yield arrival


def at_once(programs: Sequence[Program], count: int, seed: int) -> Iterator[Arrival]:
    """Yield ``count`` programs at time 0: the offline mode."""
    for number, program in enumerate(itertools.islice(shuffled(programs, seed), count)):
        yield Arrival(0.0, number, program)


def shuffled(programs: Sequence[Program], seed: int) -> Iterator[Program]:
    """Yield programs without end, in a new shuffled order each time round."""
    if not programs:
        raise TraceError("no program of the trace fits")
    randomness = random.Random(f"order/{seed}")
    order = list(programs)
    while True:
        randomness.shuffle(order)
        yield from order


def size_classes(programs: Sequence[Program]) -> list[float]:
    """Return the three generated-token counts that cut a trace into size quartiles."""
    sizes = sorted(p.output_tokens for p in programs)
    return [float(sizes[min(len(sizes) - 1, len(sizes) * q // 4)]) for q in (1, 2, 3)]


def size_class(program: Program, cuts: Sequence[float]) -> int:
    """Return the quartile, 0 for the smallest programs."""
    return bisect_right(list(cuts), program.output_tokens - 0.5)

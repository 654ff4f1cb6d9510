"""Whom to take out of the batch for waiting calls of a higher level.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

MISFITS_MAX: Final = 8  # waiting calls that cannot be helped before the search is given up


class Waiting(NamedTuple):
    """A ready waiting call."""

    level: float  # it takes the place of running calls of a larger one
    blocks: int  # KV blocks it needs beyond what it finds in the cache


class Running(NamedTuple):
    """A running call that may be taken out."""

    level: float
    lost_tokens: int  # computed tokens that it may have to compute again
    protected: bool  # in its cool-down
    number: int  # the caller's


class Relief(NamedTuple):
    """Who gives way, and for whom."""

    victims: list[int]  # numbers of running calls
    helped: list[int]  # places in the order of the waiting calls


def choose_victims(
    waiting: Iterable[Waiting],
    running: Sequence[Running],
    *,
    slots: int,
    blocks: int,
    blocks_of: Callable[[int], int],
) -> Relief:
    """Return the calls to take out, so that waiting calls of higher levels fit.

    Lowest level first, then least work lost. A call is a victim only for one of a strictly higher
    level, and only if that one then fits: who cannot be helped costs nobody his place.

    Args:
        waiting: Ready calls, best first.
        running: Calls of the batch, in any order.
        slots: Free places in the batch.
        blocks: Free KV blocks, with those on their way.
        blocks_of: KV blocks that become free with the running call of this number; asked only where
            blocks are short.
    """
    rest = sorted(
        (call for call in running if not call.protected),
        key=lambda call: (call.level, -call.lost_tokens),
    )  # the next victim is at the end
    relief = Relief([], [])
    misfits = 0
    for place, call in enumerate(waiting):
        short_of_slot = slots < 1
        if not short_of_slot and call.blocks <= blocks:
            slots -= 1
            blocks -= call.blocks
            continue
        if not rest or rest[-1].level <= call.level:
            break
        taken = _take(rest, call, slots=slots, blocks=blocks, blocks_of=blocks_of)
        if taken is None:
            misfits += 1
            if misfits >= MISFITS_MAX:
                break
            continue
        for victim, freed in taken:
            rest.remove(victim)
            relief.victims.append(victim.number)
            slots += 1
            blocks += freed
        relief.helped.append(place)
        slots -= 1
        blocks -= call.blocks
    return relief


def choose_for_room(
    running: Sequence[Running], *, blocks: int, blocks_of: Callable[[int], int]
) -> list[int]:
    """Return whom to take out so that the others can go on: ``blocks`` more must become free.

    Here the worst call gives way whatever its level, but the last one stays; protection yields too
    if there is no other way, since somebody must.

    Args:
        running: Calls of the batch, in any order.
        blocks: KV blocks that are short.
        blocks_of: KV blocks that become free with the running call of this number.
    """
    order = sorted(running, key=lambda call: (call.protected, -call.level, call.lost_tokens))
    chosen: list[int] = []
    for call in order[: max(0, len(order) - 1)]:
        if blocks <= 0:
            break
        freed = blocks_of(call.number)
        if freed > 0:
            chosen.append(call.number)
            blocks -= freed
    return chosen


def _take(
    rest: Sequence[Running],
    call: Waiting,
    *,
    slots: int,
    blocks: int,
    blocks_of: Callable[[int], int],
) -> list[tuple[Running, int]] | None:
    """Return the fewest victims, worst first, with their blocks; None if even all do not do."""
    taken: list[tuple[Running, int]] = []
    for victim in reversed(rest):
        if victim.level <= call.level:
            break
        freed = blocks_of(victim.number)
        taken.append((victim, freed))
        slots += 1
        blocks += freed
        if slots >= 1 and blocks >= call.blocks:
            return _spare(taken, slots - 1, blocks - call.blocks)
    return None


def _spare(taken: list[tuple[Running, int]], slots: int, blocks: int) -> list[tuple[Running, int]]:
    """Let those go that are not needed, the most valuable first."""
    kept = []
    for victim, freed in reversed(taken):
        if slots >= 1 and blocks >= freed:
            slots -= 1
            blocks -= freed
        else:
            kept.append((victim, freed))
    return kept

"""What becomes of a victim's KV: keep, swap, recompute or drop, by measured cost."""

from __future__ import annotations

import enum
from typing import NamedTuple

# Blocks freed first-in-first-out survive while this many times as many are free: the prefix cache
# gives them back at no cost.
KEEP_FREE_RATIO = 8
TRANSFER_FIXED_S = 100e-6  # of one bulk transfer, each way


class Choice(enum.Enum):
    """What to do with the blocks of a victim."""

    KEEP = "keep"  # leave them to the prefix cache: nothing is short of blocks
    SWAP = "swap"
    RECOMPUTE = "recompute"
    DROP = "drop"  # the call will not run again


class Decision(NamedTuple):
    """A choice and why."""

    choice: Choice
    reason: str


class Victim(NamedTuple):
    """A call that is being preempted."""

    tokens: int  # computed
    block_tokens: int
    block_bytes: int
    stored_blocks: int  # in the host pool already, for another owner
    free_device_blocks: int  # without the victim's own
    prefix_cache: bool
    resumes: bool = True


class Speeds(NamedTuple):
    """Measured speeds; None while there is no measurement."""

    out_bytes_s: float | None = None
    in_bytes_s: float | None = None
    prefill_tokens_s: float | None = None

    def blend(self, newer: Speeds, share: float = 0.2) -> Speeds:
        """Return a moving average with the newer figures, each where there is one."""

        def mix(old: float | None, new: float | None) -> float | None:
            if old is None or new is None:
                return new if old is None else old
            return (1 - share) * old + share * new

        return Speeds(*(mix(old, new) for old, new in zip(self, newer, strict=True)))


def choose(victim: Victim, speeds: Speeds) -> Decision:
    """Return the cheapest way to have the victim's KV when it resumes.

    Without a measured prefill speed it is swapped: that yields a measurement, and the blocks
    are safe meanwhile.

    >>> choose(Victim(512, 16, 4096, 0, 0, True), Speeds(1e10, 1e10, 1e3)).choice
    <Choice.SWAP: 'swap'>
    >>> choose(Victim(16, 16, 1 << 30, 0, 0, True), Speeds(1e9, 1e9, 1e3)).choice
    <Choice.RECOMPUTE: 'recompute'>
    """
    assert victim.tokens >= 0
    if not victim.resumes:
        return Decision(Choice.DROP, "will not resume")
    if victim.tokens == 0:
        return Decision(Choice.RECOMPUTE, "nothing computed")
    if speeds.prefill_tokens_s is None:
        return Decision(Choice.SWAP, "prefill not measured")
    blocks = -(-victim.tokens // victim.block_tokens)
    tail = victim.tokens % victim.block_tokens
    recompute_s = victim.tokens / speeds.prefill_tokens_s
    swap_s = 2 * TRANSFER_FIXED_S
    if speeds.out_bytes_s is not None:
        swap_s += max(0, blocks - victim.stored_blocks) * victim.block_bytes / speeds.out_bytes_s
    if speeds.in_bytes_s is not None:
        swap_s += blocks * victim.block_bytes / speeds.in_bytes_s
    if (
        victim.prefix_cache
        and victim.free_device_blocks >= KEEP_FREE_RATIO * blocks
        and tail / speeds.prefill_tokens_s <= swap_s
    ):
        return Decision(Choice.KEEP, "the device has room")
    if recompute_s < swap_s:
        return Decision(Choice.RECOMPUTE, "recomputing is faster")
    return Decision(Choice.SWAP, "swapping is faster")

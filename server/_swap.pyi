"""The native module: bulk copies of KV blocks between a paged cache and host memory."""

from __future__ import annotations

from collections.abc import Sequence

def plan_runs(block_ids: Sequence[int], block_count: int) -> list[tuple[int, int, int]]:
    """Merge neighbouring block ids, in their order, into ``(first_block, first_slot, count)``.

    Raises:
        IndexError: an id is negative or not below ``block_count``.
    """

"""The worker's half of the swap: carries out the copies of a step, and owns up to what failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ..swap.choose import Speeds
from ..swap.host_pool import SlotRef
from .copier import Copier

_log = logging.getLogger("vllm.autellix.swap")

PREFILL_TOKENS_MIN = 64  # below that a step's time says little about prefill
_MEASURED_BYTES_MIN = 1 << 16


class SwapWorker:
    """Fills slots and empties them; knows under which stamp each slot was filled.

    Args:
        copier: Moves the bytes.
        slot_count: Slots of the pool.
    """

    def __init__(self, copier: Copier, slot_count: int) -> None:
        self._copier = copier
        self._stamps = [0] * slot_count  # 0: not filled; stamps count from 1
        self._failed_slots: list[SlotRef] = []
        self._invalid_blocks: set[int] = set()
        self._speeds = Speeds()
        self._step_start_s: float | None = None

    def swap_out(self, block_ids: Sequence[int], slots: Sequence[SlotRef]) -> None:
        """Fill slots from blocks, before anything overwrites the blocks.

        A copy that fails raises nothing: the slots are reported, and their calls recomputed.
        """
        if not slots:
            return
        for slot_id, _ in slots:
            self._stamps[slot_id] = 0
        try:
            moved = self._copier.swap_out(list(block_ids), [slot_id for slot_id, _ in slots])
        except (RuntimeError, ValueError, IndexError) as error:
            _log.warning("swap-out of %d blocks failed: %s", len(slots), error)
            self._failed_slots.extend(slots)
            return
        for slot_id, stamp in slots:
            self._stamps[slot_id] = stamp
        if moved.seconds and moved.size_bytes >= _MEASURED_BYTES_MIN:
            self._speeds = self._speeds.blend(Speeds(out_bytes_s=moved.size_bytes / moved.seconds))

    def swap_in(self, block_ids: Sequence[int], slots: Sequence[SlotRef]) -> None:
        """Fill blocks from slots, before anything reads the blocks.

        Blocks whose slot does not hold what it should are reported as invalid.
        """
        if not slots:
            return
        good = [i for i, ref in enumerate(slots) if self._stamps[ref.slot_id] == ref.stamp]
        if len(good) < len(slots):
            bad = set(range(len(slots))).difference(good)
            self._refuse([block_ids[i] for i in bad], "the slots hold something else")
        if not good:
            return
        blocks = [block_ids[i] for i in good]
        try:
            moved = self._copier.swap_in(blocks, [slots[i].slot_id for i in good])
        except (RuntimeError, ValueError, IndexError) as error:
            self._refuse(blocks, str(error))
            return
        if moved.seconds and moved.size_bytes >= _MEASURED_BYTES_MIN:
            self._speeds = self._speeds.blend(Speeds(in_bytes_s=moved.size_bytes / moved.seconds))

    def _refuse(self, block_ids: Sequence[int], reason: str) -> None:
        _log.warning("swap-in of %d blocks failed: %s", len(block_ids), reason)
        self._invalid_blocks.update(block_ids)

    def begin_step(self) -> None:
        """The model is about to run."""
        self._step_start_s = time.perf_counter()

    def end_step(self, step_tokens: int) -> None:
        """The model ran ``step_tokens`` tokens, synchronously."""
        if self._step_start_s is not None and step_tokens >= PREFILL_TOKENS_MIN:
            seconds = max(time.perf_counter() - self._step_start_s, 1e-9)
            self._speeds = self._speeds.blend(Speeds(prefill_tokens_s=step_tokens / seconds))
        self._step_start_s = None

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks that were not loaded since the last time."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_news(self) -> tuple[list[SlotRef], Speeds]:
        """Return failed slots and speeds since the last time."""
        news = (self._failed_slots, self._speeds)
        self._failed_slots, self._speeds = [], Speeds()
        return news

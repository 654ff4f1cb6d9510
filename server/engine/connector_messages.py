"""What the scheduler's half of the swap tells each worker's half, and back, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ..swap.choose import Speeds
from ..swap.host_pool import SlotRef


@dataclass
class SwapMetadata(KVConnectorMetadata):
    """The copies of one step, blocks and slots side by side, and how many tokens it computes.

    Swap-outs come first: their blocks may be given to others in this very step.
    """

    step: int = 0
    out_blocks: list[int] = field(default_factory=list)
    out_slots: list[SlotRef] = field(default_factory=list)
    in_blocks: list[int] = field(default_factory=list)
    in_slots: list[SlotRef] = field(default_factory=list)
    step_tokens: int = 0


@dataclass
class SwapWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's answer to a step's message: slots it could not fill, and how fast it was."""

    step: int = 0
    failed_slots: list[SlotRef] = field(default_factory=list)
    speeds: Speeds = field(default_factory=Speeds)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both workers' news: every failed slot, and the slower speed of each kind."""
        assert isinstance(other, SwapWorkerMetadata)
        slower = Speeds(
            *(
                min((v for v in pair if v is not None), default=None)
                for pair in zip(self.speeds, other.speeds, strict=True)
            )
        )
        return SwapWorkerMetadata(
            min(self.step, other.step), self.failed_slots + other.failed_slots, slower
        )

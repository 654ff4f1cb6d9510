"""The host link of a virtual engine: swapped blocks take time, and no byte moves.

The connector and its books are the product's; only the worker is missing, so its answers are given
here, with the speeds of the profile.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import KVConnectorOutput

from ..engine.connector_messages import SwapMetadata, SwapWorkerMetadata
from ..swap.choose import Speeds
from .cost_model import Profile, Work

STAND_IN_BYTES = 8  # of a token's KV in the stand-in model of engine/build.py


def pool_bytes(profile: Profile, host_gib: float) -> int:
    """Return the size of the stand-in's host pool that has as many blocks as a real one."""
    blocks = int(host_gib * 2**30 / (profile.block_tokens * profile.kv_bytes_per_token))
    return blocks * profile.block_tokens * STAND_IN_BYTES


class HostLink:
    """Carries the swap of one engine.

    Args:
        profile: The link's speed, and how fast a prompt is computed.
        scheduler: Whose connector asks for copies.
    """

    def __init__(self, profile: Profile, scheduler: Any) -> None:
        self._block_bytes = profile.block_tokens * profile.kv_bytes_per_token
        self._connector = scheduler.connector
        chunk = profile.chunk_tokens
        # In the books' own bytes, which are the stand-in's.
        bytes_s = STAND_IN_BYTES / (profile.kv_bytes_per_token * profile.swap_s_per_byte)
        step_s = profile.step_s(Work(chunk, chunk, chunk * chunk // 2, 1))
        self._speeds = Speeds(bytes_s, bytes_s, chunk / step_s)

    def bytes_of(self, output: Any) -> int:
        """Return what a step moves, out and in."""
        meta = output.kv_connector_metadata
        assert isinstance(meta, SwapMetadata)
        return (len(meta.out_blocks) + len(meta.in_blocks)) * self._block_bytes

    def answer(self, output: Any) -> None:
        """Tell the connector that a step's copies are done."""
        meta = output.kv_connector_metadata
        assert isinstance(meta, SwapMetadata)
        news = SwapWorkerMetadata(meta.step, speeds=self._speeds)
        self._connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=news))

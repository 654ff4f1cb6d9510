"""The KV connector that swaps calls and waiting programs to host memory, inside stock vLLM.

vLLM makes one object per role: the scheduler's keeps the books (swap_ledger), each worker's moves
the bytes (swap_worker). The order that makes it safe, on vLLM's side:

1. the scheduler calls ``swap_out`` before it frees a victim's blocks;
2. ``build_connector_meta`` sends all copies of the step along with it;
3. ``handle_preemptions`` gathers before the step touches the cache;
4. ``start_load_kv`` scatters before the forward pass, for loads here are synchronous.

A model whose KV is not plain blocks of full attention is served without swapping; the reason is
logged once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from ..swap.host_pool import HostPool
from . import compat
from .connector_messages import SwapMetadata, SwapWorkerMetadata
from .copier import CopierError, open_copier
from .swap_ledger import SwapCounts, SwapLedger
from .swap_worker import SwapWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

_log = logging.getLogger("vllm.autellix.swap")

THREADS_MAX = 8
LOG_EVERY_SWAPS = 1000


class SwapConnector(KVConnectorBase_V1, SupportsHMA):
    """Swaps preempted calls out and in; see ``swap_transfer_config`` for its configuration.

    ``swap_out`` is for the scheduler, before it frees a victim's blocks, ``shelve``, ``fetch`` and
    ``forget`` are for the KV of programs between two calls; all else is vLLM's interface.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._threads = int(extra.get("threads", 0)) or min(
            THREADS_MAX, max(1, (os.cpu_count() or 2) // 2)
        )
        self._block_bytes = _block_bytes(kv_cache_config)
        pool_bytes = int(extra.get("pool_bytes", 0))
        slot_count = pool_bytes // self._block_bytes if self._block_bytes else 0
        self._slot_count = slot_count
        self.refusal = unsupported_reason(vllm_config, kv_cache_config)
        if self.refusal is None and slot_count < 1:
            self.refusal = f"a pool of {pool_bytes} bytes holds no block of {self._block_bytes}"
        self._ledger: SwapLedger | None = None
        self._worker: SwapWorker | None = None
        self._prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
        self._sync_steps = False
        self._lost_blocks: set[int] = set()
        if self.refusal is not None:
            _log.warning("preempted calls are recomputed, not swapped: %s", self.refusal)
        elif role == KVConnectorRole.SCHEDULER:
            spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            self._ledger = SwapLedger(
                HostPool(slot_count),
                spec.block_size,
                self._block_bytes,
                shares=self._prefix_cache,
                always=bool(extra.get("always", False)),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to others: a lost block is recomputed."""
        return False

    # ---- the scheduler's side

    @property
    def counts(self) -> SwapCounts:
        """What was swapped since the start; on the scheduler's side."""
        return self._ledger.counts if self._ledger is not None else SwapCounts()

    @property
    def ledger(self) -> SwapLedger | None:
        """The books, or None if nothing is swapped here."""
        return self._ledger

    def swap_out(
        self, request: Any, block_ids_per_group: Sequence[Sequence[int]], computed_tokens: int
    ) -> bool:
        """Save a victim's blocks, if that is the best; to be called before they are freed.

        Not to be called when the model's weights changed, for the saved KV would be the old one.

        Args:
            request: The victim, in its state from before the preemption.
            block_ids_per_group: Its blocks, as the KV cache manager tells them.
            computed_tokens: Its ``num_computed_tokens``.

        Returns:
            Whether it is swapped; False means that it will be recomputed, or that the device's
            prefix cache will do.
        """
        if self._ledger is None or len(block_ids_per_group) != 1:
            return False
        free_blocks = 0
        if self._kv_cache_manager is not None:
            free_blocks = self._kv_cache_manager.block_pool.get_num_free_blocks()
        self._ledger.save(
            request,
            block_ids_per_group[0],
            computed_tokens,
            free_device_blocks=free_blocks,
            prefix_cache=self._prefix_cache,
        )
        if self._ledger.counts.swap_outs % LOG_EVERY_SWAPS == 1:
            _log.info("swap counts: %s", self._ledger.counts.as_dict())
        return self._ledger.is_saved(request.request_id)

    def shelve(self, program_id: str, hashes: Sequence[Any], block_ids: Sequence[int]) -> None:
        """Save what the device has of a program between two calls, before others take its blocks.

        Args:
            program_id: Its next call takes it back.
            hashes: Of its whole blocks, first to last.
            block_ids: Those blocks.
        """
        if self._ledger is not None:
            self._ledger.shelve(program_id, hashes, block_ids)

    def fetch(self, program_id: str, request: Any) -> None:
        """A call came in: it may have what its program has on the shelf."""
        # Such a call wants all of its prompt computed, for its log probabilities.
        if self._ledger is not None and not request.skip_reading_prefix_cache:
            self._ledger.fetch(program_id, request)

    def fetch_token_s(self) -> float:
        """Return what it takes to save a token's KV and fetch it back; endless: not measured."""
        return float("inf") if self._ledger is None else self._ledger.fetch_token_s()

    def holds(self, call_id: str) -> bool:
        """Return whether a call has slots: it was saved, and will be loaded when it is admitted."""
        return self._ledger is not None and self._ledger.pool.find(call_id) is not None

    def forget(self, program_ids: Iterable[str]) -> None:
        """These programs are over."""
        if self._ledger is not None:
            self._ledger.forget(program_ids)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that the host pool has beyond the device's own; loads are in step."""
        if self._ledger is None:
            return 0, False
        return self._ledger.loadable_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Any, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The call runs again: queue its load."""
        if self._ledger is not None and self._ledger.is_saved(request.request_id):
            self._ledger.resume(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the copies of this step."""
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._ledger is None:
            return SwapMetadata(step_tokens=tokens)
        return SwapMetadata(*self._ledger.take_copies(), step_tokens=tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn what the workers could not do, and how fast they are."""
        news = connector_output.kv_connector_worker_meta
        if self._ledger is None or not isinstance(news, SwapWorkerMetadata):
            return
        if connector_output.invalid_block_ids:
            for request in self._ledger.lost_loads(news.step, connector_output.invalid_block_ids):
                # For a scheduler that does not know of it; ours does it for siblings as well.
                request.num_output_placeholders = 0
        self._ledger.learn(news.step, news.failed_slots, news.speeds)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002 - vLLM's interface
    ) -> tuple[bool, dict[str, Any] | None]:
        """The call is over, whatever its state was: its slots are free."""
        if self._ledger is not None:
            self._ledger.end(request.request_id)
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - vLLM's interface
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for models with several groups of layers."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Forget all saved KV: the weights changed."""
        if self._ledger is not None:
            self._ledger.clear()
        return True

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn where the cache lies and take the pool's memory."""
        if self.refusal is not None:
            return
        blocks = self._kv_cache_config.num_blocks
        try:
            copier = open_copier(kv_caches, blocks, self._slot_count, self._threads)
        except CopierError as error:
            # The scheduler's half does not know: it is told that every swap-out failed.
            self.refusal = str(error)
            _log.warning("preempted calls are recomputed, not swapped: %s", error)
            return
        self._sync_steps = copier.backend == "cpu"
        self._worker = SwapWorker(copier, self._slot_count)
        _log.info(
            "swap pool: %d slots of %d bytes, %s",
            self._slot_count,
            copier.slot_bytes,
            copier.backend,
        )
        if copier.slot_bytes != self._block_bytes:
            _log.info("the scheduler counts %d bytes a block", self._block_bytes)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Gather the victims' blocks before the step overwrites them."""
        assert isinstance(kv_connector_metadata, SwapMetadata)
        if self._worker is not None:
            self._worker.swap_out(kv_connector_metadata.out_blocks, kv_connector_metadata.out_slots)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and self._sync_steps:
            self._worker.begin_step()

    def start_load_kv(
        self,
        forward_context: Any,  # noqa: ARG002 - vLLM's interface
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Scatter resumed calls' blocks before the forward pass reads them."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SwapMetadata)
        if not meta.in_slots:
            return
        if self._worker is not None:
            self._worker.swap_in(meta.in_blocks, meta.in_slots)
            if self._sync_steps:
                self._worker.begin_step()
        else:
            self._lost_blocks = set(meta.in_blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads are done or ordered before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save by layer: whole calls are saved at preemption."""

    def wait_for_save(self) -> None:
        """The step is over."""
        meta = self._get_connector_metadata()
        if self._worker is not None and self._sync_steps and isinstance(meta, SwapMetadata):
            self._worker.end_step(meta.step_tokens)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded; vLLM recomputes them."""
        if self._worker is not None:
            return self._worker.take_invalid_blocks()
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def build_connector_worker_meta(self) -> SwapWorkerMetadata | None:
        """Return the answer to this step's message."""
        meta = self._get_connector_metadata()
        assert isinstance(meta, SwapMetadata)
        if self._worker is None:
            return SwapWorkerMetadata(meta.step, meta.out_slots)
        return SwapWorkerMetadata(meta.step, *self._worker.take_news())


def find_swap(connector: Any) -> SwapConnector | None:
    """Return the swap connector in what the scheduler has, or None.

    Raises:
        ValueError: it is not the first of a MultiConnector, whose first connector with tokens is
            the only one that loads: a swapped call would be loaded from elsewhere, in part.
    """
    if connector is None or isinstance(connector, SwapConnector):
        return connector
    children = list(getattr(connector, "sub_connectors", ()))
    swaps = [i for i, child in enumerate(children) if isinstance(child, SwapConnector)]
    if not swaps:
        return None
    if swaps != [0]:
        raise ValueError(
            "in a MultiConnector the SwapConnector must come first, and once; "
            f"it is at {swaps} of {len(children)}"
        )
    child: SwapConnector = children[0]
    return child


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why this model's KV is not swapped, or None if it is."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism: each stage has other layers"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        return f"{len(groups)} groups of KV layers ({', '.join(kinds)})"
    spec = groups[0].kv_cache_spec
    specs = (
        list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    )
    # Exactly this type: MLA and others inherit from it.
    kinds = sorted({type(s).__name__ for s in specs if type(s) is not FullAttentionSpec})
    if kinds:
        return f"KV of kind {', '.join(kinds)}"
    # vLLM's second runner zeroes and copies new blocks before it asks for the gather: what was a
    # victim's block could be overwritten by then. Plain blocks are neither zeroed nor copied.
    if kv_cache_config.needs_kv_cache_zeroing:
        return "KV blocks that are zeroed before use"
    if compat.hash_block_tokens(kv_cache_config) not in (None, spec.block_size):
        return "prefix hits of parts of blocks, which are copied on write"
    return None


def _block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of a block in all layers of the first group."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return 0
    spec = groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return int(spec.page_size_bytes)
    return int(spec.page_size_bytes) * len(groups[0].layer_names)

"""The only place that knows versions of vLLM, and what this one lacks.

The tests of ``make releases`` pass on the floor and on each release from there on; older ones were
never tried, so they are refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import vllm
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from autellix import wire
from autellix.errors import ConfigError

from ..call_tag import find_call, unseal_program

VLLM_FLOOR: Final = (0, 30)

# What the scheduler overrides or reads; a release without one of them is refused at start.
_SEAM: Final = (
    "schedule",
    "update_from_output",
    "add_request",
    "_free_request",
    "_preempt_request",
    "_request_blocks_can_be_freed",
    "_update_after_schedule",
    "shutdown",
)

# From vLLM 0.31 on: models with state space layers keep a checkpoint where the prompt ends.
_ASKS_PREFILL_END: Final = (
    "prefill_end" in inspect.signature(KVCacheCoordinator.get_num_blocks_to_allocate).parameters
)

_CONNECTORS: Final = ("SwapConnector", "MultiConnector")  # ours loads within a step

# Until vLLM 0.31 calls that hold blocks while they wait had no queue of their own, ahead of all.
_HAS_SIDE_QUEUE: Final = re.match(r"0\.30\b", vllm.__version__) is not None

_READY: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Identity(NamedTuple):
    """Who a call is, as far as it may be believed."""

    program_id: str | None
    call_id: str | None
    service_s: float
    wait_s: float
    arrival_ms: int | None
    weight: float = 1.0
    deadline_ms: int | None = None  # on the clock of ``arrival_ms``
    kind: str | None = None
    by_path: bool | None = None  # the measure of service and wait; None: not said


ANYBODY: Final = Identity(None, None, 0.0, 0.0, None)


def check_version() -> None:
    """Refuse a vLLM that cannot work.

    Raises:
        ConfigError: names the version found and what is needed.
    """
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found is not None and (int(found[1]), int(found[2])) < VLLM_FLOOR:
        raise ConfigError(
            f"vLLM {vllm.__version__} is too old for the autellix scheduler: "
            f"it needs {VLLM_FLOOR[0]}.{VLLM_FLOOR[1]} or newer"
        )
    missing = [name for name in _SEAM if not hasattr(AsyncScheduler, name)]
    if missing:
        raise ConfigError(
            f"vLLM {vllm.__version__} has changed its scheduler: {missing[0]} is gone; "
            "use a release that this version of autellix was tested with"
        )


def version() -> str:
    """Return vLLM's version."""
    return str(vllm.__version__)


def check_config(vllm_config: Any) -> None:
    """Refuse what cannot work together with program-aware scheduling.

    Raises:
        ConfigError: names the setting and the way out.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size {parallel.data_parallel_size} makes one scheduler for each "
            "rank, and programs would be told apart: start more engines instead"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: program-aware scheduling "
            "was never tested with it; use --tensor-parallel-size, or --policy program or fcfs, "
            "which run vLLM's own scheduler"
        )
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        raise ConfigError(
            "encoder-decoder models are not supported: their encoder's memory is not in the room "
            "that is counted; use --policy program or fcfs, which run vLLM's own scheduler"
        )
    if getattr(vllm_config.model_config, "is_multimodal_model", False):
        raise ConfigError(
            "multimodal models are not supported: what a call needs of the encoder's budget is not "
            "known before it is admitted, so others would give way to it in vain; use --policy "
            "program or fcfs, which run vLLM's own scheduler"
        )
    if getattr(vllm_config.model_config, "is_diffusion", False):
        raise ConfigError("diffusion models are not supported: their calls are no chains of tokens")
    if vllm_config.model_config.runner_type == "pooling":
        raise ConfigError(
            "pooling models are not supported: vLLM hands no session on for their calls, so there "
            "are no programs to order; run the stock scheduler for them"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_role == "kv_producer":
        raise ConfigError(
            "kv_role kv_producer (prefill-only engines) is not supported: a preempted call "
            "would lose the blocks that it is about to hand over; run the stock scheduler there"
        )
    if _HAS_SIDE_QUEUE and transfer is not None and transfer.kv_connector not in _CONNECTORS:
        raise ConfigError(
            f"kv_connector {transfer.kv_connector} with vLLM {vllm.__version__}: calls whose KV is "
            "loaded could wait behind others that need their blocks; use vLLM 0.31 or newer"
        )
    _check_async(vllm_config)


def _check_async(vllm_config: Any) -> None:
    """Refuse steps that do not overlap where they could; vLLM has no such steps on a CPU."""
    device = vllm_config.device_config.device_type
    if device != "cpu" and not vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            f"async_scheduling = False on {device}: must be True, or every step waits for the one "
            "before it; leave out --no-async-scheduling and what vLLM turns it off for (its log "
            "names it), or use --policy program or fcfs, which run vLLM's own scheduler"
        )


def identify(request: Request, key: bytes | None) -> Identity:
    """Return who a call is.

    Args:
        request: vLLM's request.
        key: The channel key. With one, only a program that the gateway sealed is believed, and only
            then the figures that came with it; all else is an untagged program. Without one (an
            engine that somebody runs by hand) the session id is taken as it is.
    """
    session_id = request.session_id
    if key is not None:
        program_id = unseal_program(session_id, key)
        if program_id is None:
            return ANYBODY
    else:
        program_id = session_id
    tag = find_call(request.request_id)
    if tag is None and program_id is None:
        return ANYBODY
    return Identity(
        program_id=program_id,
        call_id=tag.call_id if tag else None,
        service_s=max(0, request.priority) / 1000.0,
        wait_s=tag.wait_ms / 1000.0 if tag else 0.0,
        arrival_ms=tag.arrival_ms if tag else None,
        weight=min(max(tag.weight, wire.WEIGHT_MIN), wire.WEIGHT_MAX) if tag else 1.0,
        deadline_ms=tag.deadline_ms if tag else None,
        kind=tag.kind if tag else None,
        by_path=tag.by_path if tag else None,
    )


def is_ready(request: Request, scheduler: Any) -> bool:
    """Return whether a waiting call could run in the next step if there were room for it."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status in _READY:
        return True
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request
        return grammar is not None and isinstance(grammar.grammar, StructuredOutputGrammar)
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return False


class _SideQueue(RequestQueue):
    """vLLM 0.30's queue of calls that were passed over: empty, as all stand where others wait."""

    def __init__(self, waiting: RequestQueue) -> None:
        self._waiting = waiting

    def add_request(self, request: Request) -> None:
        self._waiting.add_request(request)

    def prepend_request(self, request: Request) -> None:
        self._waiting.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._waiting.prepend_requests(requests)

    def peek_request(self) -> Request:
        raise IndexError("it is always empty")

    def pop_request(self) -> Request:
        raise IndexError("it is always empty")

    def remove_request(self, request: Request) -> None:
        """Do nothing: vLLM asks the other queue as well."""

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Do nothing: vLLM asks the other queue as well."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Request]:
        """Go through those that wait: vLLM looks here for calls whose KV is being loaded."""
        return iter(self._waiting)


def join_queues(scheduler: Any) -> None:
    """Have all calls that wait stand in ``scheduler.waiting``, which the policy orders."""
    if hasattr(scheduler, "skipped_waiting"):
        scheduler.skipped_waiting = _SideQueue(scheduler.waiting)


def hash_block_tokens(kv_cache_config: Any) -> int | None:
    """Return the tokens of what prefixes are compared by; None: a block, as before vLLM 0.32."""
    tokens: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return tokens


def slots(scheduler: Any) -> int:
    """Return how many calls may run at once; vLLM 0.31 tells admission's limit from the batch's."""
    most = getattr(scheduler, "max_num_active_reqs", None)
    return int(scheduler.max_num_running_reqs if most is None else most)


def reason_of(request: Request) -> str:
    """Return why a call is over: ``stop``, ``length``, ``abort`` or ``error``, as a rule."""
    reason = request.get_finished_reason()
    return str(reason) if reason is not None else "unknown"


def blocks_needed(scheduler: Any, request: Request) -> int:
    """Return how many free KV blocks a waiting call takes, counting what it finds in the cache.

    The same question that vLLM asks before it admits a call; blocks in the cache that nobody uses
    count, since they are free until it takes them.
    """
    manager = scheduler.kv_cache_manager
    tokens = min(request.num_tokens, manager.max_model_len)
    if request.num_computed_tokens == 0:
        hit, hit_tokens, _ = manager.get_computed_blocks(request)
    else:
        hit, hit_tokens = manager.empty_kv_cache_blocks, 0
    computed = request.num_computed_tokens + hit_tokens
    more: dict[str, int] = {}
    if _ASKS_PREFILL_END:
        more["prefill_end"] = max(request.num_prompt_tokens, request.num_tokens - 1)
    needed: int = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens,
        new_computed_blocks=hit.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=computed,
        num_local_computed_tokens=computed,
        num_tokens_main_model=tokens,
        apply_admission_cap=True,
        **more,
    )
    return needed + int(manager.watermark_blocks)


def blocks_at_most(scheduler: Any, request: Request) -> int:
    """Return how many KV blocks a waiting call can need, whatever the cache holds."""
    manager = scheduler.kv_cache_manager
    tokens = min(request.num_tokens, manager.max_model_len)
    blocks = -(-tokens // scheduler.cache_config.block_size)
    return blocks * len(scheduler.kv_cache_config.kv_cache_groups) + int(manager.watermark_blocks)


def blocks_freed(scheduler: Any, request: Request) -> int:
    """Return how many KV blocks only this running call uses; shared ones do not become free."""
    groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    return sum(
        1 for blocks in groups for block in blocks if block.ref_cnt == 1 and not block.is_null
    )


def blocks_free(scheduler: Any) -> int:
    """Return the KV blocks that are free now or on their way."""
    free = int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
    return free + sum(len(blocks) for _, blocks in scheduler.deferred_frees)


def cached_blocks(scheduler: Any, hashes: Sequence[Hashable]) -> list[int]:
    """Return the blocks of a chain that the prefix cache has, up to the first that it has not."""
    blocks = []
    for block_hash in hashes:
        found = scheduler.kv_cache_manager.block_pool.get_cached_block(block_hash, [0])
        if not found or found[0].is_null:
            break
        blocks.append(int(found[0].block_id))
    return blocks


def evict_first(scheduler: Any, hashes: Sequence[Hashable]) -> None:
    """Let cached blocks that nobody uses go before all others, the last ones of the chain first.

    Models with several kinds of KV hash at another granularity than they store: nothing is done.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or scheduler.block_size != scheduler.cache_config.block_size:
        return
    pool = scheduler.kv_cache_manager.block_pool
    queue = pool.free_block_queue
    blocks = []
    for block_hash in reversed(hashes):
        found = pool.get_cached_block(block_hash, [0])
        if found and found[0].ref_cnt == 0 and not found[0].is_null:
            queue.remove(found[0])
            blocks.append(found[0])
    queue.prepend_n(blocks)

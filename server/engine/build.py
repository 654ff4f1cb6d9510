"""A real vLLM scheduler without a GPU, a model or an engine: for the simulator and for tests.

Everything here is vLLM's own: configuration, KV-cache manager, block hashes. Only the model is
missing: a configuration file of a tiny Llama stands in for it, since the scheduler asks nothing of
a model but its longest context.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

#: The stand-in model: a configuration and no weights. Shipped, since vLLM may read it at any time.
_MODEL_FOLDER: Final = Path(__file__).with_name("stand_in")


def build_config(
    *,
    kv_blocks: int,
    block_tokens: int = 16,
    slots: int = 256,
    step_tokens: int = 2048,
    max_model_tokens: int = 8192,
    policy_config: Mapping[str, Any] | None = None,
    prefix_caching: bool = True,
    chunked_prefill: bool = True,
    async_scheduling: bool = False,
    priority: bool = True,
    **engine_args: Any,
) -> VllmConfig:
    """Return a vLLM configuration of an engine that does not exist.

    Args:
        kv_blocks: KV blocks of the engine, counting the null block that vLLM keeps.
        block_tokens: Tokens of a block.
        slots: Calls in one batch at most.
        step_tokens: Tokens of one step at most.
        max_model_tokens: Longest prompt and answer together, at most 262,144.
        policy_config: ``additional_config["autellix"]``; None is the default policy.
        prefix_caching: Whether blocks of the same content are shared.
        chunked_prefill: Whether a prompt may be spread over several steps.
        async_scheduling: As on a GPU. vLLM forces it off where there is only a CPU, so it is put
            back here after its checks.
        priority: vLLM's own ``--scheduling-policy``: ``priority``, else ``fcfs``.
        engine_args: Anything else of vLLM's ``EngineArgs``.
    """
    arguments: dict[str, Any] = {
        "model": str(_MODEL_FOLDER),
        "skip_tokenizer_init": True,
        "max_model_len": max_model_tokens,
        "max_num_seqs": slots,
        "max_num_batched_tokens": step_tokens,
        "enable_prefix_caching": prefix_caching,
        "enable_chunked_prefill": chunked_prefill,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "block_size": block_tokens,
        "scheduling_policy": "priority" if priority else "fcfs",
        "async_scheduling": False,
        **engine_args,
    }
    if policy_config is not None:
        arguments["additional_config"] = {"autellix": dict(policy_config)}
    with _environment(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1"):
        config = EngineArgs(**arguments).create_engine_config()
    config.cache_config.num_gpu_blocks = kv_blocks
    config.scheduler_config.async_scheduling = async_scheduling
    config.device_config.device_type = "cpu"  # it may do without, whatever this machine has
    return config


def build_scheduler(
    scheduler_cls: type[Scheduler],
    *,
    v2_runner: bool = False,
    config: VllmConfig | None = None,
    log_stats: bool = False,
    **config_args: Any,
) -> Scheduler:
    """Return a scheduler of this class with its own KV-cache manager.

    Args:
        scheduler_cls: vLLM's ``Scheduler`` or ``AsyncScheduler``, or a subclass.
        v2_runner: Whether it writes its output for vLLM's second model runner.
        config: A configuration to reuse (it is not changed); None builds one.
        log_stats: As in vLLM: events and statistics are kept.
        config_args: Those of :func:`build_config`.
    """
    if config is None:
        config = build_config(**config_args)
    block_tokens = config.cache_config.block_size
    blocks = config.cache_config.num_gpu_blocks
    assert blocks is not None
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kv = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    scheduler = scheduler_cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        log_stats=log_stats,
    )
    scheduler.use_v2_model_runner = v2_runner
    return scheduler


def make_request(
    request_id: str,
    prompt: Sequence[int],
    output_tokens: int,
    *,
    block_tokens: int = 16,
    arrival_s: float = 0.0,
    session_id: str | None = None,
    priority: int = 0,
    sampling: SamplingParams | None = None,
    prefix_caching: bool = True,
    **request_args: Any,
) -> Request:
    """Return a call as the engine's front end hands it to the scheduler.

    Args:
        request_id: vLLM's name of the call; the tag of :mod:`.call_tag` may be inside.
        prompt: Token ids, at least one.
        output_tokens: It ends after this many tokens, if ``sampling`` is None.
        block_tokens: As in the scheduler's configuration.
        arrival_s: Compared with other calls' only.
        session_id: The program, sealed (``call_tag.seal_program``), or anything foreign.
        priority: Attained service in ms by our protocol.
        sampling: For other ends, structured output and the like.
        prefix_caching: As in the scheduler's configuration.
        request_args: Anything else of vLLM's ``Request``.
    """
    sampling = sampling or SamplingParams(
        max_tokens=output_tokens, ignore_eos=True, temperature=0.0
    )
    return Request(
        request_id,
        list(prompt),
        sampling,
        None,
        arrival_time=arrival_s,
        session_id=session_id,
        priority=priority,
        block_hasher=_hasher(block_tokens) if prefix_caching else None,
        **request_args,
    )


@functools.cache
def _hasher(block_tokens: int) -> Callable[[Request], list[Any]]:
    hash_of = get_hash_fn_by_name("sha256")
    init_none_hash(hash_of)
    return get_request_block_hasher(block_tokens, hash_of)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the length of a block, where they are not set already."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)

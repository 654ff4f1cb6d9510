"""The ``--kv-transfer-config`` that puts the swap connector into a stock vLLM engine."""

from __future__ import annotations

from typing import Any


def swap_transfer_config(
    pool_bytes: int, *, threads: int = 0, always: bool = False
) -> dict[str, Any]:
    """Return vLLM's KV transfer configuration for the swap connector.

    A failed load is recomputed; vLLM's own default would fail the call.

    Args:
        pool_bytes: Host memory for preempted calls' blocks, of each worker; more than 0.
        threads: That copy, where the cache is host memory; 0: half the machine's, at most 8.
        always: Swap every victim, even where recomputing would be faster.

    Raises:
        ValueError: a figure is out of range.
    """
    if pool_bytes <= 0:
        raise ValueError(f"the swap pool has more than {pool_bytes} bytes; 0 means no connector")
    if not 0 <= threads <= 64:
        raise ValueError(f"threads is 0 to 64, not {threads}")
    return {
        "kv_connector": "SwapConnector",
        "kv_connector_module_path": "autellix.server.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "pool_bytes": pool_bytes,
            "threads": threads,
            "always": always,
        },
    }

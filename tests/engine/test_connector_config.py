"""How the swap gets into an engine's command line."""

from __future__ import annotations

import json

import pytest

from autellix.server.engine.launch import EngineRun, EngineSpec, build_command

RUN = EngineRun(
    run_id="r",
    uds="socket",
    api_key="k",
    channel_endpoint=None,
    channel_key=b"key",
)


def transfer_of(**changes: object) -> dict[str, object] | None:
    """Return the KV transfer configuration that the engine gets last, or None."""
    spec = EngineSpec(
        engine_id="e0",
        model_path="model",
        model_name="model",
        on_cpu=True,
        **{"policy": "plas", **changes},
    )
    argv = build_command(spec, RUN).argv
    places = [i for i, arg in enumerate(argv) if arg == "--kv-transfer-config"]
    assert len(places) <= 1
    return json.loads(argv[places[0] + 1]) if places else None


def test_a_pool_puts_the_connector_in():
    """With its size in bytes, and a failed load recomputed."""
    transfer = transfer_of(swap_mib=512)
    assert transfer is not None
    assert transfer["kv_connector"] == "SwapConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"]["pool_bytes"] == 512 << 20


@pytest.mark.parametrize("changes", [{"swap_mib": 0}, {"swap_mib": 512, "policy": "fcfs"}])
def test_without_a_pool_or_our_scheduler_there_is_none(changes):
    """Stock schedulers offer no victims."""
    assert transfer_of(**changes) is None


def test_the_users_own_connector_wins():
    """Theirs stays the only one."""
    own = '{"kv_connector": "Mine"}'
    transfer = transfer_of(swap_mib=512, vllm_args=("--kv-transfer-config", own))
    assert transfer == {"kv_connector": "Mine"}

"""The command line of an engine says what the policy asks for, and vLLM would accept it."""

from __future__ import annotations

import json

import pytest

from autellix.errors import ConfigError
from autellix.server import channel
from autellix.server.engine.launch import (
    ENV_RUN,
    EngineRun,
    EngineSpec,
    build_command,
    cores_for,
    devices_for,
    tool_parser_for,
)


def command(**changes: object):
    """Return the command of a small engine."""
    spec: dict[str, object] = {
        "engine_id": "e0",
        "model_path": "/models/smollm2",
        "model_name": "smollm2",
        "policy": "program",
        "on_cpu": True,
        **changes,
    }
    run = EngineRun(
        run_id="0badcafe",
        uds="/private/e0.sock",
        api_key="secret",
        channel_endpoint="ipc:///private/channel",
        channel_key=b"\x01\x02",
    )
    return build_command(EngineSpec(**spec), run)  # type: ignore[arg-type]


def value_of(argv: tuple[str, ...], flag: str) -> str | None:
    """Return what follows the flag the last time it is given."""
    places = [index for index, arg in enumerate(argv) if arg == flag]
    return argv[places[-1] + 1] if places else None


def test_program_policy_needs_stock_vllm_only():
    """Priority scheduling, and no class of ours."""
    argv = command().argv
    assert value_of(argv, "--scheduling-policy") == "priority"
    assert "--scheduler-cls" not in argv


def test_fcfs_is_vllms_own():
    """The baseline runs without anything of ours."""
    argv = command(policy="fcfs").argv
    assert value_of(argv, "--scheduling-policy") == "fcfs"
    assert "--scheduler-cls" not in argv
    assert "--additional-config" not in argv


@pytest.mark.parametrize("policy", ["plas", "atlas", "mlfq"])
def test_our_policies_put_our_scheduler_into_the_engine(policy: str):
    """By the public seam, with constants only: the config is part of the compile-cache key."""
    made = command(policy=policy, scheduler_constants={"level_count": 8})
    assert value_of(made.argv, "--scheduler-cls") == (
        "autellix.server.engine.scheduler.AutellixScheduler"
    )
    config = value_of(made.argv, "--additional-config")
    assert config is not None
    assert json.loads(config) == {"autellix": {"policy": policy, "level_count": 8}}
    assert "private" not in config


def test_keys_are_in_the_environment_and_not_on_the_command_line():
    """Any user may read another's command line."""
    made = command()
    assert "secret" not in " ".join(made.argv)
    assert made.env["VLLM_API_KEY"] == "secret"
    assert made.env[channel.ENV_KEY] == "0102"
    assert made.env[channel.ENV_ENDPOINT] == "ipc:///private/channel"
    assert made.env[channel.ENV_ENGINE_ID] == "e0"
    assert made.env[ENV_RUN] == "0badcafe"


def test_an_engine_listens_on_its_socket_and_ends_in_good_order():
    """No port, and time for the calls that run."""
    argv = command().argv
    assert value_of(argv, "--uds") == "/private/e0.sock"
    assert "--port" not in argv
    assert int(value_of(argv, "--shutdown-timeout") or 0) >= 5


def test_cpu_settings_are_for_the_cpu():
    """A GPU engine gets none of them."""
    assert value_of(command().argv, "--dtype") == "float32"
    assert command(kv_cache_gib=3).env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert command(on_cpu=True, devices="1").env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    gpu = command(on_cpu=False, devices="2,3")
    assert not {"--dtype", "--enforce-eager", "--gpu-memory-utilization"} & set(gpu.argv)
    assert "VLLM_CPU_KVCACHE_SPACE" not in gpu.env
    assert gpu.env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_users_arguments_come_last_and_win():
    """VLLM takes the last of two."""
    argv = command(vllm_args=("--dtype", "bfloat16", "--max-num-seqs", "4")).argv
    assert value_of(argv, "--dtype") == "bfloat16"
    assert argv[-2:] == ("--max-num-seqs", "4")


@pytest.mark.parametrize(
    "args",
    [
        ("--port", "1"),
        ("--uds=/x",),
        ("--api_key", "k"),
        ("--scheduler-cls", "x.Y"),
        ("--data-parallel-size", "2"),
        ("--data_parallel_size=4",),
        ("--api-server-count", "2"),
    ],
)
def test_arguments_that_are_the_pools_business_are_refused(args: tuple[str, ...]):
    """By whatever spelling vLLM would take."""
    with pytest.raises(ConfigError, match="refused"):
        command(vllm_args=args)


def test_one_data_parallel_rank_is_what_we_have_anyway():
    """Saying the default is no mistake."""
    assert command(vllm_args=("--data-parallel-size", "1")).argv[-1] == "1"


def test_engines_share_out_the_gpus():
    """Each takes as many as it has ranks; too many engines are refused."""
    args = ("-tp", "2", "--pipeline_parallel_size=1")
    visible = ("0", "1", "GPU-a", "GPU-b")
    assert [devices_for(index, args, visible) for index in (0, 1)] == ["0,1", "GPU-a,GPU-b"]
    with pytest.raises(ConfigError, match="3 engines of 2 GPUs"):
        devices_for(2, args, visible)


def test_engines_on_the_cpu_get_cores_of_their_own():
    """All cores are shared out; ranks of one engine are apart; too many engines double up."""
    assert [cores_for(i, 2, (), (0, 1)) for i in range(3)] == ["0", "1", "0"]
    assert [cores_for(i, 3, (), (4, 7)) for i in range(3)] == ["4", "7", "4"]
    two_ranks = ("--tensor-parallel-size", "2")
    assert [cores_for(i, 2, two_ranks, range(8)) for i in (0, 1)] == ["0,1|2,3", "4,5|6,7"]


@pytest.mark.parametrize(
    ("name", "parser"),
    [
        ("smollm2", "hermes"),
        ("Qwen/Qwen2.5-7B-Instruct", "hermes"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json"),
    ],
)
def test_the_tool_parser_follows_the_model(name: str, parser: str):
    """A tool call is text that only the right parser reads."""
    assert tool_parser_for(name) == parser


def test_every_parser_we_name_is_one_of_vllms():
    """A misspelt one would stop the engine at its start."""
    from vllm.tool_parsers import ToolParserManager

    from autellix.server.engine import launch

    known = set(ToolParserManager.list_registered())
    ours = {parser for _, parser in launch._TOOL_PARSERS} | {launch._TOOL_PARSER_OTHERWISE}
    assert ours <= known

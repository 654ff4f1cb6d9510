"""The command line and environment that start one stock vLLM engine under our policy.

Nothing here starts anything: the pool gets arguments and an environment, and a person who runs
vLLM pods by hand may copy them. The engine listens on a unix socket in a private folder and asks
for a random key, since any user of a machine reaches a port on its loopback.

Pure: what it needs to know of the machine is an argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from autellix.errors import ConfigError

from ..channel import ENV_CURVE, ENV_ENDPOINT, ENV_ENGINE_ID, ENV_KEY, ChannelCurve
from .connector_config import swap_transfer_config

Policy = Literal["program", "fcfs", "plas", "atlas", "mlfq", "adaptive"]

#: Policies that run inside the engine; the others need nothing but stock vLLM.
ENGINE_POLICIES: Final = frozenset({"plas", "atlas", "mlfq", "adaptive"})
SCHEDULER_CLASS: Final = "autellix.server.engine.scheduler.AutellixScheduler"
SHUTDOWN_TIMEOUT_S: Final = 5  # with vLLM's default of 0 the engine core is killed in mid-step

#: The pool finds the processes of one engine by this variable, whatever became of their parents.
ENV_RUN: Final = "AUTELLIX_ENGINE_RUN"

# Where an engine listens, who may call it and how many there are is the pool's business.
_REFUSED: Final = {
    "--uds": "the pool chooses the socket",
    "--host": "the pool chooses the socket",
    "--port": "the pool chooses the socket; use autellix serve --port",
    "--api-key": "the pool makes a key for each engine",
    "--model": "the model is the argument of autellix serve",
    "--scheduler-cls": "use autellix serve --policy",
    "--scheduling-policy": "use autellix serve --policy",
}

# The first pattern found in the lower-case model name decides (vLLM's names for its parsers).
_TOOL_PARSERS: Final = (
    ("qwen3-coder", "qwen3_coder"),
    ("smollm3", "hermes"),
    ("llama-4", "llama4_pythonic"),
    ("llama-3", "llama3_json"),
    ("mistral", "mistral"),
    ("ministral", "mistral"),
    ("granite", "granite"),
    ("deepseek-v3.1", "deepseek_v31"),
    ("deepseek", "deepseek_v3"),
    ("kimi-k2", "kimi_k2"),
    ("gpt-oss", "openai"),
)
_TOOL_PARSER_OTHERWISE: Final = "hermes"  # Qwen, Hermes, SmolLM; harmless for a model without tools


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What one engine is to be; the same for every start of it.

    Attributes:
        model_path: A folder or a hub name, as vLLM takes it.
        model_name: The name clients use.
        policy: Who orders the calls.
        on_cpu: Whether the installed vLLM runs on the CPU.
        kv_cache_gib: Size of the KV cache on the CPU; ignored on GPUs.
        swap_mib: Host memory of each worker for the KV of preempted calls, MiB; 0: recompute them.
            Needs a policy that runs inside the engine.
        scheduler_constants: Settings of our scheduler. Constants only: they are part of vLLM's
            compile-cache key.
        vllm_args: The user's own arguments; they win over ours.
        devices: ``CUDA_VISIBLE_DEVICES`` of this engine; on the CPU its cores, as
            ``VLLM_CPU_OMP_THREADS_BIND`` names them. None: as inherited.
    """

    engine_id: str
    model_path: str
    model_name: str
    policy: Policy
    on_cpu: bool
    kv_cache_gib: int = 1
    swap_mib: int = 0
    scheduler_constants: Mapping[str, object] = field(default_factory=dict)
    vllm_args: tuple[str, ...] = ()
    devices: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What differs from start to start of one engine."""

    run_id: str  # random; marks every process of this start
    uds: str | None  # a unix socket, or
    host: str = ""  # an address and port of its machine
    port: int = 0
    api_key: str
    channel_endpoint: str | None  # None: no control channel
    channel_key: bytes
    channel_curve: ChannelCurve | None = None  # on a network: the keys of its encryption


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """What to execute."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # to be added to the inherited environment


def tool_parser_for(model_name: str) -> str:
    """Return the name of vLLM's tool-call parser for this model.

    >>> tool_parser_for("meta-llama/Llama-3.1-8B-Instruct"), tool_parser_for("smollm2")
    ('llama3_json', 'hermes')
    """
    name = model_name.lower()
    return next((parser for part, parser in _TOOL_PARSERS if part in name), _TOOL_PARSER_OTHERWISE)


def check_vllm_args(args: Sequence[str]) -> None:
    """Refuse arguments that would take the engine out of the pool's hands.

    Raises:
        ConfigError: an argument is the pool's own, or asks for data parallelism inside an engine.
    """
    values = _flag_values(args)
    for flag, reason in _REFUSED.items():
        if flag in values:
            raise ConfigError(f"vllm argument {flag} is refused after `--`: {reason}")
    for flag in ("--data-parallel-size", "-dp", "--api-server-count", "-asc"):
        if values.get(flag, "1") != "1":
            raise ConfigError(
                f"vllm argument {flag} {values[flag]} is refused: one scheduler for each engine "
                "is allowed; use autellix serve --replicas"
            )


def build_command(spec: EngineSpec, run: EngineRun) -> EngineCommand:
    """Return how to start ``spec`` once.

    Raises:
        ConfigError: the user's arguments are refused, see ``check_vllm_args``.
    """
    check_vllm_args(spec.vllm_args)
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", spec.model_path, "--served-model-name", spec.model_name),
        *listen_args(run),
        *("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)),
        "--disable-uvicorn-access-log",
        "--enable-auto-tool-choice",
        *("--tool-call-parser", tool_parser_for(spec.model_name)),
        *_policy_args(spec),
    ]
    if spec.on_cpu:
        # A share of the machine's memory there; small enough for two engines and the rest.
        argv += ["--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.3"]
    return EngineCommand(argv=(*argv, *spec.vllm_args), env=_environment(spec, run))


def ranks_of(vllm_args: Sequence[str]) -> int:
    """Return how many GPUs an engine with these arguments takes.

    >>> ranks_of(("-tp", "2", "--pipeline-parallel-size=2"))
    4
    """
    values = _flag_values(vllm_args)
    ranks = 1
    for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
        given = next((values[name] for name in names if name in values), "1")
        ranks *= int(given) if given.isdecimal() else 1
    return ranks


def listen_args(run: EngineRun) -> tuple[str, ...]:
    """Return the arguments that say where an engine listens."""
    if run.uds is not None:
        return ("--uds", run.uds)
    return ("--host", run.host, "--port", str(run.port))


def devices_for(index: int, vllm_args: Sequence[str], visible: Sequence[str]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` of the engine with this index.

    Args:
        index: Engines take their devices in the order of their indices.
        vllm_args: The user's arguments; tensor × pipeline parallel ranks are devices of an engine.
        visible: The devices of this machine that may be used.

    Raises:
        ConfigError: there are not enough.

    >>> devices_for(1, ("--tensor-parallel-size", "2"), ("0", "1", "2", "3"))
    '2,3'
    """
    ranks = ranks_of(vllm_args)
    mine = visible[index * ranks : (index + 1) * ranks]
    if len(mine) < ranks:
        raise ConfigError(
            f"replicas: {index + 1} engines of {ranks} GPUs are not allowed; "
            f"allowed is what {len(visible)} GPUs hold"
        )
    return ",".join(mine)


def cores_for(index: int, replicas: int, vllm_args: Sequence[str], cores: Sequence[int]) -> str:
    """Return ``VLLM_CPU_OMP_THREADS_BIND`` of the engine with this index: its share of the cores.

    Engines on the same cores wait for each other at every barrier of their threads. Engines that
    were added later, or above the number of cores, share those of an earlier one.

    >>> [cores_for(i, 2, (), (0, 1, 2, 3)) for i in range(3)]
    ['0,1', '2,3', '0,1']
    """
    ranks = ranks_of(vllm_args)
    of_rank = max(1, len(cores) // (replicas * ranks))
    places = len(cores) // of_rank
    mine = [(index * ranks + rank) % places * of_rank for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[first : first + of_rank])) for first in mine)


def _policy_args(spec: EngineSpec) -> list[str]:
    """Return the flags that put the policy in charge."""
    if spec.policy == "fcfs":
        return ["--scheduling-policy", "fcfs"]
    args = ["--scheduling-policy", "priority"]
    if spec.policy in ENGINE_POLICIES:
        constants = {"policy": spec.policy, **spec.scheduler_constants}
        args += ["--scheduler-cls", SCHEDULER_CLASS]
        args += ["--additional-config", json.dumps({"autellix": constants}, sort_keys=True)]
        if spec.swap_mib and "--kv-transfer-config" not in _flag_values(spec.vllm_args):
            transfer = swap_transfer_config(spec.swap_mib << 20)
            args += ["--kv-transfer-config", json.dumps(transfer, sort_keys=True)]
    return args


def _environment(spec: EngineSpec, run: EngineRun) -> dict[str, str]:
    """Return the variables of this start; keys are here since anyone may read a command line."""
    env = {
        "VLLM_API_KEY": run.api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "SPT_NOENV": "1",  # setproctitle would write the title over the environment, and our mark
        ENV_RUN: run.run_id,
        ENV_ENGINE_ID: spec.engine_id,
        ENV_KEY: run.channel_key.hex(),
    }
    if run.channel_endpoint is not None:
        env[ENV_ENDPOINT] = run.channel_endpoint
    if run.channel_curve is not None:
        env[ENV_CURVE] = " ".join(run.channel_curve)
    if spec.on_cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_gib)
    if spec.devices is not None:
        env["VLLM_CPU_OMP_THREADS_BIND" if spec.on_cpu else "CUDA_VISIBLE_DEVICES"] = spec.devices
    return env


def _flag_values(args: Sequence[str]) -> dict[str, str]:
    """Return flag → value of a command line; vLLM takes ``_`` for ``-`` and ``=`` for a space."""
    values: dict[str, str] = {}
    for index, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        flag, equals, value = arg.partition("=")
        if not equals:
            value = args[index + 1] if index + 1 < len(args) else ""
        values[flag.replace("_", "-")] = value
    return values

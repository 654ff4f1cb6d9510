"""All settings of one server, and what follows from them before anything starts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from autellix.errors import ConfigError

from .config import PoolConfig, ServeConfig
from .gateway.admin import AdminConfig
from .gateway.config import GatewayConfig
from .gateway.keys import read_keys
from .model import ModelError, find_model
from .policy.config import GPU_LEVEL_BOUNDS_S, PolicyConfig
from .tracing import TracingConfig

_POLICY_FOLLOWS: Final = {"derived": ("policy",)}  # from [serve]
_GATEWAY_FOLLOWS: Final = {"derived": ("policy", "state")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of one server."""

    serve: ServeConfig = field(default_factory=ServeConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    scheduling: PolicyConfig = field(default_factory=PolicyConfig, metadata=_POLICY_FOLLOWS)
    gateway: GatewayConfig = field(default_factory=GatewayConfig, metadata=_GATEWAY_FOLLOWS)
    admin: AdminConfig = field(default_factory=AdminConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)


def effective(config: ServerConfig, model: str | None) -> ServerConfig:
    """Return the settings with what follows from others filled in."""
    serve = config.serve if model is not None else dataclasses.replace(config.serve, replicas=0)
    # MLFQ knows calls only, so to the gateway all programs are alike.
    policy = "fcfs" if serve.policy == "mlfq" else serve.policy
    if policy == "adaptive":
        policy = "plas"  # the engines find their order; to the gateway a program has its service
    gateway = dataclasses.replace(
        config.gateway,
        policy=policy,
        state=serve.state,
        api_keys=(*config.gateway.api_keys, *keys_of("keys", serve.keys)),
    )
    keys = (*config.admin.keys, *keys_of("admin.keys_file", config.admin.keys_file))
    admin = dataclasses.replace(config.admin, keys=keys)
    return dataclasses.replace(config, serve=serve, gateway=gateway, admin=admin)


def keys_of(field: str, path: str) -> tuple[str, ...]:
    """Return the entries of a file of keys; none without a path.

    Raises:
        ConfigError: it cannot be read, or holds none, which would let anybody in.
    """
    if not path:
        return ()
    try:
        entries = read_keys(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {path!r} is not allowed ({error})") from error
    if not entries:
        raise ConfigError(f"{field}: {path!r} holds no key; allowed is tenant:sha256 a line")
    return entries


def scheduler_constants(config: PolicyConfig, *, on_cpu: bool = True) -> dict[str, object]:
    """Return the scheduler's settings that differ from their defaults.

    Args:
        config: The settings.
        on_cpu: Whether engines run on the CPU; on GPUs levels are wider unless they are set.
    """
    constants: dict[str, object] = {
        item.name: value
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != item.default and item.name != "policy"
    }
    if not on_cpu and "quanta_s" not in constants:
        constants.setdefault("level_bounds_s", GPU_LEVEL_BOUNDS_S)
    return constants


def resolve_model(model: str) -> tuple[str, str]:
    """Return (what vLLM loads, what clients call it).

    Raises:
        ConfigError: the model has to be made first.
    """
    try:
        path = find_model(model)
    except ModelError as error:
        raise ConfigError(f"model: {error}") from error
    return str(path), path.name if path.is_dir() else model

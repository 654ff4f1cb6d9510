"""The gateway's settings."""

from __future__ import annotations

import typing
from dataclasses import dataclass

from autellix import wire

from ..config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How the gateway treats its clients. Times are seconds, sizes bytes.

    ``api_keys`` holds entries ``tenant:sha256-of-the-key`` or ``tenant:sha256:handicap``, where the
    handicap is milliseconds of service added to every call of that tenant; no entry means that
    anybody may call. ``admin_keys`` are of the same form and see the sessions of everybody; without
    one, whoever connects from this machine does.
    """

    policy: typing.Literal["fcfs", "program", "plas", "atlas"] = setting(
        "program", "fcfs: all calls alike; else the program with the least service first"
    )
    api_keys: tuple[str, ...] = setting((), "tenant:sha256[:handicap_ms] of keys that may call")
    admin_keys: tuple[str, ...] = setting((), "tenant:sha256 of keys that see every session")
    body_bytes_max: int = setting(32 << 20, "longest request body", minimum=1024)
    calls_max: int = setting(8192, "calls in flight, all clients together", minimum=1)
    calls_per_key_max: int = setting(8192, "calls in flight of one key", minimum=1)
    connections_max: int = setting(16_384, "connections of clients", minimum=1)
    connect_s: float = setting(5.0, "time an engine has to accept a connection", minimum=0.01)
    upstream_idle_s: float = setting(
        3.5, "an unused connection to an engine is kept so long", minimum=0, maximum=4
    )
    slow_client_s: float = setting(
        60.0, "time a client that has stopped reading has to go on", minimum=0.05
    )
    slow_body_s: float = setting(60.0, "time a client has to send its request body", minimum=0.05)
    lease_s: float = setting(wire.LEASE_S, "an unused session lives so long", minimum=1)
    state: str = setting("", "file of the journal of sessions; empty or :memory:: a stop forgets")

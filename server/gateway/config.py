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
    anybody may call, and that whoever connects from this machine sees the sessions of everybody.
    """

    policy: typing.Literal["fcfs", "program", "plas", "atlas"] = setting(
        "program", "fcfs: all calls alike; else the program with the least service first"
    )
    api_keys: tuple[str, ...] = setting((), "tenant:sha256[:handicap_ms] of keys that may call")
    body_bytes_max: int = setting(32 << 20, "longest request body", minimum=1024)
    body_bytes_total_max: int = setting(
        1 << 30, "request bodies held at once, all clients together", minimum=1024
    )
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
    receipts: typing.Literal["off", "headers", "full"] = setting(
        "headers", "what answers say of their call: nothing, what is known at the head, or all"
    )
    calls_remembered: int = setting(
        10_000, "calls whose story is kept, for receipts and explanations; 0: none", minimum=0
    )
    lease_s: float = setting(wire.LEASE_S, "an unused session lives so long", minimum=1)
    infer_sessions: bool = setting(
        False, "take untagged calls that begin alike for one conversation; see docs/wire.md"
    )
    state: str = setting("", "a file, :memory: or a Redis URL; empty: a stop forgets")

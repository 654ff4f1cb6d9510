"""What the server's process and one gateway process tell each other.

One stream socket between the two, made by the server, in whose place nobody can be; a message is a
length and msgpack. What goes down is what only the owner of the pool knows: engines, reports of
calls, heartbeats, the policy. What comes up is what the owner needs to look after the engines.

Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..channel import CallReport, Heartbeat, Hello
from ..server_config import ServerConfig


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """The first message: who the process is, and all settings."""

    index: int
    count: int
    folder: str  # for sockets; this user's alone
    config: ServerConfig
    key: bytes  # that seals program ids; the engines hold the same


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the pool sees it."""

    engine_id: str
    uds: str | None
    host: str
    port: int
    api_key: str | None
    state: str


class EnginesNow(msgspec.Struct, tag="engines", frozen=True, kw_only=True):
    """All engines of the pool; ``version`` grows, and comes back in `Figures`."""

    version: int
    engines: tuple[EngineRow, ...]


class Views(msgspec.Struct, tag="views", frozen=True, kw_only=True):
    """Rows of engines for people."""

    rows: list[dict[str, Any]]


class Report(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """What a call of this process has cost in its engine."""

    engine_id: str
    boot_id: str
    report: CallReport


class Beat(msgspec.Struct, tag="beat", frozen=True, kw_only=True):
    """An engine's figures."""

    engine_id: str
    heartbeat: Heartbeat
    hello: Hello | None


class PolicyNow(msgspec.Struct, tag="policy", frozen=True, kw_only=True):
    """How programs are to be counted and ordered from now on."""

    policy: str
    accounting: str


class CloseDoors(msgspec.Struct, tag="close_doors", frozen=True):
    """Take no new connections of clients."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End in good order: calls that are left have some seconds, and the journal is written."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The process listens."""


class Figures(msgspec.Struct, tag="figures", frozen=True, kw_only=True):
    """How the process is, at least once a second."""

    version: int  # of the engines that it knows: no call is placed by older ones any more
    loads: dict[str, int]  # calls in flight by engine
    heard: dict[str, int]  # engine → how often a call of it was seen to have had bytes


class Failure(msgspec.Struct, tag="failure", frozen=True, kw_only=True):
    """A connection to this engine was refused or broke."""

    engine_id: str


class Forget(msgspec.Struct, tag="forget", frozen=True, kw_only=True):
    """These programs are over."""

    program_ids: tuple[str, ...]


class ToolNow(msgspec.Struct, tag="tool", frozen=True, kw_only=True):
    """What tool a program waits for from now on; None: for none any more."""

    program_id: str
    tool: str | None


Down = Setup | EnginesNow | Views | Report | Beat | PolicyNow | CloseDoors | Stop
Up = Ready | Figures | Failure | Forget | ToolNow

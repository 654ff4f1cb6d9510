"""The words that the parts of the server share: engines as the gateway sees them, calls, states.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class EngineState(enum.Enum):
    """Where an engine is in its life; only READY ones get new calls."""

    STARTING = "starting"
    READY = "ready"
    FROZEN = "frozen"  # no step and no answer: ejected, back when it answers again
    DRAINING = "draining"  # finishes its calls, gets no new ones
    DEAD = "dead"


class EngineAddress(NamedTuple):
    """Where an engine listens: a unix socket if ``uds`` is set, else host and port."""

    uds: str | None
    host: str
    port: int


class CallInfo(NamedTuple):
    """What the choice among the ready engines may look at."""

    call_id: str
    program_id: str
    thread: int
    path: str
    model: str | None
    prompt_bytes: int
    prompt_tokens: int | None  # exact, if the client sent token ids
    home: str | None  # the engine of the program's latest call
    loads: Mapping[str, int]  # calls in flight by engine id; an engine without any may be missing
    content: bytes = b""  # the request's body, for rules that compare what calls begin with


class Engine(Protocol):
    """One vLLM replica, whoever started it."""

    @property
    def engine_id(self) -> str:
        """A short name, unique in the pool, such as ``e0``."""
        ...

    @property
    def address(self) -> EngineAddress:
        """Where it listens now; changes when it is restarted."""
        ...

    @property
    def api_key(self) -> str | None:
        """The key that the gateway sends to it; never a client's."""
        ...

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""
        ...


class Engines(Protocol):
    """The pool, as the gateway sees it."""

    def all(self) -> Sequence[Engine]:
        """Return every engine, in a fixed order."""
        ...

    def note_failure(self, engine_id: str) -> None:
        """Tell the pool that a connection to this engine was refused or broke: look at it now."""
        ...

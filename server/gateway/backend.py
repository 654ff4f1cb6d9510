"""Where the process table is remembered: nowhere, in a file, or in Redis for several gateways.

``state`` is a path, ``:memory:`` or a Redis URL; empty is the file of this address in the user's
state folder, where sessions are found again by a gateway that is started on the same address.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final, Protocol

from autellix.errors import ConfigError

from .journal import Journal
from .state import Gateway

_log = logging.getLogger(__name__)

MEMORY: Final = ":memory:"
REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://")


class Backend(Protocol):
    """Something that remembers a table. Belongs to one gateway, runs on its event loop."""

    async def restore(self) -> int:
        """Put what is remembered into the table; return how many programs."""
        ...

    async def run(self) -> None:
        """Remember what changes until cancelled."""
        ...

    async def flush(self) -> None:
        """Remember what has changed until now."""
        ...

    async def close(self) -> None:
        """Let go."""
        ...


def open_backend(gateway: Gateway) -> Backend | None:
    """Return what remembers a gateway's table; None: nothing does.

    Raises:
        ConfigError: the place cannot be had.
    """
    state = gateway.config.state
    if state in ("", MEMORY):
        return None
    if state.startswith(REDIS_SCHEMES):
        try:
            from .shared import SharedState
        except ImportError as error:
            raise ConfigError(
                f"state: {state!r} is not allowed ({error}); allowed with `pip install "
                "autellix[redis]`"
            ) from error
        return SharedState(state, gateway)
    return Journal(Path(state), gateway.table, gateway.clock, gateway.homes)


def state_or_default(state: str, host: str, port: int) -> str:
    """Return where the state of a server on this address is kept.

    A server on a free port is never found again, so nothing of it is kept unless it is asked for;
    nor is it where the user's state folder cannot be written.
    """
    if state:
        if not state.startswith(REDIS_SCHEMES) and "://" in state:
            raise ConfigError(
                f"state: {state!r} is not allowed; allowed is a path, {MEMORY}, or a URL that "
                f"begins with {', '.join(REDIS_SCHEMES)}"
            )
        return state
    if not port:
        return MEMORY
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(base) / "autellix"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("state: %s cannot be made (%s); a stop forgets all sessions", folder, error)
        return MEMORY
    return str(folder / f"{host.replace(':', '_').replace('/', '_')}-{port}.sqlite")

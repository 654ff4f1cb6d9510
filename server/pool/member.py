"""What every engine of the pool is, whoever runs it: a name, a key, a state, a way to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..types import EngineAddress, EngineState
from .vitals import Vitals


class Member:
    """The part of an engine that does not depend on who starts it; ``run`` is the other part.

    Args:
        engine_id: Its name in the pool.
        address: Where it listens; it may change from start to start.
        api_key: The key it asks for, None: it asks for none.
        vitals: Its pulse.
    """

    def __init__(
        self, engine_id: str, address: EngineAddress, api_key: str | None, vitals: Vitals
    ) -> None:
        self._engine_id = engine_id
        self._address = address
        self._api_key = api_key
        self._vitals = vitals
        self._state = EngineState.STARTING
        self._is_draining = False
        self._stopping = asyncio.Event()
        self.on_state: Callable[[Any], None] = lambda _engine: None

    @property
    def engine_id(self) -> str:
        """The engine's name in the pool."""
        return self._engine_id

    @property
    def address(self) -> EngineAddress:
        """Where it listens now."""
        return self._address

    @property
    def api_key(self) -> str | None:
        """The key that the gateway sends to it; never a client's."""
        return self._api_key

    @property
    def state(self) -> EngineState:
        """Where it is in its life."""
        return self._state

    def look_now(self) -> None:
        """Somebody failed to talk to the engine: probe it at once."""
        self._vitals.look_now()

    def drain(self) -> None:
        """Give it no new calls, whether it is ready now or will be."""
        self._is_draining = True
        if self._state in (EngineState.READY, EngineState.FROZEN):
            self._enter(EngineState.DRAINING)

    def stop(self) -> None:
        """End its life in good order; ``run`` returns when it is over."""
        self._stopping.set()

    def _enter(self, state: EngineState) -> None:
        if self._is_draining and state in (EngineState.READY, EngineState.FROZEN):
            state = EngineState.DRAINING
        if state is not self._state:
            self._state = state
            self.on_state(self)

"""The pool: every engine the gateway may use, whoever runs it, and one task that looks after each.

The pool owns the engines' lives and states. It places no call and counts none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ..types import Engine, EngineState
from .restarts import EngineFailedError

_log = logging.getLogger("autellix.pool")

ENGINES_MAX: Final = 256


class PooledEngine(Engine, Protocol):
    """An engine with a life that the pool runs."""

    #: Called by the engine at each change of its state.
    on_state: Callable[[Any], None]

    def look_now(self) -> None:
        """Probe it at once."""
        ...

    def drain(self) -> None:
        """Give it no new calls."""
        ...

    def stop(self) -> None:
        """End its life; `run` returns."""
        ...

    async def run(self) -> None:
        """Live until stopped."""
        ...


class Pool:
    """The engines in a fixed order.

    Args:
        stagger_s: Between the starts of two engines, so that they do not all import and load at
            the same moment.
    """

    def __init__(self, *, stagger_s: float = 0.0) -> None:
        self._engines: dict[str, PooledEngine] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._stagger_s = stagger_s
        self._given_up: dict[str, str] = {}  # engine → why
        self._failed = asyncio.Event()
        self._ready = asyncio.Event()
        self._is_stopping = False
        #: Called when an engine has come, has gone, or is in another state.
        self.on_change: Callable[[], None] = lambda: None

    def all(self) -> Sequence[PooledEngine]:
        """Return every engine, in the order they were added."""
        return tuple(self._engines.values())

    def get(self, engine_id: str) -> PooledEngine:
        """Return an engine.

        Raises:
            KeyError: there is none of that name.
        """
        return self._engines[engine_id]

    def note_failure(self, engine_id: str) -> None:
        """A connection to this engine was refused or broke: look at it now."""
        if (engine := self._engines.get(engine_id)) is not None:
            engine.look_now()

    def add(self, engine: PooledEngine, *, delay_s: float = 0.0) -> None:
        """Take an engine in and begin its life.

        Raises:
            ValueError: the id is taken, or the pool is full.
        """
        if engine.engine_id in self._engines:
            raise ValueError(f"there is an engine {engine.engine_id} already")
        if len(self._engines) >= ENGINES_MAX:
            raise ValueError(f"a pool holds at most {ENGINES_MAX} engines")
        self._engines[engine.engine_id] = engine
        engine.on_state = self._note_state
        self.on_change()
        self._lives[engine.engine_id] = asyncio.create_task(
            self._live(engine, delay_s), name=f"engine {engine.engine_id}"
        )

    def start(self, engines: Sequence[PooledEngine]) -> None:
        """Take in several engines, one after the other."""
        for index, engine in enumerate(engines):
            self.add(engine, delay_s=index * self._stagger_s)

    async def remove(self, engine_id: str) -> None:
        """End an engine's life and forget it; its calls are the caller's business.

        Raises:
            KeyError: there is none of that name.
        """
        engine = self._engines[engine_id]
        engine.drain()
        engine.stop()
        await asyncio.wait((self._lives[engine_id],))
        del self._engines[engine_id], self._lives[engine_id]
        self._given_up.pop(engine_id, None)
        self.on_change()

    async def failed(self) -> str:
        """Return, when every engine has been given up, why."""
        await self._failed.wait()
        return "; ".join(self._given_up.values())

    async def first_ready(self) -> None:
        """Return once some engine has been ready."""
        await self._ready.wait()

    def drain(self) -> None:
        """Give no engine new calls."""
        for engine in self._engines.values():
            engine.drain()

    async def stop(self) -> None:
        """End all engines at once; returns when nothing of them is left."""
        self._is_stopping = True
        for engine in self._engines.values():
            engine.stop()
        if self._lives:
            await asyncio.wait(self._lives.values())

    def _note_state(self, engine: PooledEngine) -> None:
        if engine.state is EngineState.READY:
            self._ready.set()
        self.on_change()

    async def _live(self, engine: PooledEngine, delay_s: float) -> None:
        """Run one engine's life and note how it ended."""
        try:
            if delay_s:
                await asyncio.sleep(delay_s)
            if not self._is_stopping:
                await engine.run()
        except EngineFailedError as error:
            _log.error("given up: %s", error)
            self._given_up[engine.engine_id] = str(error).partition("\n")[0]
        except Exception as error:  # noqa: BLE001 - logged, and told to whoever waits
            _log.exception("engine %s: a bug of the pool", engine.engine_id)
            self._given_up[engine.engine_id] = f"a bug of the pool: {error!r}"
        if len(self._given_up) == len(self._engines) and not self._is_stopping:
            self._failed.set()

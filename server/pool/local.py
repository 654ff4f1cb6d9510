"""An engine that is a child of this process: started, watched, restarted, and ended for certain.

States: STARTING until ``/health`` answers; READY; FROZEN while its progress watch says so (it gets
no call, and comes back by itself, or is killed after ``frozen_kill_s``); DEAD between an end nobody
asked for and the next start, and for good once starting failed too often. `LocalEngine.run` is the
whole life; its end, by cancellation too, leaves no process of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..clock import Clock
from ..engine.launch import ENV_RUN, EngineCommand, EngineRun
from ..types import EngineAddress, EngineState
from . import guard
from .last_words import last_words
from .member import Member
from .probe import ask
from .process import ChildProcess
from .restarts import EngineFailedError, RestartLimits, Restarts
from .vitals import Vitals

_log = logging.getLogger("autellix.pool")

_GUARD_FILE: Final = Path(guard.__file__)
_LOG_LINES_KEPT: Final = 200
_PROGRESS_AFTER_S: Final = 3.0
_PROGRESS_EVERY_S: Final = 10.0
_STARTING_POLL_S: Final = 0.2
_GUARD_CLEARS_S: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """How an engine process is looked after."""

    folder: Path  # private to this user
    channel_endpoint: str | None
    channel_key: bytes
    start_timeout_s: float
    restarts: RestartLimits
    stop_grace_s: float
    frozen_kill_s: float
    show_engine_log: bool


class LocalEngine(Member):
    """One vLLM replica of our own.

    Args:
        engine_id: Its name in the pool.
        command: How to start it, given what differs from start to start.
        settings: How it is looked after.
        vitals: Its pulse.
        clock: Monotonic time.
    """

    def __init__(
        self,
        engine_id: str,
        command: Callable[[EngineRun], EngineCommand],
        settings: LocalSettings,
        vitals: Vitals,
        clock: Clock,
    ) -> None:
        uds = str(settings.folder / f"{engine_id}.sock")  # the same for every start
        super().__init__(engine_id, EngineAddress(uds, "", 0), secrets.token_hex(24), vitals)
        self._uds = uds
        self._command = command
        self._settings = settings
        self._clock = clock
        self.log_lines: deque[str] = deque(maxlen=_LOG_LINES_KEPT)  # the last it wrote
        self.starts = 0
        self.ready_s = math.inf  # when the present start became ready
        self.session: int | None = None  # of the running engine's processes: its guard's id

    async def run(self) -> None:
        """Keep the engine alive until `stop`.

        Raises:
            EngineFailedError: its first start failed, or ``restart_limit`` starts in a row did not
                last ``healthy_after_s``.
        """
        restarts = Restarts(self._settings.restarts)
        while not self._stopping.is_set():
            self._enter(EngineState.STARTING)
            began_s = self._clock.now_s()
            ended = await self._live_once()
            if self._stopping.is_set():
                break
            lived_s = self._clock.now_s() - began_s
            wait_s = restarts.wait_after(lived_s, was_ready=ended.was_ready)
            self._enter(EngineState.DEAD)
            _log.error("engine %s ended: %s", self.engine_id, ended.why)
            if wait_s is None:
                words = last_words(list(self.log_lines))
                raise EngineFailedError(f"engine {self.engine_id}: {ended.why}\n{words}")
            _log.warning("engine %s restarts in %.1f s", self.engine_id, wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
        self._enter(EngineState.DEAD)

    async def _live_once(self) -> _Ended:
        """Start the engine, watch it until it ends or is to end, and leave nothing of it."""
        run_id = secrets.token_hex(12)
        mark = f"{ENV_RUN}={run_id}"
        command = self._command(
            EngineRun(
                run_id=run_id,
                uds=self._uds,
                api_key=self._api_key or "",
                channel_endpoint=self._settings.channel_endpoint,
                channel_key=self._settings.channel_key,
            )
        )
        self._remove_socket()
        self.log_lines.clear()
        self.starts += 1
        self.ready_s = math.inf
        process = ChildProcess(
            (
                *(sys.executable, "-I", "-S", str(_GUARD_FILE)),
                *(str(self._settings.folder), str(self._settings.stop_grace_s), mark),
                *command.argv,
            ),
            {**os.environ, **command.env},
            self._note_line,
        )
        self.session = process.pid
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            return await self._watch(process.ended, stopping)
        finally:
            stopping.cancel()
            await asyncio.shield(self._end(process, mark))
            self.session = None

    async def _watch(self, ending: asyncio.Future[int], stopping: asyncio.Task[bool]) -> _Ended:
        """Wait for readiness, then look at the vitals until something ends."""
        why = await self._until_ready(ending, stopping)
        if why is not None:
            return _Ended(why, was_ready=False)
        self.ready_s = self._clock.now_s()
        self._enter(EngineState.READY)
        self._vitals.begin()
        frozen_since_s: float | None = None
        while True:
            looking = asyncio.create_task(self._vitals.look(self.address, self._api_key))
            await asyncio.wait((looking, ending, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not looking.done():
                looking.cancel()
            if stopping.done():
                return _Ended("asked to stop", was_ready=True)
            if ending.done():
                return _Ended(_status(ending.result()), was_ready=True)
            reason = looking.result()
            if reason is None:
                frozen_since_s = None
                if self._state is EngineState.FROZEN:
                    _log.warning("engine %s moves again", self.engine_id)
                    self._enter(EngineState.READY)
                continue
            now_s = self._clock.now_s()
            if frozen_since_s is None:
                frozen_since_s = now_s
                _log.error("engine %s is frozen: %s", self.engine_id, reason)
                self._enter(EngineState.FROZEN)
            elif now_s - frozen_since_s > self._settings.frozen_kill_s:
                return _Ended(f"frozen, then killed: {reason}", was_ready=True)

    async def _until_ready(
        self, ending: asyncio.Future[int], stopping: asyncio.Task[bool]
    ) -> str | None:
        """Return None once ``/health`` answers 200, else why it never did."""
        began_s = self._clock.now_s()
        say_at_s = began_s + _PROGRESS_AFTER_S
        while True:
            answer = await ask(self.address, "/health", api_key=self._api_key, deadline_s=2.0)
            now_s = self._clock.now_s()
            if answer is not None and answer.status == 200:
                _log.info("engine %s is ready after %.1f s", self.engine_id, now_s - began_s)
                return None
            if now_s - began_s > self._settings.start_timeout_s:
                return f"not ready after {self._settings.start_timeout_s:.0f} s"
            if now_s >= say_at_s:
                say_at_s = now_s + _PROGRESS_EVERY_S
                _log.info("engine %s is loading, %.0f s so far", self.engine_id, now_s - began_s)
            await asyncio.wait(
                (ending, stopping), timeout=_STARTING_POLL_S, return_when=asyncio.FIRST_COMPLETED
            )
            if stopping.done():
                return "asked to stop"
            if ending.done():
                return f"{_status(ending.result())} before it was ready"

    async def _end(self, process: ChildProcess, mark: str) -> None:
        """End the guard, and the engine with it; then make sure."""
        # Before it is ready it holds no call, and vLLM is slow to notice a signal then.
        process.ask_to_stop(now=self._state is EngineState.STARTING)
        limit_s = self._settings.stop_grace_s + _GUARD_CLEARS_S
        await asyncio.wait((process.ended,), timeout=limit_s)
        if not process.ended.done():
            _log.error("the guard of engine %s hangs and is killed", self.engine_id)
            process.kill()
            await process.ended
        # The guard itself may have been killed: then nobody cleared up.
        loop = asyncio.get_running_loop()
        end_s = self._clock.now_s() + _GUARD_CLEARS_S
        while await loop.run_in_executor(None, guard.kill_engine, process.pid, mark):
            if self._clock.now_s() > end_s:
                _log.error("processes of engine %s cannot be killed", self.engine_id)
                break
            await asyncio.sleep(0.02)
        process.close()
        self._remove_socket()

    def _remove_socket(self) -> None:
        Path(self._uds).unlink(missing_ok=True)

    def _note_line(self, line: str) -> None:
        """Keep the engine's last lines, and pass them on if asked to."""
        self.log_lines.append(line)
        if self._settings.show_engine_log:
            _log.info("[%s] %s", self.engine_id, line)


@dataclass(frozen=True, slots=True)
class _Ended:
    """How one life of an engine ended."""

    why: str
    was_ready: bool


def _status(code: int) -> str:
    """Return an exit status in words."""
    if code < 0 or code > 128:
        return f"killed by signal {-code if code < 0 else code - 128}"
    return f"exited with status {code}"

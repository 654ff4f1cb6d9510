"""Engines that Ray places, starts again and finds: ``autellix serve --launcher ray``.

Each engine is a Ray actor with one vLLM as its child, under the same guard as a local one, so that
nothing of it survives the actor. Ray chooses the machine, and starts the actor again, there or
elsewhere, when its process or its machine is gone; where it listens is asked of the actor. When the
server ends, so do its actors.

On a network there are no private sockets: an engine asks for a random key, and its control channel
is encrypted with keys of its own (`engine_keys`). Its HTTP is not: a cluster's network has to be a
private one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from autellix.errors import ConfigError

from ..channel import ChannelCurve
from ..clock import Clock
from ..engine.launch import ENV_RUN, EngineCommand, EngineRun
from ..types import EngineAddress, EngineState
from . import guard
from .member import Member
from .probe import ask
from .process import ChildProcess
from .restarts import EngineFailedError, RestartLimits, Restarts
from .vitals import Vitals

_log = logging.getLogger("autellix.pool")

NAMESPACE: Final = "autellix"
_GUARD_FILE: Final = Path(guard.__file__)
_ASK_S: Final = 5.0
_KNOCK_S: Final = 10.0
_POLL_S: Final = 0.3
_LOG_LINES: Final = 20
_PROGRESS_EVERY_S: Final = 10.0


class Place(NamedTuple):
    """Where an engine is now."""

    host: str
    port: int
    run_id: str  # of its present start
    node_id: str
    ended: str | None  # how its process ended, with its last words


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How engines are looked after."""

    address: str  # of the cluster, or "auto"
    cpus: float  # of the cluster's, for each engine
    gpus: float
    channel_endpoint: str | None
    channel_key: bytes
    start_timeout_s: float
    restarts: RestartLimits
    stop_grace_s: float
    frozen_kill_s: float


class EngineHost:
    """The actor: runs on some machine of the cluster, with one engine as its child."""

    def __init__(
        self,
        command: Callable[[EngineRun], EngineCommand],
        run: EngineRun,
        stop_grace_s: float,
    ) -> None:
        self._command = command
        self._run = run
        self._stop_grace_s = stop_grace_s
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._process: ChildProcess | None = None
        self._place: Place | None = None

    async def where(self) -> Place:
        """Return where the engine is, started if this is the first question to this actor."""
        import ray

        if self._place is None or self._process is None:
            context = ray.get_runtime_context()
            host = ray.util.get_node_ip_address()
            run_id = secrets.token_hex(12)
            port = _free_port(host)
            self._start(replace(self._run, run_id=run_id, host=host, port=port))
            self._place = Place(host, port, run_id, context.get_node_id(), None)
        assert self._process is not None
        if self._process.ended.done() and self._place.ended is None:
            last = "\n".join(self._lines)
            why = f"exited with status {self._process.ended.result()}\n{last}"
            self._place = self._place._replace(ended=why)
        return self._place

    async def stop(self) -> None:
        """End the engine in good order."""
        if self._process is not None:
            self._process.ask_to_stop()
            await asyncio.wait((self._process.ended,), timeout=self._stop_grace_s)

    def _start(self, run: EngineRun) -> None:
        command = self._command(run)
        folder = tempfile.mkdtemp(prefix="autellix-")  # the guard removes it if we die
        mark = f"{ENV_RUN}={run.run_id}"
        try:
            self._process = ChildProcess(
                (
                    *(sys.executable, "-I", "-S", str(_GUARD_FILE)),
                    *(folder, str(self._stop_grace_s), mark, *command.argv),
                ),
                {**os.environ, **command.env},
                self._lines.append,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._process.ended.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))


class RayEngine(Member):
    """One engine on the cluster, as the pool sees it.

    Args:
        engine_id: Its name in the pool.
        command: How to start it; it is run on the machine that Ray chooses.
        curve: The keys of its control channel, None: it has none.
        settings: How it is looked after.
        vitals: Its pulse.
        clock: Monotonic time.
    """

    def __init__(
        self,
        engine_id: str,
        command: Callable[[EngineRun], EngineCommand],
        curve: ChannelCurve | None,
        settings: RaySettings,
        vitals: Vitals,
        clock: Clock,
    ) -> None:
        nowhere = EngineAddress(None, "", 0)
        super().__init__(engine_id, nowhere, secrets.token_hex(24), vitals)
        self._command = command
        self._curve = curve
        self._settings = settings
        self._clock = clock
        self._actor: Any = None
        self._place: Place | None = None
        self._over = ""  # the start whose end we know of
        self.starts = 0
        self.ready_s = math.inf  # when the present start became ready

    @property
    def node_id(self) -> str | None:
        """The machine it runs on, as Ray names it."""
        return None if self._place is None else self._place.node_id

    async def run(self) -> None:
        """Have the engine on the cluster until `stop`.

        Raises:
            EngineFailedError: its first start failed, or ``restart_limit`` starts in a row did not
                last ``healthy_after_s``.
        """
        loop = asyncio.get_running_loop()
        self._actor = await loop.run_in_executor(None, self._make_actor)
        restarts = Restarts(self._settings.restarts)
        try:
            while not self._stopping.is_set():
                self._enter(EngineState.STARTING)
                began_s = self._clock.now_s()
                why, was_ready = await self._live_once()
                if self._stopping.is_set():
                    break
                lived_s = self._clock.now_s() - began_s
                wait_s = restarts.wait_after(lived_s, was_ready=was_ready)
                self._enter(EngineState.DEAD)
                _log.error("engine %s ended: %s", self.engine_id, why)
                if wait_s is None:
                    raise EngineFailedError(f"engine {self.engine_id}: {why}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait_s)
        finally:
            await asyncio.shield(self._end())
            self._enter(EngineState.DEAD)

    def _make_actor(self) -> Any:
        """Return a new actor; blocks while this process joins the cluster."""
        ray = join_cluster(self._settings.address)
        run = EngineRun(
            run_id="",
            uds=None,
            api_key=self._api_key or "",
            channel_endpoint=self._settings.channel_endpoint,
            channel_key=self._settings.channel_key,
            channel_curve=self._curve,
        )
        actor = ray.remote(EngineHost).options(
            name=f"{self.engine_id}-{secrets.token_hex(6)}",
            namespace=NAMESPACE,
            num_cpus=self._settings.cpus,
            num_gpus=self._settings.gpus,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        return actor.remote(self._command, run, self._settings.stop_grace_s)

    async def _live_once(self) -> tuple[str, bool]:
        """Follow one start of the engine to its end; return why it ended, and if it was ready."""
        place = await self._until_ready()
        if isinstance(place, str):
            await self._restart()
            return place, False
        self._place = place
        self._address = EngineAddress(None, place.host, place.port)
        self.starts += 1
        self.ready_s = self._clock.now_s()
        self._vitals.begin()
        _log.info("engine %s is ready at %s:%d", self.engine_id, place.host, place.port)
        self._enter(EngineState.READY)
        why = await self._watch(place)
        self.ready_s = math.inf
        return why, True

    async def _until_ready(self) -> Place | str:
        """Return where the engine answers, or why it does not."""
        end_s = self._clock.now_s() + self._settings.start_timeout_s
        say_at_s = self._clock.now_s() + _PROGRESS_EVERY_S
        while not self._stopping.is_set():
            place = await self._ask_where()
            if place is not None and place.ended is not None:
                self._over = place.run_id
                return place.ended
            if place is not None:
                address = EngineAddress(None, place.host, place.port)
                answer = await ask(address, "/health", api_key=self._api_key, deadline_s=2.0)
                if answer is not None and answer.status == 200:
                    return place
            now_s = self._clock.now_s()
            if now_s > end_s:
                return f"not ready after {self._settings.start_timeout_s:.0f} s"
            if now_s >= say_at_s:
                say_at_s = now_s + _PROGRESS_EVERY_S
                what = "has no place yet" if place is None else "is loading"
                _log.info("engine %s %s", self.engine_id, what)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _POLL_S)
        return "asked to stop"

    async def _watch(self, place: Place) -> str:
        """Return why the engine's present start is over."""
        frozen_since_s: float | None = None
        while not self._stopping.is_set():
            reason = await self._vitals.look(self._address, self._api_key)
            now = await self._ask_where()
            if now is not None and now.run_id != place.run_id:
                return f"Ray has started it again, on node {now.node_id[:8]}"
            if now is not None and now.ended is not None:
                self._over = place.run_id
                await self._restart()
                return now.ended
            if reason is None:
                frozen_since_s = None
                self._enter(EngineState.READY)
                continue
            now_s = self._clock.now_s()
            if frozen_since_s is None:
                frozen_since_s = now_s
                _log.error("engine %s is frozen: %s", self.engine_id, reason)
                self._enter(EngineState.FROZEN)
            elif now_s - frozen_since_s > self._settings.frozen_kill_s:
                self._over = place.run_id
                await self._restart()
                return f"frozen, then killed: {reason}"
        return "asked to stop"

    async def _ask_where(self) -> Place | None:
        """Return where the engine is; None while Ray has no living actor for it."""
        import ray

        try:
            async with asyncio.timeout(_ASK_S):
                place: Place = await self._actor.where.remote()
        except ray.exceptions.RayTaskError as error:  # it lives, and cannot start the engine
            return Place("", 0, secrets.token_hex(12), "", f"cannot be started: {error}")
        except (ray.exceptions.RayError, TimeoutError):
            return None
        return None if place.run_id == self._over else place

    async def _restart(self) -> None:
        """Have Ray start the actor anew; its death ends the engine."""
        import ray

        await asyncio.get_running_loop().run_in_executor(
            None, lambda: ray.kill(self._actor, no_restart=False)
        )

    async def _end(self) -> None:
        """End engine and actor."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(self._settings.stop_grace_s + _ASK_S):
                await self._actor.stop.remote()
        await asyncio.get_running_loop().run_in_executor(
            None, lambda: ray.kill(self._actor, no_restart=True)
        )


def join_cluster(address: str) -> Any:
    """Return ray, joined to the cluster; blocks.

    Raises:
        ConfigError: ray is not installed, or the cluster is not there.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "launcher: ray is not installed here; allowed is `pip install autellix[ray]`, or local"
        ) from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            _knock(address)
            ray.init(
                address=address,
                namespace=NAMESPACE,
                logging_level="ERROR",
                log_to_driver=False,
                configure_logging=False,
            )
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise ConfigError(f"ray_address: {address!r}: {error}") from error
    return ray


def _knock(address: str) -> None:
    """Connect once to an address of the form HOST:PORT: Ray itself goes on trying for minutes.

    Raises:
        OSError: nobody is there.
    """
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S):
            pass


def own_address(address: str) -> str:
    """Return this machine's address in the cluster's network; blocks."""
    host = join_cluster(address).util.get_node_ip_address()
    assert isinstance(host, str)
    return host


def leave_cluster() -> None:
    """Leave the cluster, if this process has joined one; blocks."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port

"""A fleet whose calls are relayed by several gateway processes.

This process owns the pool, the engines' control channel and the admin site; it relays nothing.
What it learns of calls it passes to the process that owns their programs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from autellix.errors import ConfigError

from ..channel import CallReport, Heartbeat
from ..clock import Clock
from ..fleet import Fleet
from ..gateway.backend import MEMORY, REDIS_SCHEMES
from ..gateway.redistribute import part_of
from ..gateway.siblings import Siblings
from ..ownership import owner_of_id
from ..pool.restarts import RestartLimits
from ..server_config import ServerConfig
from .keeper import Keeper
from .messages import Beat, Down, EngineRow, EnginesNow, PolicyNow, Report, Setup, Views

VIEWS_S: Final = 0.5
SETTLE_S: Final = 5.0
_BACKOFF_S_MIN: Final = 0.05  # a process is there again in a second, and its programs wait
_TICK_S: Final = 0.02


def check_gateways(config: ServerConfig) -> None:
    """Refuse what several processes cannot share.

    Raises:
        ConfigError: they are to keep their state in Redis.
    """
    if config.serve.gateways > 1 and config.serve.state.startswith(REDIS_SCHEMES):
        raise ConfigError(
            f"gateways: {config.serve.gateways} is not allowed with --state "
            f"{config.serve.state}; allowed is --state with a file or :memory:, or --gateways 1 "
            "on each of several servers with one Redis"
        )


class SpreadFleet(Fleet):
    """See the module; `listen` it to a socket that is bound, once the loop runs."""

    def __init__(
        self,
        config: ServerConfig,
        folder: Path,
        model: str | None,
        vllm_args: tuple[str, ...],
        clock: Clock,
    ) -> None:
        self._told = config  # the processes
        own = dataclasses.replace(config.gateway, state=MEMORY)
        super().__init__(dataclasses.replace(config, gateway=own), folder, model, vllm_args, clock)
        self.keeper: Keeper | None = None
        self._version = 0
        self._viewing: asyncio.Task[None] | None = None
        self._policy_now: PolicyNow | None = None
        self.pool.on_change = self._tell_engines

    def listen(self, listener: socket.socket) -> Keeper:
        """Start the gateway processes on a socket, and return who keeps them."""
        pool = self.config.pool
        limits = RestartLimits(
            restart_limit=pool.restart_limit,
            healthy_after_s=pool.healthy_after_s,
            backoff_s_min=_BACKOFF_S_MIN,
            backoff_s_max=pool.backoff_s_max,
        )
        self.keeper = Keeper(
            [self._setup(index) for index in range(self.config.serve.gateways)],
            listener,
            limits,
            self.clock,
            greet=self._greet,
            on_failure=self.pool.note_failure,
            on_forget=self._forget_programs,
            on_tool=self._note_tool,
        )
        self.keeper.start()
        self._viewing = asyncio.create_task(self._keep_telling(), name="engine views")
        return self.keeper

    def loads(self) -> dict[str, int]:
        """Return the calls in flight by engine, of all processes."""
        return self.keeper.loads() if self.keeper is not None else {}

    async def set_policy(self, name: str, settings: Mapping[str, Any]) -> None:
        """Order calls by another policy from now on; see `Fleet.set_policy`."""
        await super().set_policy(name, settings)
        assert self._gateway is not None
        self._policy_now = PolicyNow(
            policy=self._gateway.config.policy, accounting=self.table.accounting
        )
        self._tell(self._policy_now)

    async def close(self) -> None:
        """Close the control channel; processes and engines have ended."""
        if self._viewing is not None:
            self._viewing.cancel()
        await super().close()

    async def settled(self) -> None:
        """Return when no call is placed by what engines were before."""
        end_s = self.clock.now_s() + SETTLE_S
        while self.keeper is not None and not self.keeper.knows(self._version):
            if self.clock.now_s() > end_s:
                return  # it does not answer, and will be ended for that
            await asyncio.sleep(_TICK_S)

    async def failed(self) -> str:
        """Return, when the server cannot go on, why."""
        assert self.keeper is not None
        ends = [
            asyncio.create_task(super().failed()),
            asyncio.create_task(self.keeper.failed()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return done.pop().result()

    async def first_ready(self) -> None:
        """Return once a call can be answered, by any gateway."""
        assert self.keeper is not None
        await super().first_ready()
        await self.keeper.first_ready()
        await self.settled()

    async def stop_gateways(self, is_hurried: Callable[[], bool]) -> None:
        """End the gateway processes."""
        if self.keeper is not None:
            await self.keeper.stop(is_hurried)

    def _setup(self, index: int) -> Setup:
        gateway, count = self._told.gateway, self._told.serve.gateways
        own = dataclasses.replace(
            gateway,
            state=part_of(gateway.state, index),
            # memory is all processes' together
            body_bytes_total_max=max(gateway.body_bytes_max, gateway.body_bytes_total_max // count),
        )
        config = dataclasses.replace(self._told, gateway=own)
        return Setup(
            index=index,
            count=count,
            folder=str(self.folder),
            config=config,
            key=self._key,
        )

    def _siblings(self) -> Siblings:
        return Siblings(str(self.folder), self._told.serve.gateways, None)

    def _tell(self, message: Down) -> None:
        if self.keeper is not None:
            self.keeper.tell_all(message)

    def _greet(self) -> list[Down]:
        """Return what a process is to know when it begins."""
        known: list[Down] = [self._engines_now(), self._views_now()]
        if self._policy_now is not None:
            known.append(self._policy_now)
        return known

    def _engines_now(self) -> EnginesNow:
        rows = (
            EngineRow(
                engine_id=engine.engine_id,
                uds=engine.address.uds,
                host=engine.address.host,
                port=engine.address.port,
                api_key=engine.api_key,
                state=engine.state.value,
            )
            for engine in self.pool.all()
        )
        return EnginesNow(version=self._version, engines=tuple(rows))

    def _views_now(self) -> Views:
        return Views(rows=msgspec.to_builtins(self.engine_views()))

    def _tell_engines(self) -> None:
        """Some engine has changed."""
        self._version += 1
        self._tell(self._engines_now())

    async def _keep_telling(self) -> None:
        """Tell what engines look like, for people who ask a gateway."""
        while True:
            self._tell(self._views_now())
            await asyncio.sleep(VIEWS_S)

    async def _remove(self, engine_id: str, drain_s: float) -> None:
        await self.settled()
        await super()._remove(engine_id, drain_s)

    def _heard(self, engine_id: str) -> Mapping[str, int]:
        return self.keeper.heard(engine_id) if self.keeper is not None else {}

    def _fold(self, engine_id: str, boot_id: str, report: CallReport) -> None:
        """Pass on what an engine measured."""
        prompt, hits = self._prompts.get(engine_id, (0, 0))
        self._prompts[engine_id] = (prompt + report.prompt_tokens, hits + report.hit_tokens)
        owner = owner_of_id(report.call_id or "", self._told.serve.gateways)
        if owner is not None and self.keeper is not None:
            message = Report(engine_id=engine_id, boot_id=boot_id, report=report)
            self.keeper.tell(owner, message)

    def _beat(self, engine_id: str, heartbeat: Heartbeat) -> None:
        """Tell the processes' balancers how an engine is."""
        peer = self._channel.peers().get(engine_id)
        hello = peer.hello if peer is not None else None
        self._tell(Beat(engine_id=engine_id, heartbeat=heartbeat, hello=hello))

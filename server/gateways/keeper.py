"""Starts the gateway processes of one server, looks after them and ends them.

Theory of operation. The server's process makes every socket that clients and siblings connect to,
and a gateway process inherits them: what connects while one starts again waits in the kernel. A
process that ends, or says nothing for `SILENT_TICKS` seconds, is started again, as an engine is;
its programs come back from its journal, and nobody else's are touched. A process ends when its
link does, and the kernel ends it with this one in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from ..clock import Clock
from ..gateway.moving import arrival_path
from ..gateway.siblings import private_path
from ..pool.restarts import RestartLimits, Restarts
from .link import Link, link_down
from .messages import CloseDoors, Down, Failure, Figures, Forget, Ready, Setup, Stop, ToolNow, Up

_log = logging.getLogger("autellix.gateways")

BACKLOG: Final = 1024
SILENT_TICKS: Final = 30
START_TICKS: Final = 300
END_S: Final = 15.0  # a process that was told to stop has so long
_TICK_S: Final = 1.0
_LOOK_S: Final = 0.1
_MODULE: Final = "autellix.server.gateways.process"


class Child:
    """One gateway process, over all its starts."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.process: Process | None = None
        self.link: Link[Up, Down] | None = None
        self.is_ready = False
        self.silent_ticks = 0
        self.figures = Figures(version=0, loads={}, heard={})

    def send(self, message: Down) -> None:
        """Tell it something, if it is there."""
        if self.link is not None:
            self.link.send(message)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)


class Keeper:
    """See the module.

    Args:
        setups: What each process is told first.
        listener: What clients connect to; it is bound.
        limits: How often a process may end.
        clock: Monotonic time.
        greet: Returns what a process is to know when it has begun.
        on_failure: Called with an engine that refused a connection.
        on_forget: Called with programs that are over.
        on_tool: Called with a program and the tool that it waits for, or None.
    """

    def __init__(
        self,
        setups: list[Setup],
        listener: socket.socket,
        limits: RestartLimits,
        clock: Clock,
        *,
        greet: Callable[[], list[Down]],
        on_failure: Callable[[str], None],
        on_forget: Callable[[tuple[str, ...]], None],
        on_tool: Callable[[str, str | None], None],
    ) -> None:
        self._children = [Child(setup) for setup in setups]
        self._listener = listener
        self._limits = limits
        self._clock = clock
        self._greet = greet
        self._on_failure = on_failure
        self._on_forget = on_forget
        self._on_tool = on_tool
        self._sockets: list[tuple[socket.socket, socket.socket]] = []
        self._lives: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._doors_closed = False
        self._all_ready = asyncio.Event()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        """Make the sockets and begin the processes' lives."""
        self._listener.listen(BACKLOG)
        for child in self._children:
            folder, index = child.setup.folder, child.setup.index
            self._sockets.append(
                (
                    _listening(private_path(folder, index), socket.SOCK_STREAM),
                    _listening(arrival_path(folder, index), socket.SOCK_SEQPACKET),
                )
            )
        self._lives = [
            asyncio.create_task(self._live(child), name=f"gateway {child.setup.index}")
            for child in self._children
        ]
        for life in self._lives:
            life.add_done_callback(self._note_end)
        self._watch = asyncio.create_task(self._look_for_silence(), name="gateways")

    def tell(self, index: int, message: Down) -> None:
        """Tell one process something."""
        self._children[index].send(message)

    def tell_all(self, message: Down) -> None:
        """Tell all of them."""
        for child in self._children:
            child.send(message)

    async def first_ready(self) -> None:
        """Return once all have been ready."""
        await self._all_ready.wait()

    async def failed(self) -> str:
        """Return, when one cannot be kept alive, why."""
        return await asyncio.shield(self._failed)

    def loads(self) -> dict[str, int]:
        """Return the calls in flight by engine, of all processes."""
        loads: dict[str, int] = {}
        for child in self._children:
            for engine_id, calls in child.figures.loads.items():
                loads[engine_id] = loads.get(engine_id, 0) + calls
        return loads

    def heard(self, engine_id: str) -> Mapping[str, int]:
        """Return by process how often calls of an engine were seen to have had bytes."""
        return {
            f"{child.setup.index}": child.figures.heard[engine_id]
            for child in self._children
            if engine_id in child.figures.heard
        }

    def knows(self, version: int) -> bool:
        """Return whether every process that is there has taken in this version of the engines."""
        return all(c.figures.version >= version for c in self._children if c.link is not None)

    def close(self) -> None:
        """Take no new connections of clients."""
        self._doors_closed = True
        self._listener.close()
        self.tell_all(CloseDoors())

    async def stop(self, is_hurried: Callable[[], bool]) -> None:
        """End all of them: in good order, and at once if it is hurried or they take too long."""
        self.close()
        self._stopping.set()
        self.tell_all(Stop())
        end_s = self._clock.now_s() + END_S
        left = set(self._lives)
        while left:
            _, left = await asyncio.wait(left, timeout=_LOOK_S)
            if is_hurried() or self._clock.now_s() > end_s:
                for child in self._children:
                    child.kill()
        if self._watch is not None:
            self._watch.cancel()
        for pair in self._sockets:
            for each in pair:
                each.close()

    def _note_end(self, life: asyncio.Task[None]) -> None:
        """Take a mistake of ours for the end it is."""
        if not life.cancelled() and (error := life.exception()) is not None:
            _log.error("a mistake in keeping %s", life.get_name(), exc_info=error)
            if not self._failed.done():
                self._failed.set_result(f"{life.get_name()}: {error!r}")

    async def _live(self, child: Child) -> None:
        """Keep one process alive."""
        restarts, index = Restarts(self._limits), child.setup.index
        while not self._stopping.is_set() and not self._doors_closed:
            began_s = self._clock.now_s()
            status = await self._live_once(child)
            was_ready, child.is_ready = child.is_ready, False
            if self._stopping.is_set():
                return
            wait_s = restarts.wait_after(self._clock.now_s() - began_s, was_ready=was_ready)
            words = f"gateway {index} ended with status {status}"
            if wait_s is None:
                if not self._failed.done():
                    self._failed.set_result(words)
                return
            _log.error("%s; it starts again", words)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    async def _live_once(self, child: Child) -> int:
        """Start a process and listen to it until it ends; return its status."""
        index = child.setup.index
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = [theirs, self._listener, *self._sockets[index]]
            files = [each.fileno() for each in inherited]
            try:
                child.process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", _MODULE, *map(str, files), f"gateway-{index}"),
                    stdin=DEVNULL,
                    pass_fds=files,
                    start_new_session=True,
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                )
            except BaseException:
                ours.close()
                raise
        child.silent_ticks = 0
        child.link = link = await link_down(ours)
        link.send(child.setup)
        for message in self._greet():
            link.send(message)
        if self._doors_closed:  # while it was being started
            link.send(CloseDoors())
        if self._stopping.is_set():
            link.send(Stop())
        try:
            await self._listen(child, link)
        finally:
            child.link = None
            link.close()
            child.figures = Figures(version=0, loads={}, heard={})
            status = await asyncio.shield(_ended(child))
        return status

    async def _listen(self, child: Child, link: Link[Up, Down]) -> None:
        while True:
            try:
                message = await link.receive()
            except msgspec.MsgspecError:
                _log.exception("gateway %d says what nobody understands", child.setup.index)
                child.kill()
                return
            if message is None:
                return
            child.silent_ticks = 0
            if isinstance(message, Figures):
                child.figures = message
            elif isinstance(message, Ready):
                child.is_ready = True
                if all(each.is_ready for each in self._children):
                    self._all_ready.set()
            elif isinstance(message, Failure):
                self._on_failure(message.engine_id)
            elif isinstance(message, Forget):
                self._on_forget(message.program_ids)
            elif isinstance(message, ToolNow):
                self._on_tool(message.program_id, message.tool)

    async def _look_for_silence(self) -> None:
        """Kill a process that does not run any more; a standstill of this one is no silence."""
        while True:
            await asyncio.sleep(_TICK_S)
            for child in self._children:
                if child.link is None:
                    continue
                child.silent_ticks += 1
                limit = SILENT_TICKS if child.is_ready else START_TICKS
                if child.silent_ticks > limit or child.link.is_stuck:
                    _log.error("gateway %d does not answer and is killed", child.setup.index)
                    child.kill()


async def _ended(child: Child) -> int:
    """Wait for a process whose link has ended; return its status."""
    process = child.process
    assert process is not None
    try:
        async with asyncio.timeout(END_S):
            return await process.wait()
    except TimeoutError:
        child.kill()
        return await process.wait()


def _listening(path: str, kind: socket.SocketKind) -> socket.socket:
    """Return a unix socket that listens."""
    Path(path).unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(path)
    made.listen(BACKLOG)
    made.setblocking(False)
    return made

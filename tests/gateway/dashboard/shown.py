"""A scene's dashboard, served by a thread of its own, for tests that wait elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .scene import Scene, showing

T = TypeVar("T")


class Shown:
    """A scene's dashboard, served by a thread of its own."""

    def __init__(self, scene: Scene, *, clock_runs: bool = False) -> None:
        self.scene = scene
        self.url = ""
        self.story = ""  # a program of the scene, if the test has one
        self.dashboard: Any = None
        self._clock_runs = clock_runs
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard")

    def start(self, port: int = 0) -> None:
        """Serve; returns when it does."""
        self._port = port
        self._thread.start()
        assert self._started.wait(30), "the dashboard does not start"

    def stop(self) -> None:
        """Serve no more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(20)
            assert not self._thread.is_alive(), "the dashboard does not stop"

    def do(self, change: Callable[[], T]) -> T:
        """Run something in the server's thread, as the gateway would, and return what it does."""

        async def run() -> T:
            return change()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        async with showing(self.scene, self._port, clock_runs=self._clock_runs) as (url, board):
            self.url, self.dashboard = url, board
            self._started.set()
            await self._over.wait()


@contextlib.contextmanager
def shown(scene: Scene, *, clock_runs: bool = False, port: int = 0) -> Iterator[Shown]:
    """Serve a scene's dashboard for as long as the block."""
    served = Shown(scene, clock_runs=clock_runs)
    served.start(port)
    try:
        yield served
    finally:
        served.stop()

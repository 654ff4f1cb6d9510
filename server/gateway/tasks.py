"""Background tasks that may not die in silence.

A mistake in one of them is logged with its trace, counted, and the task begins again after a
moment, a longer one each time in a row: a gateway whose leases never run out, or whose journal
stands still, looks healthy for an hour.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

_log = logging.getLogger(__name__)

RESTART_S_MIN: Final = 0.1
RESTART_S_MAX: Final = 30.0
HEALTHY_AFTER_S: Final = 60.0


class Counter(Protocol):
    """What counts the mistakes."""

    def count(self, what: str) -> None:
        """Add one."""
        ...


def keep_running(
    name: str, work: Callable[[], Awaitable[None]], counter: Counter
) -> asyncio.Task[None]:
    """Return a task that does ``work`` until it is cancelled, whatever happens in there."""
    return asyncio.create_task(_keep_running(name, work, counter), name=f"gateway {name}")


async def _keep_running(name: str, work: Callable[[], Awaitable[None]], counter: Counter) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    wait_s = RESTART_S_MIN
    while True:
        began_s = loop.time()
        try:
            await work()
            if task.cancelling():
                return
            _log.error("the gateway's task %r has ended, which it never should", name)
        except Exception:  # noqa: BLE001  (logged and counted; it begins again)
            _log.exception("a mistake in the gateway's task %r; it begins again", name)
        counter.count(f"task {name} restarted")
        if loop.time() - began_s > HEALTHY_AFTER_S:
            wait_s = RESTART_S_MIN
        await asyncio.sleep(wait_s)
        wait_s = min(RESTART_S_MAX, wait_s * 2)

"""Background tasks of the gateway do not die in silence."""

from __future__ import annotations

import asyncio
import logging

import pytest

from autellix.server.gateway.state import GATEWAY
from autellix.server.gateway.tasks import keep_running

from .conftest import Rig, running, until


class Counts(dict[str, int]):
    """Counts."""

    def count(self, what: str) -> None:
        """Add one."""
        self[what] = self.get(what, 0) + 1


async def test_a_mistake_is_logged_and_counted_and_the_task_goes_on(caplog):
    """It begins again after a moment; a cancellation ends it for good."""
    turns = []

    async def work() -> None:
        turns.append(1)
        if len(turns) == 1:
            raise ZeroDivisionError("a mistake")
        if len(turns) > 2:
            await asyncio.Event().wait()

    counts = Counts()
    with caplog.at_level(logging.ERROR):
        task = keep_running("work", work, counts)
        await until(lambda: len(turns) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert counts == {"task work restarted": 2}
    assert "a mistake in the gateway's task 'work'" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "has ended, which it never should" in caplog.text


async def test_a_swallowed_cancellation_ends_the_task_all_the_same():
    """Some libraries take it for a time-out of their own."""

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    task = keep_running("work", work, Counts())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(task, 1.0)


async def test_leases_go_on_after_a_mistake_in_the_sweep(monkeypatch, caplog):
    """One bad second of the sweep is not the end of all leases."""
    monkeypatch.setattr("autellix.server.gateway.app.SWEEP_S", 0.01)
    async with running(lease_s=1.0) as rig:
        sweep, times = rig.table.sweep, []

        def broken(now_s: float) -> list[str]:
            times.append(now_s)
            if len(times) == 1:
                raise KeyError("a mistake")
            return sweep(now_s)

        monkeypatch.setattr(rig.table, "sweep", broken)
        await rig.chat({"X-Autellix-Session": "run-1"})
        await until(lambda: bool(rig.forgotten), 6.0)
        assert rig.app[GATEWAY].counts["task sweep restarted"] == 1
    assert "KeyError" in caplog.text


async def test_an_unsound_table_is_said_and_counted(rig: Rig, monkeypatch, caplog):
    """Also when nothing is in flight."""
    await rig.chat({"X-Autellix-Session": "run-1"})
    program = next(iter(rig.table.programs()))
    program.in_flight = 1
    await until(lambda: rig.app[GATEWAY].counts.get("table unsound", 0) > 0, 4.0)
    program.in_flight = 0
    assert "the process table does not add up" in caplog.text

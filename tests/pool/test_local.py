"""An engine process is started, watched, restarted and ended, whatever it does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autellix.server.clock import SystemClock
from autellix.server.engine.launch import ENV_RUN, EngineCommand, EngineRun
from autellix.server.pool import guard
from autellix.server.pool.local import LocalEngine, LocalSettings
from autellix.server.pool.progress import ProgressLimits
from autellix.server.pool.restarts import EngineFailedError, RestartLimits
from autellix.server.pool.vitals import Vitals
from autellix.server.types import EngineState

FAKE = Path(__file__).with_name("fake_engine.py")


def make_engine(
    folder: Path, *modes: str, restart_limit: int = 2, **changes: object
) -> LocalEngine:
    """Return an engine whose starts run the fake in these modes, the last one again and again."""
    settings: dict[str, object] = {
        "folder": folder,
        "channel_endpoint": None,
        "channel_key": b"k" * 32,
        "start_timeout_s": 20.0,
        "restarts": RestartLimits(
            restart_limit=restart_limit,
            healthy_after_s=60.0,
            backoff_s_min=0.01,
            backoff_s_max=0.05,
        ),
        "stop_grace_s": 1.0,
        "frozen_kill_s": 60.0,
        "show_engine_log": False,
        **changes,
    }
    left = list(modes)

    def command(run: EngineRun) -> EngineCommand:
        mode = left.pop(0) if len(left) > 1 else left[0]
        argv = (sys.executable, "-I", "-S", str(FAKE), run.uds, mode)
        return EngineCommand(argv=argv, env={ENV_RUN: run.run_id})

    clock = SystemClock()
    vitals = Vitals(
        ProgressLimits(floor_s=0.6, cap_s=0.6),
        clock,
        period_s=0.05,
        deadline_s=0.2,
        pulse=lambda: None,
        in_flight=lambda: 0,
    )
    return LocalEngine("e0", command, LocalSettings(**settings), vitals, clock)  # type: ignore[arg-type]


async def reach(engine: LocalEngine, is_reached: Callable[[], bool], limit_s: float = 20) -> None:
    """Wait until the engine's changes of state make something true."""
    changed = asyncio.Event()
    engine.on_state = lambda _engine: changed.set()
    async with asyncio.timeout(limit_s):
        while not is_reached():
            await changed.wait()
            changed.clear()


@asynccontextmanager
async def living(engine: LocalEngine) -> AsyncIterator[list[int]]:
    """Run the engine; yields its processes once it is ready, and checks that none is left."""
    life = asyncio.create_task(engine.run())
    try:
        await reach(engine, lambda: engine.state is EngineState.READY)
        assert engine.session is not None
        pids = [engine.session, *guard.engine_pids(engine.session, "-")]
        yield pids
    finally:
        engine.stop()
        await life
    assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def test_stop_ends_front_end_child_and_guard(tmp_path: Path):
    """A stop leaves no process, not even a child that ignores SIGTERM, and no socket."""
    engine = make_engine(tmp_path, "good")
    async with living(engine) as pids:
        assert len(pids) == 3
        assert list(engine.log_lines) == ["the engine speaks"]
    assert engine.state is EngineState.DEAD
    assert not list(tmp_path.iterdir())


async def test_a_front_end_that_ignores_sigterm_is_killed(tmp_path: Path):
    """The grace ends."""
    async with living(make_engine(tmp_path, "stubborn", stop_grace_s=0.2)):
        pass


async def test_a_child_in_a_session_of_its_own_is_found(tmp_path: Path):
    """The mark in the environment finds what left the session."""
    engine = make_engine(tmp_path, "leaver")
    life = asyncio.create_task(engine.run())
    await reach(engine, lambda: engine.state is EngineState.READY)
    assert engine.session is not None
    children = Path(f"/proc/{engine.session}/task/{engine.session}/children").read_text().split()
    front_end = children[0]
    child = int(Path(f"/proc/{front_end}/task/{front_end}/children").read_text())
    assert is_alive(child)
    engine.stop()
    await life
    assert not is_alive(child)


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["guard", "front end", "child"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_any_process_may_be_killed(tmp_path: Path, victim: int, number: signal.Signals):
    """Whoever dies, the rest of that start ends and a new one comes up (the child cannot tell)."""
    engine = make_engine(tmp_path, "good", restart_limit=3)
    async with living(engine) as pids:
        os.kill(pids[victim], number)
        if victim < 2:
            await reach(engine, lambda: engine.starts == 2 and engine.state is EngineState.READY)
            assert not [pid for pid in pids if is_alive(pid)]


async def test_a_first_start_that_fails_is_not_tried_again(tmp_path: Path):
    """Wrong arguments are wrong for ever; the engine's last words are in the error."""
    engine = make_engine(tmp_path, "dies", restart_limit=5)
    with pytest.raises(EngineFailedError, match=r"exited with status 3(.|\n)*the engine speaks"):
        await engine.run()
    assert engine.starts == 1


async def test_an_engine_that_keeps_dying_is_given_up(tmp_path: Path):
    """After ``restart_limit`` short lives in a row."""
    engine = make_engine(tmp_path, "good", "dies", restart_limit=3)
    life = asyncio.create_task(engine.run())
    await reach(engine, lambda: engine.state is EngineState.READY)
    assert engine.session is not None
    os.kill(engine.session, signal.SIGKILL)
    with pytest.raises(EngineFailedError):
        await life
    assert engine.starts == 3


async def test_a_start_has_a_limit(tmp_path: Path):
    """An engine that never answers is ended."""
    engine = make_engine(tmp_path, "never", start_timeout_s=0.3)
    with pytest.raises(EngineFailedError, match="not ready after"):
        await engine.run()


async def test_a_stopped_front_end_is_ejected_and_comes_back(tmp_path: Path):
    """SIGSTOP makes it FROZEN, SIGCONT makes it READY again, and nothing was restarted."""
    engine = make_engine(tmp_path, "good")
    async with living(engine) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        await reach(engine, lambda: engine.state is EngineState.FROZEN)
        os.kill(pids[1], signal.SIGCONT)
        await reach(engine, lambda: engine.state is EngineState.READY)
        assert engine.starts == 1


async def test_an_engine_that_stays_frozen_is_replaced(tmp_path: Path):
    """After ``frozen_kill_s`` a stopped front end is killed and another started."""
    engine = make_engine(tmp_path, "good", frozen_kill_s=0.2, restart_limit=3)
    async with living(engine) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        await reach(engine, lambda: engine.starts == 2 and engine.state is EngineState.READY)
        assert not [pid for pid in pids if is_alive(pid)]


async def test_stopping_during_the_start_leaves_nothing(tmp_path: Path):
    """Ctrl-C comes at any moment."""
    engine = make_engine(tmp_path, "never")
    life = asyncio.create_task(engine.run())
    while engine.session is None:
        await asyncio.sleep(0)
    session = engine.session
    engine.stop()
    await life
    assert not guard.engine_pids(session, "-")
    assert not is_alive(session)


async def test_the_engine_ends_with_the_process_that_started_it(tmp_path: Path):
    """Kill -9 of the owner: the death pipe ends, and guard, front end, child and folder go."""
    folder = tmp_path / "private"
    folder.mkdir()
    uds = folder / "e0.sock"
    mark = f"{ENV_RUN}={tmp_path.name}"
    program = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        *(sys.executable, "-I", "-S", guard.__file__, str(folder), "1", mark),
        *(sys.executable, "-I", "-S", str(FAKE), str(uds), "good"),
        env={**os.environ, ENV_RUN: tmp_path.name},
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    session = int(await owner.stdout.readline())
    async with asyncio.timeout(10):
        while not uds.exists():
            await asyncio.sleep(0.01)
        owner.kill()
        await owner.wait()
        while guard.engine_pids(session, "-") or is_alive(session) or folder.exists():
            await asyncio.sleep(0.01)

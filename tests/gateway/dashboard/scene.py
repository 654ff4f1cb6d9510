"""A gateway's table, engines and calls without any of them: made up, and the same each time.

`Scene` moves its own clock, so ages and pictures are stable. Run as a module it serves the
dashboard for looking at it: ``python -m tests.gateway.dashboard.scene 18100``; the key is `KEY`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from autellix import wire
from autellix.server import types
from autellix.server.call_log import CallRecord
from autellix.server.channel import CallEvent, CallReport
from autellix.server.clock import ManualClock
from autellix.server.gateway.admin import AdminConfig, AdminSite
from autellix.server.gateway.app import create_app
from autellix.server.gateway.config import GatewayConfig
from autellix.server.gateway.dashboard.pages import Dashboard
from autellix.server.gateway.dashboard.rows import TableRows
from autellix.server.gateway.state import GATEWAY, Gateway
from autellix.server.process_table import ProcessTable
from autellix.server.program import Arrival, Call

KEY = "the key of the scene"
KEYS = (f"ops:{hashlib.sha256(KEY.encode()).hexdigest()}",)
START_S = 50_000.0
NAMES = (
    ("research_agent", "LangGraph"), ("triage-bot", "AutoGen"), ("code_review.py", "openai"),
    ("sql-analyst", "LangGraph"), ("support-desk", "pydantic-ai"), ("planner", "openai-agents"),
    ("browser-task", "DSPy"), ("nightly summary", "openai"),
)  # fmt: skip


class NoEngines:
    """A pool that nobody asks."""

    def all(self) -> list[types.Engine]:
        """Return none."""
        return []

    def note_failure(self, engine_id: str) -> None:
        """Nobody fails."""


class Scene:
    """The table and what is round it."""

    def __init__(self, seed: int = 7, state: str = "") -> None:
        self.clock = ManualClock(START_S)
        self.random = random.Random(seed)
        self.table = ProcessTable(now_s=START_S, closed_calls_max=200_000)
        self.rows = TableRows(self.table, self.clock)  # for a feed that a test makes itself
        self.steps = {"e0": 41_200, "e1": 38_750}
        self.queue = [0.0, 0.0]
        config = GatewayConfig(state=state, calls_remembered=100_000)
        app = create_app(
            config=config, table=self.table, engines=NoEngines(), place=lambda _, e: e[0],
            clock=self.clock, key=b"a key", forget_programs=lambda _: None,
            engine_views=self.engine_views,
        )  # fmt: skip
        self.gateway: Gateway = app[GATEWAY]
        self._made = 0

    @property
    def now_s(self) -> float:
        """The scene's time."""
        return self.clock.now_s()

    def program(self, session: str, name: str | None = None, framework: str | None = None) -> Any:
        """Return a program that has just begun."""
        program = self.table.open_program("", session, self.now_s)
        program.name = name or session
        if framework is not None:
            program.opener = {"framework": framework}
        return program

    def begin(
        self,
        session: str,
        *,
        thread: int = 0,
        parent: tuple[int, int] | None = None,
        node: str | None = None,
        engine: str = "e0",
        why: str = "home",
    ) -> tuple[Call, CallRecord]:
        """Begin a call and send it to an engine."""
        self._made += 1
        fork = wire.ParentCall(*parent) if parent else None
        arrival = Arrival("", session=session, thread=thread, parent=fork, node=node)
        call, _ = self.table.begin_call(arrival, f"{self._made:024x}", self.now_s)
        assert self.gateway.book is not None
        record = self.gateway.book.log.begin(call, self.now_s)
        record.node, record.model, record.path = node, "smollm2", "/v1/chat/completions"
        self.table.dispatch(call, engine)
        record.sent(engine, why, {engine: 1}, self.now_s + 0.004)
        return call, record

    def end(
        self,
        call: Call,
        record: CallRecord,
        events: list[tuple[float, str, int, str]] | None,
        *,
        status: int = 200,
        tokens: tuple[int, int, int] = (420, 300, 90),
    ) -> None:
        """End a call now, with what its engine tells of it; None: it tells nothing."""
        now_s = self.now_s
        self.table.end_call(call, now_s, completed=status < 400)
        record.ended(status, "ok" if status < 400 else "engine_died", now_s)
        if events is None:
            return
        assert record.dispatched_s is not None
        stay_s = now_s - record.dispatched_s - 0.006
        wait_s, running, since = 0.0, False, 0.0
        for at_s, what, _, _ in [*events, (stay_s, "preempt", 0, "")]:
            if what not in ("run", "preempt"):
                continue
            wait_s += 0.0 if running else at_s - since
            running, since = what == "run", at_s
        report = CallReport(
            seq=self._made, call_id=call.call_id, program_id=call.program.program_id,
            request_id=f"chatcmpl-{call.call_id}", reason="stop", service_s=stay_s - wait_s,
            wait_s=wait_s, preemptions=sum(e[1] == "preempt" for e in events),
            swaps=sum(e[3].endswith("+swap") for e in events), prompt_tokens=tokens[0],
            hit_tokens=tokens[1], output_tokens=tokens[2], level=events[-1][2], first_level=1,
            stay_s=stay_s, events=tuple(CallEvent(*event) for event in events),
        )  # fmt: skip
        self.table.fold_report(record.engine_id or "e0", "boot", report, now_s)
        record.fold(report)

    def engine_views(self) -> list[dict[str, Any]]:
        """Return two engines: a busy one and one that is late."""
        loads = self.table.loads()
        return [self._engine("e0", 0, loads, 0.12), self._engine("e1", 1, loads, 0.31)]

    def _engine(self, name: str, index: int, loads: dict[str, int], age_s: float) -> dict[str, Any]:
        calls = loads.get(name, 0)
        waiting = min(int(self.queue[index]), max(0, calls - 6))
        running = min(16, calls - waiting)
        levels = [waiting // 2, waiting // 4, waiting - waiting // 2 - waiting // 4, 0, 0, 0]
        hello = {
            "engine_id": name, "boot_id": f"b{index}", "vllm_version": "0.32.0", "slots": 16,
            "scheduler": "AutellixScheduler", "policy": "plas", "async_scheduling": False,
            "kv_blocks": 2048, "block_tokens": 128,
        }  # fmt: skip
        load = {
            "step": self.steps[name], "step_age_s": 0.021, "longest_step_s": 0.31,
            "running": running, "waiting": waiting,
            "kv_blocks_free": 1200 - 900 * index, "computed_tokens": 812_000,
            "recomputed_tokens": 9_100 * (1 + index), "preemptions": 214 + 77 * index,
            "level_waiting": levels,
        }  # fmt: skip
        return {
            "engine": name, "state": "ready", "starts": 1, "calls": calls,
            "channel": hello, "load": load, "reports_lost": 0, "heard_age_s": age_s,
            "prompt_tokens": 100_000, "hit_tokens": 71_000 - 20_000 * index,
        }  # fmt: skip

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)
        self.wander(seconds)

    def wander(self, seconds: float) -> None:
        """Let the engines step and their queues wander."""
        for index, name in enumerate(self.steps):
            self.steps[name] += int(seconds * (23 + 4 * index))
            back = 0.06 * (6 + 3 * index - self.queue[index])
            self.queue[index] = max(0.0, self.queue[index] + back + self.random.gauss(0, 1.1))

    def fill(self, programs: int, calls_max: int = 3) -> None:
        """Fill the table: most programs are over, some wait for tools, some run."""
        for number in range(programs):
            name, framework = NAMES[number % len(NAMES)]
            session = f"run-{number:05d}"
            self.program(session, f"{name} {number:05d}", framework)
            for _ in range(1 + number % calls_max):
                call, record = self.begin(session, engine=f"e{number % 2}")
                wait_s = self.random.expovariate(2.0)
                service_s = self.random.expovariate(0.8) + 0.05
                self.clock.advance(0.001)
                level = 1 + min(5, int(service_s))
                record.dispatched_s = self.now_s - wait_s - service_s - 0.006
                self.end(call, record, [(wait_s, "run", level, "fresh")])
            program = self.table.get(call.program.program_id)
            assert program is not None
            if number % 10 == 0:
                self.begin(session, engine=f"e{number // 10 % 2}")
            elif number % 10 > 2:
                self.table.end_program(program, "ok", self.now_s)


def add_story(scene: Scene) -> str:
    """Add one program worth a look: forks, joins, preemption, a swap; return its id."""
    session = "story"
    program = scene.program(session, "research_agent", "LangGraph")
    call, record = scene.begin(session, node="plan", why="first")
    scene.advance(1.6)
    scene.end(call, record, [(0.35, "run", 1, "fresh")])
    scene.advance(0.7)
    fan = []
    for thread in (1, 2, 3):
        engine = "e1" if thread == 3 else "e0"
        fan.append(scene.begin(session, thread=thread, parent=(0, 1), node="search", engine=engine,
                               why="moved" if thread == 3 else "home"))  # fmt: skip
        scene.advance(0.08)
    scene.advance(1.2)
    scene.end(*fan[0], [(0.3, "run", 1, "hit")])
    scene.advance(0.9)
    scene.end(*fan[1], [(0.2, "run", 1, "hit"), (0.8, "preempt", 2, "waiting:1"),
                        (1.7, "run", 2, "recompute")])  # fmt: skip
    scene.advance(0.4)
    follow = scene.begin(session, thread=1, node="read")
    scene.advance(1.0)
    scene.end(*fan[2], [(0.5, "run", 1, "fresh"), (1.4, "preempt", 2, "room+swap"),
                        (2.6, "run", 2, "swap_in")])  # fmt: skip
    scene.advance(0.6)
    scene.end(*follow, [(0.25, "run", 1, "hit")])
    scene.advance(0.5)
    call, record = scene.begin(session, node="write")
    scene.advance(2.1)
    scene.end(call, record, [(0.4, "run", 1, "hit"), (1.1, "demote", 2, "")])
    scene.advance(1.3)
    call, record = scene.begin(session, node="critic")
    scene.advance(1.1)
    scene.end(call, record, None, status=502)
    scene.advance(0.2)
    call, record = scene.begin(session, node="critic", why="next")
    scene.advance(0.9)
    scene.end(call, record, [(0.6, "run", 2, "recompute")])
    scene.advance(0.3)
    scene.begin(session, node="revise")
    scene.advance(1.4)
    program_id: str = program.program_id
    return program_id


@contextlib.asynccontextmanager
async def showing(
    scene: Scene, port: int = 0, *, clock_runs: bool = False, folder: Path | None = None
) -> AsyncIterator[tuple[str, Dashboard]]:
    """Serve the dashboard of a scene; yields (its address, the dashboard)."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ax")))
        site = AdminSite(scene.gateway, AdminConfig(keys=KEYS), folder)
        assert scene.gateway.book is not None
        dashboard = Dashboard(
            site,
            scene.gateway,
            calls_of=scene.gateway.book.log.of_program,
            about={"policy": "plas"},
        )
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        for age_s in range(300, 0, -1):  # a past to look at
            scene.wander(1.0)
            dashboard.feed.tick(scene.now_s - age_s)
        await site.start(listener, None)
        task = asyncio.create_task(_run_clock(scene)) if clock_runs else None
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard", dashboard
        finally:
            if task is not None:
                task.cancel()
            await site.stop()


async def _run_clock(scene: Scene) -> None:
    while True:
        await asyncio.sleep(0.25)
        scene.advance(0.25)


async def main() -> None:
    """Serve a scene until Ctrl-C."""
    port, programs = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 400
    scene = Scene()
    scene.fill(programs)
    story = add_story(scene)
    async with showing(scene, port, clock_runs=True) as (url, _):
        sys.stdout.write(f"{url}#/program/{story}  key: {KEY}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

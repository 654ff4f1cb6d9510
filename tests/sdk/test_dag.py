"""Property: whatever a program does with tasks and threads, its true order is in what is inferred.

A program here is a random tree. Each node makes calls, and runs its children as tasks, threads,
pool jobs or in a row, and waits for them. Calls are tagged by the real SDK; a pure reference infers
the order from the tags and completions alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autellix
from autellix import runtime, wire
from autellix.config import Origin
from autellix.server.process_table import ProcessTable
from autellix.server.program import Arrival, Call

from .happens_before import CallKey, Inference

ORIGIN = Origin("http", "127.0.0.1", 1)


@dataclass
class Node:
    """One function of a program: steps are "call", "look" or a (way, children) pair."""

    steps: list[Any]


def _steps(nodes: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    ways = st.sampled_from(["tasks", "threads", "pool", "row", "named", "to_thread"])
    step = st.sampled_from(["call", "call", "look"]) | st.tuples(
        ways, st.lists(nodes, min_size=1, max_size=3)
    )
    return st.lists(step, min_size=1, max_size=4).map(Node)


nodes = st.recursive(st.just(Node(["call"])), _steps, max_leaves=10)


@dataclass
class World:
    """Makes calls, and knows the true order of them."""

    session: autellix.Session
    inference: Inference = field(default_factory=Inference)
    truth: dict[CallKey, frozenset[CallKey]] = field(default_factory=dict)
    inferred: dict[CallKey, frozenset[CallKey]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    table: ProcessTable = field(default_factory=ProcessTable)
    in_flight: dict[CallKey, Call] = field(default_factory=dict)
    by_server: dict[CallKey, frozenset[CallKey]] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)

    def arrive_at_server(self, key: CallKey, forks: tuple[wire.ParentCall, ...]) -> None:
        """Give the call to the real process table, and keep what it infers."""
        arrival = Arrival(
            scope="",
            session=self.session.id,
            thread=key.thread,
            seq=key.seq,
            parent=forks[0] if forks else None,
            follows=forks[1:],
        )
        call, _ = self.table.begin_call(arrival, f"{len(self.truth):08x}", float(len(self.truth)))
        direct = [CallKey(*parent) for parent in call.parents]
        near = [self.by_server[parent] for parent in direct if parent in self.by_server]
        self.by_server[key] = frozenset(direct).union(*near)
        self.in_flight[key] = call

    def call(self, known: set[CallKey]) -> None:
        """Tag one call; ``known`` is what truly happened before it, and grows by it."""
        with self.lock:
            tags = runtime.get_runtime().tag(ORIGIN, None, "openai", None)
            assert tags is not None
            sent = {name.decode(): value.decode() for name, _, value in tags}
            assert sent[wire.SESSION] == self.session.id
            key = CallKey(int(sent[wire.THREAD]), int(sent[wire.SEQ]))
            assert key not in self.truth, "two calls with one name"
            forks = wire.parse_parents(sent.get(wire.PARENT, ""))
            self.truth[key] = frozenset(known)
            self.inferred[key] = self.inference.arrive(key, forks)
            self.arrive_at_server(key, forks)
        known.add(key)

    def answered(self, known: set[CallKey]) -> None:
        """The latest of a strand's calls is complete."""
        with self.lock:
            for key in known - set(self.inference.done):
                self.inference.complete(key)
                self.table.end_call(self.in_flight.pop(key), float(len(self.truth)))


def run_sync(world: World, node: Node, known: set[CallKey]) -> None:
    """Run a node in this OS thread."""
    for step in node.steps:
        if step == "call":
            world.call(known)
            world.answered(known)
            continue
        if step == "look":
            autellix.current_thread()  # makes the thread known here, though it may never call
            continue
        way, children = step
        if way == "tasks":
            asyncio.run(run_async(world, Node([step]), known))
            continue
        branches = [set(known) for _ in children]
        if way in ("row", "named"):
            for child in children:
                with autellix.thread(f"n{next(world.names)}") if way == "named" else nullcontext():
                    run_sync(world, child, known)
            continue
        _in_parallel(way, [(lambda c=c, b=b: run_sync(world, c, b)) for c, b in
                           zip(children, branches, strict=True)])  # fmt: skip
        known.update(*branches)


def _in_parallel(way: str, jobs: list[Callable[[], None]]) -> None:
    if way == "threads":
        threads = [threading.Thread(target=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


async def run_async(world: World, node: Node, known: set[CallKey]) -> None:
    """Run a node in this task."""
    for step in node.steps:
        if step == "call":
            world.call(known)
            await asyncio.sleep(0)
            world.answered(known)
            continue
        if step == "look":
            autellix.current_thread()
            continue
        way, children = step
        branches = [set(known) for _ in children]
        if way in ("row", "named"):
            for child in children:
                with autellix.thread(f"n{next(world.names)}") if way == "named" else nullcontext():
                    await run_async(world, child, known)
            continue
        if way == "tasks":
            await asyncio.gather(
                *(run_async(world, c, b) for c, b in zip(children, branches, strict=True))
            )
        else:
            await asyncio.gather(
                *(
                    asyncio.to_thread(run_sync, world, c, b)
                    for c, b in zip(children, branches, strict=True)
                )
            )
        known.update(*branches)


def check(world: World) -> None:
    """The true order is contained in the inferred one."""
    for key, before in world.truth.items():
        missing = before - world.inferred[key]
        assert not missing, f"{key} comes after {sorted(missing)}, which was not inferred"
        missing = before - world.by_server[key]
        assert not missing, f"{key} comes after {sorted(missing)}, which the server missed"


@pytest.fixture(autouse=True)
def _quiet(server):
    """The tags are read directly: no call is sent, so no session message either."""
    autellix.init(lifecycle=False)


SETTINGS = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(nodes)
def test_the_true_order_is_inferred_sync(program: Node):
    """Programs that start in a thread."""
    with autellix.session(nested="new") as session:
        world = World(session)
        run_sync(world, program, set())
    check(world)


@SETTINGS
@given(nodes)
def test_the_true_order_is_inferred_async(program: Node):
    """Programs that start in a loop."""

    async def main() -> World:
        async with autellix.session(nested="new") as session:
            world = World(session)
            await run_async(world, program, set())
            return world

    check(asyncio.run(main()))


@SETTINGS
@given(st.lists(nodes, min_size=2, max_size=4))
def test_no_call_is_in_two_sessions(programs: list[Node]):
    """Programs at once, each in its session: every tag is of its own."""

    async def one(program: Node) -> World:
        async with autellix.session(nested="new") as session:
            world = World(session)
            await run_async(world, program, set())  # World.call asserts the session
            return world

    async def main() -> list[World]:
        return list(await asyncio.gather(*map(one, programs)))

    worlds = contextvars.copy_context().run(asyncio.run, main())
    assert len({w.session.id for w in worlds}) == len(programs)
    for world in worlds:
        check(world)


def test_the_diamond_is_exact():
    """plan, three branches, join: exactly these edges, and no more."""

    async def main() -> World:
        async with autellix.session(nested="new") as session:
            world = World(session)
            calls = Node(["call", ("tasks", [Node(["call"])] * 3), "call"])
            await run_async(world, calls, set())
            return world

    world = asyncio.run(main())
    assert world.inferred == world.truth
    assert len(world.truth) == 5

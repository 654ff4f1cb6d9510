"""What the scheduler costs: one step against stock vLLM, and each event with many calls waiting.

Both schedulers are real, the model is not. A step is ``schedule()`` + ``update_from_output()`` with
256 decoding calls. Both schedulers take turns, one step each, since the machine's speed may change
within a second; the ratio and the difference are the medians over these pairs. An event is one add,
abort, finish or promotion, with 1,000 and with 100,000 calls waiting, in turns as well; the figure
is the median.

    python -m benchmarks.step_cost
    python -m benchmarks.step_cost --policy adaptive   # which has no promotion
    python -m benchmarks.step_cost --views   # what keeping each call's story for its report costs
    python -m benchmarks.step_cost --fit     # stock vLLM's, as the lab's profiles have it
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from autellix.server.clock import ManualClock
from autellix.server.engine.build import build_config, build_scheduler, make_request
from autellix.server.engine.scheduler import AutellixScheduler

RUNNING, STEPS, ROUNDS = 256, 60, 7
FIT_RUNNING = (1, 16, 64, 256)
CHURN, VIEW_ROUNDS = 16, 16
PROMPT = range(1000, 1040)


def scheduler_with(cls, waiting: int, policy: str = "plas", *, running: int = RUNNING):
    """Return a scheduler with calls decoding and calls waiting, each of its own program."""
    config = build_config(
        kv_blocks=running * 64 + 64,
        slots=running,
        step_tokens=16384,
        async_scheduling=True,
        policy_config={"policy": policy} if cls is AutellixScheduler else None,
        priority=cls is AutellixScheduler,
    )
    scheduler = build_scheduler(cls, config=config)
    add(scheduler, 0, running)
    for _ in range(3):
        step(scheduler)
    add(scheduler, running, waiting)
    return scheduler


def add(scheduler, first: int, count: int) -> None:
    for number in range(first, first + count):
        scheduler.add_request(
            make_request(f"c{number}", PROMPT, 900, session_id=f"p{number}", arrival_s=number)
        )


def step(scheduler) -> float:
    """Return the seconds of one step without the model."""
    start = time.perf_counter()
    output = scheduler.schedule()
    middle = time.perf_counter()
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
    )
    ready = time.perf_counter()
    scheduler.update_from_output(output, result)
    return middle - start + time.perf_counter() - ready


def steps(policy: str, waiting: int) -> None:
    """Print the cost of a step of both schedulers."""
    arms = {"stock": AsyncScheduler, policy: AutellixScheduler}
    schedulers = {name: scheduler_with(cls, waiting, policy) for name, cls in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        gc.collect()
        gc.disable()
        for turn in range(STEPS):
            for name in list(arms) if turn % 2 else list(arms)[::-1]:
                seconds[name].append(step(schedulers[name]))
        gc.enable()
    pairs = list(zip(seconds["stock"], seconds[policy], strict=True))
    stock, ours = (statistics.median(seconds[name]) * 1e3 for name in arms)
    ratio = statistics.median(b / a for a, b in pairs)
    more = statistics.median(b - a for a, b in pairs) * 1e3
    limit = 1.10 if waiting == 0 else 1.15
    print(
        f"step, {RUNNING} running, {waiting:6d} waiting: stock {stock:.2f} ms, {policy} "
        f"{ours:.2f} ms, "
        f"{ratio:.2f} x (asked: {limit:.2f}), {more:+.2f} ms (asked: 1.00)",
        flush=True,
    )


def fit() -> None:
    """Print what a step of stock vLLM's scheduler costs at all, and for each call in the batch."""
    medians: dict[int, list[float]] = {running: [] for running in FIT_RUNNING}
    for _ in range(ROUNDS):
        for running, found in medians.items():
            scheduler = scheduler_with(AsyncScheduler, 0, running=running)
            found.append(statistics.median(step(scheduler) for _ in range(STEPS)))
    steps_s = {running: statistics.median(found) for running, found in medians.items()}
    per_call_s, fixed_s = statistics.linear_regression(list(steps_s), list(steps_s.values()))
    for running, seconds in steps_s.items():
        print(f"{running:4d} running: {seconds * 1e6:.0f} us")
    print(f"schedule_fixed_s = {fixed_s:.2g}\nschedule_per_call_s = {per_call_s:.2g}")


def views() -> None:
    """Print the cost of a life of a call, and of a step, with and without the calls' stories.

    Every call of the batch is replaced every ``CHURN`` steps, so that calls come, run, are demoted
    and leave all the time, and reports are made for all of them.
    """
    arms = {"on": True, "off": False}
    schedulers = {}
    for name, keeps in arms.items():
        scheduler = scheduler_with(AutellixScheduler, 0)
        scheduler.accounts.keeps_events = keeps
        scheduler.accounts.on_report = lambda _report: None
        schedulers[name] = scheduler
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    number = RUNNING
    for turn in range(VIEW_ROUNDS):
        order = list(arms) if turn % 2 else list(arms)[::-1]
        for name in order:
            scheduler = schedulers[name]
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            for _ in range(CHURN):
                step(scheduler)
            leaving = [r.request_id for r in scheduler.running]
            scheduler.finish_requests(leaving, RequestStatus.FINISHED_STOPPED)
            add(scheduler, number, RUNNING)
            seconds[name].append(time.perf_counter() - start)
            gc.enable()
        number += RUNNING
    ratio = statistics.median(on / off for on, off in zip(*seconds.values(), strict=True))
    on, off = (statistics.median(seconds[name]) * 1e3 for name in arms)
    print(
        f"{CHURN} steps with {RUNNING} running, all replaced: stories on {on:.2f} ms, off "
        f"{off:.2f} ms, {ratio:.3f} x (asked: 1.02), {VIEW_ROUNDS} rounds each",
        flush=True,
    )


class Queue:
    """A scheduler of 8 slots with many calls waiting, on a clock that is set by hand."""

    def __init__(self, policy: str, waiting: int) -> None:
        self.clock = ManualClock()
        config = build_config(
            kv_blocks=4096,
            slots=8,
            async_scheduling=True,
            policy_config={"policy": policy, "beta": 4.0, "programs_max": 1_000_000},
        )
        cls = type("Timed", (AutellixScheduler,), {"clock": self.clock})
        self.scheduler = build_scheduler(cls, config=config)
        add(self.scheduler, 0, 8)
        for _ in range(3):
            step(self.scheduler)
            self.clock.advance(0.1)
        for number in range(8, 8 + waiting):
            self.scheduler.add_request(
                make_request(f"c{number}", PROMPT, 900, session_id=f"p{number}", priority=1000)
            )

    def add(self, number: int) -> None:
        """A call more."""
        add(self.scheduler, 10_000_000 + number, 1)

    def abort(self, number: int) -> None:
        """A waiting call goes."""
        self.scheduler.finish_requests(f"c{50 + 7 * number}", RequestStatus.FINISHED_ABORTED)

    def finish(self, _: int) -> None:
        """A running call is over."""
        self.scheduler.finish_requests(
            self.scheduler.running[0].request_id, RequestStatus.FINISHED_STOPPED
        )

    def due(self) -> None:
        """Add calls with a little more service each, which are due one after the other."""
        for number in range(100):
            request = make_request(
                f"due{number}", PROMPT, 900, session_id=f"due{number}", priority=800 + number
            )
            self.scheduler.add_request(request)
        self.due_from_s = self.clock.now_s()

    def advance(self, number: int) -> None:
        """Go on to when one of them is due."""
        # β · (first step + service) after it began to wait, and a little
        due_s = self.due_from_s + 4.0 * (0.05 + (800 + number) / 1000)
        self.clock.advance(max(0.0, due_s + 1e-4 - self.clock.now_s()))

    def promote(self, _: int) -> bool:
        """Promote; return whether it was one call."""
        calls = self.scheduler.autellix.promote(self.clock.now_s())
        for call in calls:
            self.scheduler.waiting.moved(self.scheduler.requests[call.call_id])
        return len(calls) == 1


def events(policy: str, waiting: Sequence[int]) -> dict[str, list[float]]:
    """Return the median seconds of each event with so many calls waiting."""
    queues = [Queue(policy, count) for count in waiting]
    seconds = {
        "add": timed([queue.add for queue in queues]),
        "abort": timed([queue.abort for queue in queues]),
        "finish": timed([queue.finish for queue in queues], count=7),
    }
    if policy != "adaptive":  # it has no levels to promote between
        for queue in queues:
            queue.due()
        seconds["promotion"] = timed(
            [queue.promote for queue in queues], before=[queue.advance for queue in queues]
        )
    return seconds


def timed(
    doings: Sequence[Callable[[int], object]],
    count: int = 100,
    before: Sequence[Callable[[int], object]] = (),
) -> list[float]:
    """Do each in turn, so often; return the median seconds of each, of those that say no False."""
    seconds: list[list[float]] = [[] for _ in doings]
    for number in range(count):
        for prepare in before:
            prepare(number)
        for doing, found in zip(doings, seconds, strict=True):
            start = time.perf_counter()
            done = doing(number)
            took_s = time.perf_counter() - start
            if done is not False:
                found.append(took_s)
    return [statistics.median(found) for found in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--policy", choices=("mlfq", "plas", "atlas", "adaptive"), default="plas")
    parser.add_argument("--views", action="store_true", help="only what the calls' stories cost")
    parser.add_argument("--fit", action="store_true", help="only stock vLLM's, per call")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.views or arguments.fit:
        (views if arguments.views else fit)()
        return
    for waiting in (0, 10_000):
        steps(arguments.policy, waiting)
    for name, (few, many) in events(arguments.policy, (1_000, arguments.many)).items():
        print(
            f"{name}: {few * 1e6:.0f} us with 1,000 waiting, {many * 1e6:.0f} us with "
            f"{arguments.many:,}, {many / few:.2f} x (asked: 1.50)"
        )


if __name__ == "__main__":
    main()

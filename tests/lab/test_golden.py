"""The golden cells, recomputed by a driver of stock vLLM that shares nothing with the simulator.

It has its own token ids, vLLM's own block hashes, its own step costs and its own loop; only the
trace and the arrival times are the lab's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import pytest

from autellix.server.lab import golden, trace, workload

BANDWIDTH = 2.039e12 * 0.78
FLOPS = 312e12 * 0.5


def step_seconds(tokens: int, context: int, pairs: int, calls: int) -> float:
    """Return what the A100 profile says a step takes, from its data sheet figures."""
    memory = 16.06e9 / BANDWIDTH + context * (131072 / BANDWIDTH)
    arithmetic = tokens * (2 * 8.03e9 / FLOPS) + pairs * (4 * 32 * 4096 / FLOPS)
    return 4e-3 + max(memory, arithmetic) + 1.5e-4 + calls * 8e-6


class Driver:
    """vLLM's scheduler in a plain loop, one batch at a time."""

    def __init__(self, cell) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        from autellix.server.engine.build import build_scheduler

        profile = cell.profile
        self.scheduler = build_scheduler(
            AsyncScheduler, kv_blocks=profile.blocks, slots=profile.slots, step_tokens=2048,
            max_model_tokens=profile.context_tokens_max, priority=False,
        )  # fmt: skip
        programs = [
            p for p in trace.load(cell.trace) if p.largest_tokens <= profile.context_tokens_max
        ]
        arrivals = workload.poisson(programs, cell.rate_per_s, float("inf"), cell.seed)
        self.programs = {a.number: a for a in itertools.islice(arrivals, cell.programs)}
        self.events = [(a.at_s, n, n, None) for n, a in self.programs.items()]
        self.pushed = len(self.events)
        self.groups: dict[str, list[int]] = {}
        self.counter = itertools.count(10)
        self.text: dict[tuple[int, int], list[int]] = {}
        self.left = {n: {c.id: len(c.parents) for c in a.program.calls}
                     for n, a in self.programs.items()}  # fmt: skip
        self.order: list[str] = []
        self.steps = self.computed = self.hits = 0

    def fresh(self, count: int) -> list[int]:
        """Return token ids that nobody has had."""
        return list(itertools.islice(self.counter, count))

    def say(self, number: int, call) -> list[int]:
        """Return prompt + output of a call, made at first need."""
        key = (number, call.id)
        if key not in self.text:
            program = self.programs[number].program
            group = program.role_prefixes.get(call.role or "") or program.shared_prefix
            prefix: list[int] = []
            if call.cached_prefix_of is not None:
                source = next(c for c in program.calls if c.id == call.cached_prefix_of)
                prefix = self.say(number, source)[: call.prefix_tokens]
            elif group is not None:
                # Programs of a group may share more or less of its text; it is one text.
                common = self.groups.setdefault(group.group, [])
                common += self.fresh(max(0, group.tokens - len(common)))
                prefix = common[: min(group.tokens, call.prompt_tokens)]
            self.text[key] = prefix + self.fresh(call.tokens - len(prefix))
        return self.text[key]

    def start(self, number: int, call) -> None:
        """Hand a call to the scheduler."""
        from autellix.server.engine.build import make_request

        prompt = self.say(number, call)[: call.prompt_tokens]
        name = f"{number}-{call.id}"
        self.scheduler.add_request(make_request(name, prompt, call.output_tokens))

    def ready(self, number: int, call, now: float) -> None:
        """Start a call, now or after its tool."""
        wait = min(call.tool_s or 0.0, 300.0)
        if wait:
            self.pushed += 1
            heapq.heappush(self.events, (now + wait, self.pushed, number, call))
        else:
            self.start(number, call)

    def begin(self, until: float) -> None:
        """Handle arrivals and ends of tools up to a time."""
        while self.events and self.events[0][0] <= until:
            at, _, number, call = heapq.heappop(self.events)
            if call is not None:
                self.start(number, call)
                continue
            for first in self.programs[number].program.calls:
                if not first.parents:
                    self.ready(number, first, at)

    def run(self) -> None:
        """Run until nothing is left."""
        now = 0.0
        heapq.heapify(self.events)
        while self.events or self.scheduler.requests:
            if not self.scheduler.requests:
                now = max(now, self.events[0][0])
            self.begin(now)
            if self.scheduler.requests:
                now = self.step(now)

    def step(self, now: float) -> float:
        """Run one step and return when it ended."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        counts = output.num_scheduled_tokens
        requests = {name: self.scheduler.requests[name] for name in counts}
        ends = {name: request.num_computed_tokens for name, request in requests.items()}
        pairs = sum(n * (ends[name] - n // 2) for name, n in counts.items())
        self.steps += 1
        self.computed += sum(counts.values())
        self.hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        now += step_seconds(sum(counts.values()), sum(ends.values()), pairs, len(counts))
        sampled = []
        for name, request in requests.items():
            number, call_id = map(int, name.split("-"))
            said = self.text[number, call_id]
            sampled.append([] if request.is_prefill_chunk else [said[request.num_tokens]])
        # What arrives while a step runs is in the queue before its output is handled.
        self.begin(now)
        names = list(counts)
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(names, {n: k for k, n in enumerate(names)}, sampled)
        )
        for name in names:
            if name not in self.scheduler.requests:
                self.finish(*map(int, name.split("-")), now)
        return now

    def finish(self, number: int, call_id: int, now: float) -> None:
        """Note the end of a call and start what waited for it."""
        self.order.append(f"{number}-{call_id}")
        left = self.left[number]
        for call in self.programs[number].program.calls:
            times = call.parents.count(call_id)
            if times:
                left[call.id] -= times
                if left[call.id] == 0:
                    self.ready(number, call, now)


@pytest.mark.parametrize("place", [0, 2])
def test_an_independent_driver_gets_the_golden_figures(place: int):
    """Steps, tokens, hits and the order of completion are the same, exactly."""
    cell, recorded = golden.cells()[place], golden.recorded()[place]
    assert cell.profile.batches_in_flight == 1
    driver = Driver(cell)
    driver.run()
    by_call: dict[str, int] = defaultdict(int)
    for name in driver.order:
        by_call[name] += 1
    assert set(by_call.values()) == {1}
    assert len(driver.order) == recorded["calls"]
    assert driver.order[:8] == recorded["first_completed"]
    assert golden.order_digest(driver.order) == recorded["order"]
    assert (driver.steps, driver.computed, driver.hits) == (
        recorded["steps"], recorded["computed_tokens"], recorded["hit_tokens"],
    )  # fmt: skip

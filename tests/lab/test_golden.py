"""The golden cells, recomputed by a driver of stock vLLM that shares nothing with the simulator.

It has its own token ids, vLLM's own block hashes, its own step costs and its own loop; only the
trace and the arrival times are the lab's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque

import pytest

from autellix.server.lab import golden, trace, workload

BANDWIDTH = 2.039e12 * 0.78
FLOPS = 312e12 * 0.5


def step_seconds(tokens: int, context: int, pairs: int, calls: int, depth: int) -> float:
    """Return what the A100 profile says a step takes, from its data sheet figures."""
    memory = 16.06e9 / BANDWIDTH + context * (131072 / BANDWIDTH)
    arithmetic = tokens * (2 * 8.03e9 / FLOPS) + pairs * (4 * 32 * 4096 / FLOPS)
    model, host = max(memory, arithmetic), 1.5e-4 + calls * 8e-6
    return 4e-3 + (model + host if depth == 1 else max(model, host))


class Driver:
    """vLLM's scheduler in a plain loop, with one batch in flight or two."""

    def __init__(self, cell) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        from autellix.server.engine.build import build_scheduler

        profile = cell.profile
        self.scheduler = build_scheduler(
            AsyncScheduler, kv_blocks=profile.blocks, slots=profile.slots, step_tokens=2048,
            max_model_tokens=profile.context_tokens_max, priority=False,
            async_scheduling=profile.batches_in_flight > 1,
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
        self.depth = profile.batches_in_flight
        self.flight: deque = deque()
        self.busy_until = 0.0
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

    def start(self, number: int, call, now: float) -> None:
        """Hand a call to the scheduler; an idle engine begins a step with it."""
        from autellix.server.engine.build import make_request

        prompt = self.say(number, call)[: call.prompt_tokens]
        name = f"{number}-{call.id}"
        self.scheduler.add_request(make_request(name, prompt, call.output_tokens))
        if not self.flight:
            self.fill(now)

    def ready(self, number: int, call, now: float) -> None:
        """Start a call, now or after its tool."""
        wait = min(call.tool_s or 0.0, 300.0)
        if wait:
            self.pushed += 1
            heapq.heappush(self.events, (now + wait, self.pushed, number, call))
        else:
            self.start(number, call, now)

    def begin(self, until: float) -> None:
        """Handle arrivals and ends of tools up to a time."""
        while self.events and self.events[0][0] <= until:
            at, _, number, call = heapq.heappop(self.events)
            if call is not None:
                self.start(number, call, at)
                continue
            for first in self.programs[number].program.calls:
                if not first.parents:
                    self.ready(number, first, at)

    def run(self) -> None:
        """Run until nothing is left: what comes before a step's end, then that end."""
        heapq.heapify(self.events)
        while self.events or self.flight:
            if self.flight and (not self.events or self.flight[0][0] < self.events[0][0]):
                self.land()
            else:
                self.begin(self.events[0][0])

    def fill(self, now: float) -> None:
        """Schedule batches as long as there is work and room for one in flight."""
        while len(self.flight) < self.depth and self.scheduler.requests:
            output = self.scheduler.schedule()
            if output.total_num_scheduled_tokens:
                self.flight.append(self.batch(output, now))
            elif self.flight and self.flight[-1][2]:
                # As vLLM's engine core: a batch of nothing stands behind the full one.
                self.flight.append((self.busy_until, output, {}))
            else:
                assert self.flight, "the engine has work, nothing under way, and schedules nothing"
                self.update(output, {})
                return

    def batch(self, output, now: float):
        """Return when a step ends, what it is, and each call's token, None while it prefills."""
        counts = output.num_scheduled_tokens
        requests = {name: self.scheduler.requests[name] for name in counts}
        ends = {name: request.num_computed_tokens for name, request in requests.items()}
        pairs = sum(n * (ends[name] - n // 2) for name, n in counts.items())
        self.steps += 1
        self.computed += sum(counts.values())
        self.hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        seconds = step_seconds(
            sum(counts.values()), sum(ends.values()), pairs, len(counts), self.depth
        )
        self.busy_until = max(now, self.busy_until) + seconds
        samples = {name: not request.is_prefill_chunk for name, request in requests.items()}
        return self.busy_until, output, samples

    def land(self) -> None:
        """Hand the oldest batch's tokens over, end what is over, and go on."""
        now, output, samples = self.flight.popleft()
        requests = {name: self.scheduler.requests[name] for name in samples}
        tokens = {}
        for name, samples_one in samples.items():
            number, call_id = map(int, name.split("-"))
            request = requests[name]
            at = request.num_prompt_tokens + request.num_output_tokens
            tokens[name] = [self.text[number, call_id][at]] if samples_one else []
        self.update(output, tokens)
        for name in samples:
            if name not in self.scheduler.requests:
                self.finish(*map(int, name.split("-")), now)
        self.fill(now)

    def update(self, output, tokens: dict[str, list[int]]) -> None:
        """Tell the scheduler what a step has given."""
        from vllm.v1.outputs import ModelRunnerOutput

        places = {name: place for place, name in enumerate(tokens)}
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(list(tokens), places, list(tokens.values()))
        )

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


@pytest.mark.parametrize("place", range(len(golden.cells())))
def test_an_independent_driver_gets_the_golden_figures(place: int):
    """Steps, tokens, hits and the order of completion are the same, exactly."""
    cell, recorded = golden.cells()[place], golden.recorded()[place]
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

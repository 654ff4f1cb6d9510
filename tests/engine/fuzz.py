"""Random workloads on the pipeline harness, with invariants after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from autellix.server.channel import CallReport
from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, WrongRun, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.policy.config import parse_config

MODES = [(1, False), (1, True), (2, False), (2, True), (3, True)]
POLICIES = ["fcfs", "mlfq", "plas", "atlas", "adaptive", "adaptive"]


@dataclass
class Fuzz:
    """One workload: what came, what was aborted, and what must come out."""

    seed: int
    depth: int
    v2: bool
    rng: random.Random = field(init=False)
    pipeline: Pipeline = field(init=False)
    expected: list[tuple[str, int, int]] = field(default_factory=list)
    aborted: dict[str, int] = field(default_factory=dict)
    number: int = 0
    books: dict[str, float] = field(default_factory=dict)  # service by the rule, kept apart
    reports: list[CallReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.block = rng.choice([2, 4, 8])
        self.longest = rng.choice([24, 60, 120])
        blocks = rng.randint(-(-self.longest // self.block) + 2, 4 * self.longest // self.block)
        self.settings = {
            "policy": rng.choice(POLICIES),
            "level_bounds_s": sorted(rng.sample(range(1, 60), rng.randint(1, 6))),
            "beta": rng.choice([None, 0.5, 2.0, 8.0]),
            "order": rng.choice(["program", "call"]),
            "window_steps": rng.choice([1, 2, 4, 9]),
            "charge": rng.choice(["batch", "share"]),
            "cooldown_steps": rng.choice([0, 1, 4]),
            "skip_steps": rng.choice([0, 3, 64]),
        }
        self.pipeline = build_pipeline(
            AutellixScheduler,
            depth=self.depth,
            v2_runner=self.v2,
            slots=rng.choice([1, 2, 3, 6, 16]),
            kv_blocks=blocks,
            block_tokens=self.block,
            step_tokens=rng.choice([8, 16, 64, 512]) + 16,
            max_model_tokens=self.longest,
            prefix_caching=(cached := rng.random() < 0.7),
            drafts=rng.choice([0, 0, 2]),
            policy_config=self.settings,
            watermark=rng.choice([0.0, 0.05]),
        )
        self.cached = cached
        # As with a KV connector in async scheduling: freed blocks come back a step later.
        self.pipeline.scheduler.defer_block_free = self.depth > 1 and rng.random() < 0.3
        self.pipeline.step_s = lambda output: 0.2 + 0.01 * output.total_num_scheduled_tokens
        self.pipeline.after_step = lambda pipeline: self.check()
        self.keep_books()

    def keep_books(self) -> None:
        """Charge every call by the rule, in the plainest way, beside the scheduler.

        The duration of a step is its output's time less the later of the output before it and its
        own scheduling; each call in the batch is charged all of it, or its share by tokens.
        """
        scheduler, clock = self.pipeline.scheduler, self.pipeline.clock
        scheduler.accounts.on_report = self.reports.append
        schedule, update = scheduler.schedule, scheduler.update_from_output
        begun_s: list[float] = []
        last_s = 0.0

        def scheduled(*args: Any) -> Any:
            begun_s.append(clock.now_s())
            return schedule(*args)

        def updated(output: Any, model_output: Any) -> Any:
            nonlocal last_s
            seconds = clock.now_s() - max(last_s, begun_s.pop(0))
            last_s = clock.now_s()
            for name, tokens in output.num_scheduled_tokens.items():
                if name in scheduler.requests:
                    part = tokens / output.total_num_scheduled_tokens
                    share = part if self.settings["charge"] == "share" else 1.0
                    self.books[name] = self.books.get(name, 0.0) + seconds * share
            return update(output, model_output)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated

    def check_books(self) -> None:
        """Every call was reported once, with the service that the books say."""
        if sorted(r.request_id for r in self.reports) != sorted(name for name, *_ in self.expected):
            raise WrongRun("a call was not reported exactly once")
        for report in self.reports:
            service_s = self.books.get(report.request_id, 0.0)
            if abs(report.service_s - service_s) > 1e-6 * (1.0 + service_s):
                raise WrongRun(f"{report.request_id}: {report.service_s} s, not {service_s} s")

    def arrive(self) -> None:
        """Add a call: of a known program, a new one, or none; some share a prefix."""
        rng = self.rng
        self.number += 1
        name = f"call-{self.number}"
        prompt = rng.randint(1, max(1, self.longest // 2))
        answer = rng.randint(1, self.longest - prompt)
        program = rng.choice([None, *(f"program-{rng.randint(1, 8)}" for _ in range(4))])
        base = rng.choice([0, 1000 * self.number])
        self.pipeline.add(
            make_request(
                name,
                range(base, base + prompt),
                answer,
                block_tokens=self.block,
                session_id=program,
                priority=rng.choice([0, 0, rng.randint(0, 100_000)]),
                arrival_s=self.pipeline.clock.now_s(),
                prefix_caching=self.cached,
            )
        )
        self.expected.append((name, prompt, answer))

    def disturb(self) -> None:
        """Do one random thing besides a step."""
        rng, scheduler = self.rng, self.pipeline.scheduler
        dice = rng.random()
        if dice < 0.25:
            for _ in range(rng.choice([1, 1, 1, 4])):
                self.arrive()
        elif dice < 0.29 and scheduler.requests:
            name = rng.choice(sorted(scheduler.requests))
            self.aborted[name] = len(self.pipeline.tokens[name])
            self.pipeline.abort(name)
        elif dice < 0.295:
            settings = {**self.settings, "policy": rng.choice(POLICIES)}
            scheduler.set_policy(parse_config(settings))
        elif dice < 0.30:
            running = rng.random() < 0.5 and not scheduler.defer_block_free
            scheduler.reset_prefix_cache(reset_running_requests=running)
        elif dice < 0.32:
            self.pipeline.clock.advance(rng.random() * 20)

    def play(self, steps: int) -> None:
        """Play ``steps`` steps of trouble, then to the end, and check all answers."""
        scheduler = self.pipeline.scheduler
        while self.pipeline.steps < steps:
            if len(scheduler.requests) < 60:
                self.disturb()
            self.pipeline.step()
        self.pipeline.run()
        self.check()
        self.pipeline.check_tokens(c for c in self.expected if c[0] not in self.aborted)
        if missing := {name for name, *_ in self.expected} - set(self.pipeline.finished):
            raise WrongRun(f"lost: {sorted(missing)}")
        self.check_books()
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != scheduler.cache_config.num_gpu_blocks - 1:
            raise WrongRun(f"{free} blocks are free at the end")
        if scheduler.calls or len(scheduler.accounts) or len(scheduler.waiting):
            raise WrongRun("something of a call is left")
        rooms = getattr(scheduler.autellix, "running_set", None)
        if rooms is not None and (rooms.active or len(rooms)):
            raise WrongRun("a program without calls counts as active or stands at the door")
        clock = getattr(scheduler.autellix, "_clock", None)
        if clock is not None and len(clock):
            raise WrongRun("the promotion clock still watches a call")

    def check(self) -> None:
        """Check what holds after every step."""
        scheduler = self.pipeline.scheduler
        running = {r.request_id for r in scheduler.running}
        waiting = {r.request_id for r in scheduler.waiting}
        holding = {r.request_id for r in scheduler.kv_holding_waiting}
        if len(running) != len(scheduler.running) or running & waiting or holding:
            raise WrongRun("a call is twice in the queues")
        if running | waiting != set(scheduler.requests) or set(scheduler.calls) != set(
            scheduler.requests
        ):
            raise WrongRun(f"lost calls: {set(scheduler.requests) ^ (running | waiting)}")
        for name, call in scheduler.calls.items():
            if (call.waiting_since_s is not None) != (name in waiting):
                raise WrongRun(f"{name}: its wait is not what the queues say")
            if call.armed and name in running:
                raise WrongRun(f"{name} runs and is watched for starvation")
        if len(scheduler.waiting) != sum(
            scheduler.waiting.count(level) for level in range(1, scheduler.config.levels + 1)
        ):
            raise WrongRun("the level counts are wrong")

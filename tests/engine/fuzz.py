"""Random workloads on the pipeline harness, with invariants after every step."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, WrongRun, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.policy.config import parse_config

from .books import Books

MODES = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
POLICIES = ["fcfs", "mlfq", "plas", "atlas", "adaptive", "adaptive"]


def settings_of(rng: random.Random) -> dict[str, Any]:
    """Draw the settings of a policy, those of all others too."""
    kv_most = rng.choice([0.5, 0.8, 1.0])
    return {
        "policy": rng.choice(POLICIES),
        "level_bounds_s": sorted(rng.sample(range(1, 60), rng.randint(1, 6))),
        "beta": rng.choice([None, 0.5, 2.0, 8.0]),
        "order": rng.choice(["program", "call"]),
        "window_steps": rng.choice([1, 2, 4, 9]),
        "charge": rng.choice(["batch", "share"]),
        "cooldown_steps": rng.choice([0, 1, 4]),
        "skip_steps": rng.choice([0, 3, 64]),
        "ageing": rng.choice([0.0, 1.0, 8.0]),
        "displace": rng.choice([0.0, 0.5, 6.0]),
        "kv_most": kv_most,
        "kv_fill": rng.choice([0.3, 0.9, 1.0]) * kv_most,
        "elders": rng.choice([0.0, 0.25, 0.9]),
        "keep_gaps": rng.choice([True, False]),
    }


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
    books: Books = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.block = rng.choice([2, 4, 8])
        self.longest = rng.choice([24, 60, 120])
        blocks = rng.randint(-(-self.longest // self.block) + 2, 4 * self.longest // self.block)
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
            policy_config=settings_of(rng),
            watermark=rng.choice([0.0, 0.05]),
        )
        self.cached = cached
        # As with a KV connector in async scheduling: freed blocks come back a step later.
        self.pipeline.scheduler.defer_block_free = self.depth > 1 and rng.random() < 0.3
        self.pipeline.step_s = lambda output: 0.2 + 0.01 * output.total_num_scheduled_tokens
        self.pipeline.after_step = lambda pipeline: self.check()
        self.books = Books(self.pipeline)
        schedule = self.pipeline.scheduler.schedule

        def scheduled(*args: Any) -> Any:
            output = schedule(*args)
            self.check_blocks()
            return output

        self.pipeline.scheduler.schedule = scheduled

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
            scheduler.set_policy(parse_config(settings_of(rng)))
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
        self.books.check([name for name, *_ in self.expected])
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
        self.check_blocks()

    def check_blocks(self) -> None:
        """Every block is free, held by the calls that it is counted for, or on its way back."""
        scheduler = self.pipeline.scheduler
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        held: Counter[int] = Counter()
        for name in scheduler.requests:
            held.update(manager.get_block_ids(name)[0])
        for _, blocks in scheduler.deferred_frees:
            held.update(block.block_id for block in blocks)
        del held[pool.null_block.block_id]
        free = pool.get_num_free_blocks()
        if free + len(held) + 1 != pool.num_gpu_blocks:
            raise WrongRun(f"{free} free + {len(held)} held + 1 null is not {pool.num_gpu_blocks}")
        for block_id, count in held.items():
            if pool.blocks[block_id].ref_cnt != count:
                counted = pool.blocks[block_id].ref_cnt
                raise WrongRun(f"block {block_id} is held {count} times, counted {counted}")

"""Runs a real vLLM engine in this process and preempts its calls by force; prints what happened.

A program of its own (``python -m tests.engine.forced_preemption``), for vLLM keeps global state.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.llm_engine import LLMEngine

from autellix.server.engine.connector import find_swap
from autellix.server.engine.connector_config import swap_transfer_config

ROUNDS_WARM = 3  # from then on memory should stand still


class ForcedPreemption(AsyncScheduler):
    """Preempts random running calls; vLLM's own victims are swapped too."""

    every_steps = 0  # 0: never by force
    forced_max = 0
    victims = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.swap = find_swap(self.connector)
        self.random = random.Random(1)
        self.steps = self.forced = self.preemptions = self.computed = self.recomputed = 0
        self.lost: dict[str, int] = {}  # tokens that a preempted call had computed

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.every_steps and self.steps % self.every_steps == 0:
            for _ in range(self.victims):
                if self.running and self.forced < self.forced_max:
                    self._force()
        output = super().schedule(*args, **kwargs)
        self._count(output)
        if self.swap is not None and self.swap.ledger is not None:
            self.swap.ledger.pool.check_integrity()
        return output

    def _force(self) -> None:
        victim = self.random.choice(self.running)
        self.running.remove(victim)
        self._preempt_request(victim, time.monotonic())
        # It may run again in this very step; vLLM's first runner must then be told all of its
        # tokens anew.
        self.prev_step_scheduled_req_ids.discard(victim.request_id)
        if self.random.random() < 0.5:  # it stays away for a while
            self.waiting.remove_request(victim)
            self.waiting.add_request(victim)
        self.forced += 1

    def _count(self, output: Any) -> None:
        """Count what is computed, and what is computed again after a preemption."""
        self.computed += output.total_num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in self.lost and name in output.num_scheduled_tokens:
                self.recomputed += max(0, self.lost.pop(name) - start)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        self.lost[request.request_id] = min(request.num_computed_tokens, request.num_tokens)
        if self.swap is not None:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self.swap.swap_out(request, blocks, request.num_computed_tokens)
        super()._preempt_request(request, *args, **kwargs)


def run_calls(
    engine: LLMEngine, name: str, prompts: list[list[int]], tokens: int, abort_share: float
) -> dict[int, list[tuple[int, float]]]:
    """Run all prompts; return each finished call's tokens with the gap to the second best."""
    rng = random.Random(2)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, params)
    doomed = [i for i in range(len(prompts)) if rng.random() < abort_share]
    done: dict[int, list[tuple[int, float]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id.split("-")[1])
            if output.finished:
                done[index] = [
                    (token, _gap(entry))
                    for token, entry in zip(
                        output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                    )
                ]
        if doomed and rng.random() < 0.05:
            engine.abort_request([f"{name}-{doomed.pop()}"])
    return done


def _gap(entry: dict[int, Any]) -> float:
    best = sorted((p.logprob for p in entry.values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


def compare(wanted: dict[int, Any], got: dict[int, Any]) -> tuple[int, list[float]]:
    """Return how many calls were compared, and the top-2 gap at each first difference."""
    gaps = []
    both = sorted(wanted.keys() & got.keys())
    for index in both:
        for (token, gap), (other, _) in zip(wanted[index], got[index], strict=True):
            if token != other:
                gaps.append(gap)
                break
    return len(both), gaps


def main() -> None:
    """Run once without and once with forced preemptions; print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--pool-blocks", type=int, default=64, help="0: no connector")
    parser.add_argument("--preemptions", type=int, default=30)
    parser.add_argument("--seconds", type=float, help="go on for so long, however many there are")
    parser.add_argument("--every-steps", type=int, default=3)
    parser.add_argument("--victims", type=int, default=1, help="of one step")
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--kv-blocks", type=int, default=64)
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--abort-share", type=float, default=0.25)
    parser.add_argument("--no-prefix-cache", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    transfer: Any = None
    if args.pool_blocks:
        block_bytes = _block_bytes(args.model)
        transfer = swap_transfer_config(args.pool_blocks * block_bytes, threads=2, always=True)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=args.model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            block_size=32,
            max_num_seqs=args.slots,
            num_gpu_blocks_override=args.kv_blocks,
            gpu_memory_utilization=0.3,
            enable_prefix_caching=not args.no_prefix_cache,
            scheduler_cls=ForcedPreemption,
            kv_transfer_config=transfer,
            disable_log_stats=True,
        )
    )
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    rng = random.Random(0)
    shared = [rng.randrange(10, 200) for _ in range(70)]
    prompts = [
        (shared if i % 2 else []) + [rng.randrange(10, 200) for _ in range(rng.randrange(5, 90))]
        for i in range(args.calls)
    ]
    wanted = run_calls(engine, "plain", prompts, args.tokens, 0.0)
    undisturbed = scheduler.preemptions
    engine.reset_prefix_cache()
    endless = args.seconds is not None
    scheduler.every_steps = args.every_steps
    scheduler.forced_max = sys.maxsize if endless else args.preemptions
    scheduler.victims = args.victims
    start_computed, start_steps = scheduler.computed, scheduler.steps
    got: dict[int, Any] = {}
    compared, gaps, rounds, first_mib = 0, [], 0, 0
    start_s = time.perf_counter()
    while (
        time.perf_counter() - start_s < args.seconds
        if endless
        else scheduler.forced < args.preemptions and rounds < 100
    ):
        rounds += 1
        got = run_calls(engine, f"forced{rounds}", prompts, args.tokens, args.abort_share)
        count, more = compare(wanted, got)
        compared += count
        gaps += more
        if rounds == ROUNDS_WARM:
            first_mib = _resident_mib()
    swap = scheduler.swap
    ledger = swap.ledger if swap is not None else None
    report = {
        "calls": compared,
        "rounds": rounds,
        "resident_mib": [first_mib, _resident_mib()],
        "differences": gaps,
        "undisturbed_preemptions": undisturbed,
        "forced": scheduler.forced,
        "preemptions": scheduler.preemptions,
        "computed_tokens": scheduler.computed - start_computed,
        "recomputed_tokens": scheduler.recomputed,
        "steps": scheduler.steps - start_steps,
        "seconds": time.perf_counter() - start_s,
        "refusal": swap.refusal if swap is not None else None,
        "counts": swap.counts.as_dict() if swap is not None else None,
        "speeds": list(ledger.speeds) if ledger is not None else None,
        "free_slots": ledger.pool.free_count if ledger is not None else 0,
        "owners": ledger.pool.owner_count if ledger is not None else 0,
        "saved": ledger.saved_count if ledger is not None else 0,
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }
    sys.stdout.write("\nREPORT " + json.dumps(report) + "\n")
    sys.stdout.flush()
    engine.engine_core.shutdown()


def _resident_mib() -> int:
    """Return the resident memory of this process."""
    from pathlib import Path

    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _block_bytes(model: str) -> int:
    """Return the bytes of a block of 32 tokens in float32, by the model's own configuration."""
    from pathlib import Path

    config = json.loads((Path(model) / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    return int(config["num_hidden_layers"] * 2 * heads * head * 32 * 4)


if __name__ == "__main__":
    main()

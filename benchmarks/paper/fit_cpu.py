"""Fit the profile ``this-cpu-smollm2`` to this machine: time real steps of vLLM, print the TOML.

The model runs in vLLM's worker process, on one core, with one thread; the engine core in this one,
on another. So a step takes what it takes in a live engine: the model, the messages between the two
processes, and what the one that waits in a loop takes from the other. Steps are timed by the wall
clock, so run this on a machine that does nothing else. Batches of several sizes, prompt lengths and
contexts make the steps differ.

    python -m benchmarks.paper.fit_cpu --model models/smollm2
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

BLOCK_TOKENS = 128
SLOTS = 8
CHUNK_TOKENS = 512
CONTEXT_TOKENS = 8192
KV_TOKENS = 20_480
ROUNDS = (
    (1, 16, 24),
    (1, 400, 16),
    (2, 900, 16),
    (2, 16, 24),
    (3, 16, 24),
    (4, 64, 24),
    (8, 16, 24),
    (8, 500, 12),
    (1, 4000, 12),
)


def measure(model: str) -> list[tuple[Any, float]]:
    """Return (work, seconds) of every step."""
    from vllm import LLM, SamplingParams

    from autellix.server.lab.cost_model import Work

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=CHUNK_TOKENS,
        block_size=BLOCK_TOKENS,
        disable_log_stats=True,
        distributed_executor_backend="mp",
    )
    core = llm.llm_engine.engine_core.engine_core
    scheduler, inner = core.scheduler, core.step_fn
    steps: list[tuple[Any, float]] = []
    last: list[Any] = []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = plain_schedule(*args, **kwargs)
        context = pairs = 0
        for request_id, count in output.num_scheduled_tokens.items():
            end = scheduler.requests[request_id].num_computed_tokens
            context += end
            pairs += count * (end - count // 2)
        calls = len(output.num_scheduled_tokens)
        last[:] = [Work(output.total_num_scheduled_tokens, context, pairs, calls)]
        return output

    def step() -> Any:
        began_s = time.perf_counter()
        result = inner()
        if last and last[0].tokens:
            steps.append((last.pop(), time.perf_counter() - began_s))
        return result

    plain_schedule = scheduler.schedule
    scheduler.schedule = schedule
    core.step_fn = step
    for place, (calls, prompt, output) in enumerate(ROUNDS):
        prompts = [
            {
                "prompt_token_ids": [
                    1000 + (place * 8191 + n * 977 + k) % 40000 for k in range(prompt)
                ]
            }
            for n in range(calls)
        ]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        llm.generate(prompts, params, use_tqdm=False)
    return steps


def modelled_s(fitted: dict[str, float], work: Any) -> float:
    """Return the step that the fit gives for this work."""
    return (
        fitted["gap_s"]
        + fitted["flop_s_per_token"] * work.tokens
        + fitted["kv_s_per_token"] * work.context_tokens
        + fitted["attention_s_per_pair"] * work.pairs
        + fitted["per_call_s"] * work.calls
    )


def main() -> None:
    """Measure, fit, print; how well each shape of step is met goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--core", type=int, default=0, help="the model's")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {arguments.core})
    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND=str(arguments.core),
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    from autellix.server.lab.cost_model import fit_linear

    steps = measure(arguments.model)[3:]
    fitted = fit_linear(steps)
    ratios = [step_s / modelled_s(fitted, work) for work, step_s in steps]
    errors = sorted(abs(1 / ratio - 1) for ratio in ratios)
    shapes: dict[tuple[int, int], list[float]] = {}
    for (work, _), ratio in zip(steps, ratios, strict=True):
        shapes.setdefault((work.calls, work.tokens), []).append(ratio)
    for (calls, tokens), some in sorted(shapes.items()):
        print(f"{calls} calls, {tokens:4} tokens, {len(some):3} steps: measured ÷ model "
              f"{statistics.median(some):.3f}", file=sys.stderr)  # fmt: skip
    print(f"# {len(steps)} steps; relative error median {errors[len(errors) // 2]:.3f}, "
          f"p95 {errors[int(len(errors) * 0.95)]:.3f}")  # fmt: skip
    print('form = "linear"\n\n[model]\nkv_bytes_per_token = 46080\n\n[linear]\nweight_s = 0.0')
    for name in ("kv_s_per_token", "flop_s_per_token", "attention_s_per_pair"):
        print(f"{name} = {fitted[name]:.4e}")
    print(f"swap_s_per_byte = 2.0e-10\n\n[host]\ngap_s = {fitted['gap_s']:.4e}")
    print(f"schedule_fixed_s = 0.0\nschedule_per_call_s = {fitted['per_call_s']:.4e}")
    print("turnaround_s = 0.02  # an estimate, not fitted: HTTP, gateway, client\n\n[engine]")
    print(f"kv_tokens = {KV_TOKENS}\nblock_tokens = {BLOCK_TOKENS}\nslots = {SLOTS}")
    print(f"chunk_tokens = {CHUNK_TOKENS}\ncontext_tokens_max = 8192\nbatches_in_flight = 1")


if __name__ == "__main__":
    main()

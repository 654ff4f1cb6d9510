"""Fit the profile ``this-cpu-smollm2`` to this machine: time real steps of vLLM, print the TOML.

One vLLM engine runs in this process, pinned to one core, with one thread. Every step is timed by
the CPU seconds of the process, which on one core with one thread is what the step takes on a
machine that does nothing else; wall seconds are printed beside it. Batches of several sizes, prompt
lengths and contexts make the steps differ.

    python -m benchmarks.paper.fit_cpu --model models/smollm2
"""

from __future__ import annotations

import argparse
import os
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
    (4, 64, 24),
    (8, 16, 24),
    (8, 500, 12),
    (1, 4000, 16),
    (2, 6000, 12),
)


def measure(model: str) -> list[tuple[Any, float, float]]:
    """Return (work, CPU seconds, wall seconds) of every step."""
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
    )
    core = llm.llm_engine.engine_core.engine_core
    scheduler, inner = core.scheduler, core.step_fn
    steps: list[tuple[Any, float, float]] = []
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
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        result = inner()
        if last and last[0].tokens:
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            steps.append((last.pop(), cpu_s, wall_s))
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


def main() -> None:
    """Measure, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})
    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND=str(arguments.core),
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
    )  # fmt: skip
    from autellix.server.lab.cost_model import fit_linear

    steps = measure(arguments.model)[3:]
    fitted = fit_linear([(work, cpu_s) for work, cpu_s, _ in steps])
    errors = []
    for work, cpu_s, _ in steps:
        model_s = fitted["gap_s"] + fitted["flop_s_per_token"] * work.tokens
        model_s += fitted["kv_s_per_token"] * work.context_tokens
        model_s += fitted["attention_s_per_pair"] * work.pairs + fitted["per_call_s"] * work.calls
        errors.append(abs(model_s - cpu_s) / cpu_s)
    errors.sort()
    wall = sum(w for _, _, w in steps) / sum(c for _, c, _ in steps)
    print(f"# {len(steps)} steps; relative error median {errors[len(errors) // 2]:.3f}, "
          f"p95 {errors[int(len(errors) * 0.95)]:.3f}; wall ÷ CPU seconds {wall:.2f}")  # fmt: skip
    print('form = "linear"\n\n[model]\nkv_bytes_per_token = 46080\n\n[linear]\nweight_s = 0.0')
    for name in ("kv_s_per_token", "flop_s_per_token", "attention_s_per_pair"):
        print(f"{name} = {fitted[name]:.4e}")
    print(f"swap_s_per_byte = 2.0e-10\n\n[host]\ngap_s = {fitted['gap_s']:.4e}")
    print(f"schedule_fixed_s = 0.0\nschedule_per_call_s = {fitted['per_call_s']:.4e}\n\n[engine]")
    print(f"kv_tokens = {KV_TOKENS}\nblock_tokens = {BLOCK_TOKENS}\nslots = {SLOTS}")
    print(f"chunk_tokens = {CHUNK_TOKENS}\ncontext_tokens_max = 8192\nbatches_in_flight = 1")


if __name__ == "__main__":
    main()

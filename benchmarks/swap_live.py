"""Live: an engine short of KV, its victims recomputed, offloaded by vLLM, or swapped by us.

    python -m benchmarks.swap_live --model models/smollm2

Programs of several calls, each call with the answers before it in its prompt, run on one real
engine after the other: the same programs, the same KV, the same scheduler; only what becomes of a
preempted call differs. It shows what the swap is for: recomputed tokens at most 0.1 × those of
recomputing, and a shorter mean program. The prompts are short and the answers long, so that more
calls begin than can be held to their end. The arms take turns, and each one's median counts. An arm
that does not start here says why.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

ARMS = ("recompute", "native", "swap")
RECOMPUTED_SHARE_MAX = 0.1
PROMPT_TOKENS = (20, 60)


def run_arm(args: argparse.Namespace) -> dict[str, Any]:
    """Run all programs on an engine in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from autellix.server.engine.connector_config import swap_transfer_config
    from tests.engine.forced_preemption import ForcedPreemption

    options: dict[str, Any] = {}
    if args.arm == "swap":
        options["kv_transfer_config"] = swap_transfer_config(args.pool_mib << 20, threads=2)
    elif args.arm == "native":
        options["kv_offloading_size"] = args.pool_mib / 1024
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
            scheduler_cls=ForcedPreemption,
            disable_log_stats=True,
            **options,
        )
    )
    scheduler: Any = engine.engine_core.engine_core.scheduler
    rng = random.Random(args.seed)
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    contexts = {
        p: [rng.randrange(100, 40_000) for _ in range(rng.randrange(*PROMPT_TOKENS))]
        for p in range(args.programs)
    }
    calls_left = dict.fromkeys(contexts, args.calls)
    for program, context in contexts.items():
        engine.add_request(f"{program}-0", {"prompt_token_ids": list(context)}, params)
    start_s = time.perf_counter()
    ends: dict[int, float] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            program = int(output.request_id.split("-")[0])
            contexts[program] += output.outputs[0].token_ids
            calls_left[program] -= 1
            if calls_left[program]:
                contexts[program] += [rng.randrange(100, 40_000) for _ in range(8)]
                name = f"{program}-{calls_left[program]}"
                engine.add_request(name, {"prompt_token_ids": list(contexts[program])}, params)
            else:
                ends[program] = time.perf_counter() - start_s
    report = {
        "preemptions": scheduler.preemptions,
        "computed_tokens": scheduler.computed,
        "recomputed_tokens": scheduler.recomputed,
        "mean_program_s": statistics.mean(ends.values()),
        "total_s": max(ends.values()),
        "counts": scheduler.swap.counts.as_dict() if scheduler.swap is not None else None,
    }
    engine.engine_core.shutdown()
    return report


def spawn_arm(arm: str, rest: list[str]) -> dict[str, Any] | str:
    """Return an arm's report, or why there is none."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.swap_live", *rest, "--arm", arm],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
            return report
    causes = [
        line for line in done.stderr.splitlines() if "Error: " in line or "Exception: " in line
    ]
    return causes[0].rpartition("]: ")[2] if causes else f"exit status {done.returncode}"


def median_arm(arm: str, rounds: list[dict[str, dict[str, Any] | str]]) -> dict[str, Any] | str:
    """Return an arm's report of the round with its median mean program, or why there is none."""
    reports = [reports[arm] for reports in rounds]
    ran = [report for report in reports if not isinstance(report, str)]
    if len(ran) < len(reports):
        return next(report for report in reports if isinstance(report, str))
    return sorted(ran, key=lambda report: report["mean_program_s"])[(len(ran) - 1) // 2]


def main() -> None:
    """Run the arms, print figures and ratios; exit 1 if swapping does not pay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--programs", type=int, default=8)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--kv-blocks", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3, help="of all arms in turn")
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.arm is not None:
        sys.stdout.write("\nREPORT " + json.dumps(run_arm(args)) + "\n")
        sys.stdout.flush()
        return
    rounds = [{arm: spawn_arm(arm, sys.argv[1:]) for arm in ARMS} for _ in range(args.rounds)]
    reports = {arm: median_arm(arm, rounds) for arm in ARMS}
    print(f"{'arm':>10} {'preempted':>10} {'computed':>9} {'recomputed':>11} {'mean program':>13}")
    for arm, report in reports.items():
        if isinstance(report, str):
            print(f"{arm:>10} does not run here: {report}")
        else:
            figures = [report[k] for k in ("preemptions", "computed_tokens", "recomputed_tokens")]
            print("{:>10} {:>10} {:>9} {:>11} {:>11.1f} s".format(
                arm, *figures, report["mean_program_s"]))  # fmt: skip
    base, ours = reports["recompute"], reports["swap"]
    if isinstance(base, str) or isinstance(ours, str):
        raise SystemExit("an arm that must run did not")
    print(f"swap: {ours['counts']}")
    share = ours["recomputed_tokens"] / max(1, base["recomputed_tokens"])
    ratio = ours["mean_program_s"] / base["mean_program_s"]
    print(f"swap ÷ recompute: recomputed tokens {share:.3f}, mean program {ratio:.3f}")
    raise SystemExit(0 if share <= RECOMPUTED_SHARE_MAX and ratio < 1 else 1)


if __name__ == "__main__":
    main()

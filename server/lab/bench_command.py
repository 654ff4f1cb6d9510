"""``autellix bench``: a trace against live servers, the arms interleaved in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from . import cost_model, metrics, serve_arms, trace, workload
from .replay import Replay, ReplayedProgram, Target
from .simulate_command import document
from .workload import WAIT_CAP_S, Waits


def main(argv: Sequence[str]) -> int:
    """Run ``autellix bench``; status 1 if a call was lost.

    Raises:
        TraceError, ProfileError: an argument names nothing.
    """
    arguments = _parser().parse_args(argv)
    profile = cost_model.load(arguments.profile)
    programs = workload.fitting(trace.load(arguments.trace), arguments.context)
    if arguments.tokens_max:
        programs = tuple(p for p in programs if p.largest_tokens <= arguments.tokens_max)
    with contextlib.ExitStack() as stack:
        targets = [_target(text, arguments) for text in arguments.url]
        if arguments.serve:
            servers = serve_arms.started(arguments.serve, arguments.model_path, arguments.vllm)
            targets += stack.enter_context(servers)
        if not targets:
            sys.stderr.write("autellix bench: give --url NAME=URL or --serve POLICY,...\n")
            return 2
        results = list(_rounds(arguments, targets, programs, profile))
    for result in results:
        sys.stdout.write(_line(result))
    if arguments.json:
        arguments.json.write_text(document(results), encoding="utf-8")
    lost = [text for result in results for text in result["lost_calls"]]
    for text in lost[:20]:
        sys.stderr.write(f"lost: {text}\n")
    if lost:
        sys.stderr.write(f"autellix bench: {len(lost)} calls were lost: no result\n")
    return 1 if lost else 0


def _rounds(
    arguments: argparse.Namespace,
    targets: Sequence[Target],
    programs: Sequence[trace.Program],
    profile: cost_model.Profile,
) -> Iterator[dict[str, Any]]:
    """Yield one result per round and arm; in every other round the arms go in reverse."""
    cuts = workload.size_classes(programs)
    for place in range(arguments.rounds):
        seed = arguments.seed + place
        arrivals = list(
            islice(
                workload.poisson(programs, arguments.rate, float("inf"), seed), arguments.programs
            )
        )
        waits = Waits(null=arguments.null_waits, scale=arguments.wait_scale, cap_s=WAIT_CAP_S,
                      seed=seed)  # fmt: skip
        for target in targets if place % 2 == 0 else list(reversed(targets)):
            calls = sum(len(a.program.calls) for a in arrivals)
            with _progress(f"round {place + 1}, {target.name}", calls) as tick:
                replay = Replay(target, profile, waits, progress=tick, seed=seed)
                done = asyncio.run(replay.run(arrivals))
            yield {**_result(arguments, target, seed, done, cuts), "waits": asdict(waits)}


def _result(
    arguments: argparse.Namespace,
    target: Target,
    seed: int,
    done: Sequence[ReplayedProgram],
    cuts: Sequence[float],
) -> dict[str, Any]:
    now_s = max((p.ended_s or p.arrival_s) for p in done)
    tokens = sum(p.generated_tokens for p in done if p.ended_s)
    figures = metrics.program_figures(done, now_s, cuts)  # type: ignore[arg-type]
    for some in (figures, *figures["by_size"]):  # what is seen from outside is no wait
        if "wait_share" in some:
            some["first_token_share"] = some.pop("wait_share")
    return {
        "trace": arguments.trace,
        "arm": target.name,
        "profile": "live",
        "mode": "open",
        "rate_per_s": arguments.rate,
        "seed": seed,
        "tokens_max": min(arguments.context, arguments.tokens_max or arguments.context),
        **figures,
        "makespan_s": metrics.rounded(now_s),
        "programs_per_s": metrics.rounded(len(done) / now_s),
        "output_tokens_per_s": metrics.rounded(tokens / now_s),
        "call": {"first_token_s": metrics.spread([s for p in done for s in p.first_token_s])},
        "engine": {
            "prefix_hit_share": metrics.rounded(
                sum(p.hit_tokens for p in done) / max(1, sum(p.prompt_tokens for p in done))
            )
        },
        "lost_calls": [text for p in done for text in p.lost_calls],
    }


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _target(text: str, arguments: argparse.Namespace) -> Target:
    name, equals, url = text.partition("=")
    if not equals or not url.startswith("http"):
        raise argparse.ArgumentTypeError(f"--url {text!r}: write NAME=http://host:port/v1")
    return Target(
        name=name,
        url=url,
        model=arguments.model,
        api_key=arguments.api_key,
        vocabulary=arguments.vocabulary,
        exact=not arguments.words,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="autellix bench", description=__doc__)
    add = parser.add_argument
    add("--trace", required=True, help="a set's name or a file")
    add("--url", action="append", default=[], metavar="NAME=URL", help="a live server, as an arm")
    add("--serve", type=lambda t: t.split(","), default=[], metavar="POLICY,...",
        help="start autellix serve once per policy; each is an arm")  # fmt: skip
    add("--model", default="smollm2", help="the model's name at the servers")
    add("--model-path", default="smollm2", help="what --serve serves")
    add("--vllm", default="", help="more vLLM arguments for --serve, in one string")
    add("--api-key", default="none")
    add("--vocabulary", type=int, default=49152, help="of the model")
    add("--words", action="store_true", help="no vLLM: send words to the chat endpoint")
    add("--rate", type=float, default=1.0, help="programs per second")
    add("--programs", type=int, default=16, help="in each round and arm")
    add("--rounds", type=int, default=1, help="the arms take turns in each")
    add("--context", type=int, default=8192, help="the servers' longest context in tokens")
    add("--tokens-max", type=int, help="only programs whose largest call has at most so many")
    add("--seed", type=int, default=0)
    add("--null-waits", choices=("zero", "drawn"), default="zero")
    add("--wait-scale", type=float, default=1.0)
    add("--profile", default="this-cpu-smollm2", help="gives the time alone, for slowdown; another "
        "machine's is what python -m benchmarks.paper.fit_cpu prints there")  # fmt: skip
    add("--json", type=Path, metavar="OUT")
    return parser


def _line(result: dict[str, Any]) -> str:
    token = result["token_latency_s"]
    return (
        f"{result['arm']:14} seed {result['seed']} programs {result['programs']} "
        f"unfinished {result['unfinished']} token latency mean {token['mean'] * 1e3:.1f} ms "
        f"p95 {token['p95'] * 1e3:.1f} ms response {result['response_s']['mean']:.2f} s "
        f"slowdown {result['slowdown']['mean']:.2f} hits "
        f"{result['engine']['prefix_hit_share']:.2f} tokens/s "
        f"{result['output_tokens_per_s']:.1f}\n"
    )

"""``autellix trace``: what sets there are, whether a file is sound, what is in it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import trace


def main(argv: Sequence[str]) -> int:
    """Run ``autellix trace list|check``.

    Raises:
        TraceError: a file is wrong.
    """
    parser = argparse.ArgumentParser(prog="autellix trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the sets that ship, with their means per call")
    check = commands.add_parser("check", help="check a set or a file and print its means")
    check.add_argument("trace", nargs="+", help="a set's name or a .jsonl[.xz|.gz] file")
    arguments = parser.parse_args(argv)
    wanted = trace.names() if arguments.command == "list" else arguments.trace
    sys.stdout.write(
        f"{'set':24}{'programs':>9}{'calls/program':>14}{'max':>6}"
        f"{'prompt':>9}{'new':>8}{'output':>8}{'shared':>8}\n"
    )
    for name in wanted:
        sys.stdout.write(_line(name, trace.load(name)))
    return 0


def _line(name: str, programs: Sequence[trace.Program]) -> str:
    calls = [call for program in programs for call in program.calls]
    prompt = sum(call.prompt_tokens for call in calls)
    new = prompt - sum(call.prefix_tokens for call in calls)
    output = sum(call.output_tokens for call in calls)
    count = len(calls)
    return (
        f"{name:24}{len(programs):9d}{count / len(programs):14.2f}"
        f"{max(len(p.calls) for p in programs):6d}{prompt / count:9.0f}{new / count:8.0f}"
        f"{output / count:8.0f}{1 - new / prompt:8.2f}\n"
    )

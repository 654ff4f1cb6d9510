"""``autellix trace``: what sets there are, whether a file is sound, and recording new ones."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import record, trace
from .recorder import Recorder, save, serve, unnoted


def main(argv: Sequence[str]) -> int:
    """Run ``autellix trace list|check|import|record``.

    Returns:
        0, or 1 if calls were relayed whose counts are not known.

    Raises:
        TraceError: a file is wrong, ``--out`` names a folder that is not there, or ``--port`` is
            taken.
    """
    parser = argparse.ArgumentParser(prog="autellix trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the sets that ship, with their means per call")
    check = commands.add_parser("check", help="check a set or a file and print its means")
    check.add_argument("trace", nargs="+", help="a set's name or a .jsonl[.xz|.gz] file")
    take = commands.add_parser("import", help="make a trace of a log of calls")
    take.add_argument("rows", type=Path, help="JSON Lines: " + ", ".join(record.Row._fields))
    relay = commands.add_parser("record", help="relay to a running server and note its calls")
    relay.add_argument("--upstream", required=True, help="the server, http://host:port")
    relay.add_argument("--port", type=int, default=8001, help="where clients go instead")
    for command in (take, relay):
        command.add_argument("--out", type=Path, required=True, help="a .jsonl[.xz|.gz] file")
        command.add_argument("--kind", choices=trace.KINDS, default="react")
    arguments = parser.parse_args(argv)
    if arguments.command in ("import", "record") and not arguments.out.parent.is_dir():
        raise trace.TraceError(f"--out {arguments.out}: there is no such folder")
    if arguments.command == "import":
        rows = list(record.read_rows(trace.lines_of(arguments.rows), arguments.rows.name))
        count = trace.write(record.programs(rows, "imported", arguments.kind), arguments.out)
        sys.stdout.write(f"{count} programs, {len(rows)} calls\n")
        return 0
    if arguments.command == "record":
        return _record(arguments)
    wanted = trace.names() if arguments.command == "list" else arguments.trace
    sys.stdout.write(
        f"{'set':24}{'programs':>9}{'calls/program':>14}{'max':>6}"
        f"{'prompt':>9}{'new':>8}{'output':>8}{'shared':>8}\n"
    )
    for name in wanted:
        sys.stdout.write(_line(name, trace.load(name)))
    return 0


def _record(arguments: argparse.Namespace) -> int:
    """Relay until Ctrl-C or SIGTERM, then write the trace and say what is missing in it."""
    recorder = Recorder(arguments.upstream)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        sys.stderr.write(f"recording on http://127.0.0.1:{arguments.port}; Ctrl-C ends\n")
        await serve(recorder, arguments.port, stop)

    try:
        asyncio.run(run())
    except OSError as error:
        raise trace.TraceError(f"--port {arguments.port}: {error.strerror}") from None
    count = save(recorder, arguments.out, arguments.kind)
    sys.stdout.write(f"{count} programs, {len(recorder.rows)} calls\n")
    sys.stdout.write(unnoted(recorder))
    if not recorder.skipped:
        return 0
    sys.stderr.write("what follows such a call in its program has wrong parents and waits\n")
    return 1


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

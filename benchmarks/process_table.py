"""How long the process table's operations take at 100,000 programs: p50, p99 and the worst.

python -m benchmarks.process_table
"""

from __future__ import annotations

import argparse
import random
import time

from autellix.server.channel import CallReport
from autellix.server.gateway.garbage import rare_collections
from autellix.server.process_table import ProcessTable, program_id_of
from autellix.server.program import Arrival

GATE_US = 100.0


def report_of(call_id: str, number: int) -> CallReport:
    """Return an engine's report."""
    return CallReport(
        seq=number, call_id=call_id, program_id=None, request_id=f"chatcmpl-{call_id}",
        reason="stop", service_s=0.01, wait_s=0.001, preemptions=0, swaps=0, prompt_tokens=100,
        hit_tokens=50, output_tokens=20, level=0,
    )  # fmt: skip


def main() -> int:
    """Run the benchmark with the gateway's settings of the garbage collector."""
    with rare_collections():
        return run()


def run() -> int:
    """Run the benchmark; return 1 if the gate does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument(
        "--cpu", action="store_true", help="count the time of this thread only, on a busy machine"
    )
    parser.add_argument("--rounds", type=int, default=50_000)
    options = parser.parse_args()
    clock_s = time.thread_time if options.cpu else time.perf_counter
    table = ProcessTable(programs_max=options.programs)
    for number in range(options.programs):
        table.open_program("", f"run-{number}", 0.0)
    chance = random.Random(1)
    times: dict[str, list[float]] = {}

    def timed(what: str, start_s: float) -> None:
        times.setdefault(what, []).append(clock_s() - start_s)

    for number in range(options.rounds):
        now_s = number * 1e-4
        session = f"run-{chance.randrange(options.programs)}"
        arrival = Arrival("", session, thread=0, client_call=f"c{number}")
        start_s = clock_s()
        call, _ = table.begin_call(arrival, f"{number:08x}", now_s)
        timed("begin", start_s)
        start_s = clock_s()
        table.dispatch(call, "e0")
        timed("dispatch", start_s)
        start_s = clock_s()
        table.end_call(call, now_s + 0.01)
        timed("end", start_s)
        report = report_of(call.call_id, number)
        start_s = clock_s()
        table.fold_report("e0", "b", report, now_s)
        timed("report", start_s)
        program_id = program_id_of("", session)
        start_s = clock_s()
        table.renew(program_id, now_s)
        timed("renew", start_s)
        new = Arrival("", None)  # evicts, as the table is full
        start_s = clock_s()
        call, _ = table.begin_call(new, f"{number + (1 << 28):08x}", now_s)
        timed("begin, table full", start_s)
        table.end_call(call, now_s)
        if number % 1000 == 0:
            start_s = clock_s()
            table.sweep(now_s)
            timed("sweep", start_s)
    worst_us = 0.0
    for what, taken in times.items():
        taken.sort()
        p99_us = taken[int(len(taken) * 0.99)] * 1e6
        if what != "sweep":
            worst_us = max(worst_us, p99_us)
        print(f"{what:18} p50 {taken[len(taken) // 2] * 1e6:7.1f} µs   p99 {p99_us:7.1f} µs   "
              f"worst {taken[-1] * 1e6:9.1f} µs   n {len(taken)}")  # fmt: skip
    print(
        f"programs {len(table)}, worst p99 {worst_us:.1f} µs, gate {GATE_US:g} µs, "
        f"{worst_us / GATE_US:.2f} of it, integrity {table.check_integrity() or 'holds'}"
    )
    return 0 if worst_us <= GATE_US else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A process that makes calls, journals them and says what it has charged, until it is killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from autellix.server.clock import SystemClock
from autellix.server.gateway.journal import Journal
from autellix.server.process_table import ProcessTable
from autellix.server.program import Arrival


def say(line: str) -> None:
    """Write a line that the test can read at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main(path: Path) -> None:
    """Three programs with calls one after the other, 10 to 30 ms each, and one long call."""
    clock = SystemClock()
    table = ProcessTable(now_s=clock.now_s())
    journal = Journal(path, table, clock)
    say(f"restored {await journal.restore()}")
    writer = asyncio.create_task(journal.run())
    count = 0
    long_call, _ = table.begin_call(Arrival("", "long"), f"{0xFFFFFF:08x}", clock.now_s())
    table.dispatch(long_call, "e0")
    while not writer.done():
        for number in range(3):
            count += 1
            call, _ = table.begin_call(Arrival("", f"s{number}"), f"{count:08x}", clock.now_s())
            table.dispatch(call, "e0")
            await asyncio.sleep(0.01 * (number + 1))
            table.end_call(call, clock.now_s())
        said = {str(p.session): p.account.service_s for p in table.programs()}
        said["long"] += clock.now_s() - long_call.begun_s
        say(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

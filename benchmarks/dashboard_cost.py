"""What the dashboard costs the server: processor time with a viewer minus without one.

A table of 10,000 programs in which calls begin and end at a steady rate, watched by nobody, by one
and by several, in turn. The viewers are processes of their own, so the figures are the gateway's
alone; the calls are made up in the same process and are in the figures without a viewer as well.
Prints medians of the rounds: the share of one core, the difference to the same round without a
viewer, and the processor time of a viewer's first sight, once for each.

    python -m benchmarks.dashboard_cost [--programs 10000] [--seconds 10] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import random
import statistics
import time

from autellix.server.gateway.dashboard.feed import LiveFeed
from tests.gateway.dashboard.scene import KEY, Scene, showing

RATES = (0, 50, 400)  # calls a second; each changes two rows
VIEWERS = (0, 1, 8)


def watch(port: int, ready: multiprocessing.Queue) -> None:
    """Read the feed until killed, as a browser does."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/dashboard/live", headers={"Authorization": f"Bearer {KEY}"})
    response = connection.getresponse()
    while line := response.readline():
        if line.startswith(b"event: filled"):
            ready.put(True)


async def churn(scene: Scene, rate: int, seconds: float) -> float:
    """Begin and end calls at a rate for so long; return the processor time it took."""
    names = [f"run-{number:05d}" for number in range(len(scene.table) - 1)]
    chance = random.Random(1)
    began_s, end_s, spent_s = time.monotonic(), time.monotonic() + seconds, time.process_time()
    done = 0
    while (now_s := time.monotonic()) < end_s:
        while done < rate * (now_s - began_s):
            scene.end(*scene.begin(chance.choice(names)), [(0.0, "run", 1, "fresh")])
            done += 1
        before_s = now_s
        await asyncio.sleep(0.02)
        scene.advance(time.monotonic() - before_s)
    return time.process_time() - spent_s


async def watched(scene: Scene, feed: LiveFeed, port: int, count: int, rate: int, seconds: float):
    """Return (share of a core, processor time of each first sight) with so many viewers."""
    ready: multiprocessing.Queue = multiprocessing.Queue()
    viewers, firsts = [], []
    for _ in range(count):
        spent_s = time.process_time()
        viewers.append(multiprocessing.Process(target=watch, args=(port, ready), daemon=True))
        viewers[-1].start()
        await asyncio.to_thread(ready.get)
        firsts.append(time.process_time() - spent_s)
    assert feed.viewers == count
    share = await churn(scene, rate, seconds) / seconds
    for process in viewers:
        process.kill()
        process.join()
    while feed.viewers:  # noqa: ASYNC110 - the server notes it at its next write
        await asyncio.sleep(0.05)
    return share, firsts


async def measure(programs: int, seconds: float, rounds: int) -> None:
    """Measure every pair of rate and viewers in turn, several times; print medians."""
    scene = Scene()
    scene.fill(programs)
    async with showing(scene) as (url, dashboard):
        port = int(url.rpartition(":")[2].partition("/")[0])
        print("calls/s  viewers  share of a core  above no viewer  first sight")
        for rate in RATES:
            shares = {count: [] for count in VIEWERS}
            firsts = {count: [] for count in VIEWERS}
            for _ in range(rounds):
                for count in VIEWERS:
                    share, first = await watched(scene, dashboard.feed, port, count, rate, seconds)
                    shares[count].append(share)
                    firsts[count] += first
            for count in VIEWERS:
                above = statistics.median(
                    a - b for a, b in zip(shares[count], shares[0], strict=True)
                )
                first = f"{statistics.median(firsts[count]) * 1000:.0f} ms" if count else "-"
                share = statistics.median(shares[count])
                print(f"{rate:7d}  {count:7d}  {share:15.2%}  {above:15.2%}  {first:>11}")


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.programs, options.seconds, options.rounds))


if __name__ == "__main__":
    main()

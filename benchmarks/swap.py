"""How fast blocks are gathered and scattered on this machine, against one memcpy and a torch loop.

    python -m benchmarks.swap [--svg FILE]

All figures of a row are taken in turns within one run, best of several; only ratios mean anything
on another machine. The buffers of a row are at most 512 MiB each, so that rows of large blocks
move fewer than 64 of them. Where there is a CUDA device, a second table compares with one pinned
copy and with a copy per block.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from autellix.server import _swap
from autellix.server.engine.copier import segments_of

LAYERS = 30
BLOCKS = 64
BUFFER_BYTES_MAX = 512 << 20
SMOLLM2_BYTES = 96 << 10  # keys, or values, of the bundled model's block of 128 tokens
SIZES = sorted({SMOLLM2_BYTES, *(4096 << i for i in range(10))})  # 4 KiB … 2 MiB in one layer
TRIES = 4
TRY_S_MIN = 1.5  # small rows take milliseconds, and each has its moments
GATHER_FLOOR, LOOP_FLOOR = 0.85, 2.0


class Row(NamedTuple):
    """One block size; bandwidths in GB/s."""

    block_bytes: int
    blocks: int
    memcpy: float
    gather: float
    scatter: float
    loop: float


def best_s(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best time of each kind of work, taken in turns for `TRY_S_MIN` at least."""
    best = dict.fromkeys(work, float("inf"))
    begin_s = time.perf_counter()
    done = 0
    while done < rounds or time.perf_counter() - begin_s < TRY_S_MIN:
        done += 1
        for name, run in work.items():
            start_s = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start_s)
    return best


def measure(block_bytes: int, workers: _swap.Workers, rounds: int) -> Row:
    """Return the best of several measurements, each with memory of its own: pages differ too."""
    tries = [measure_once(block_bytes, workers, rounds) for _ in range(TRIES)]
    best = (max(values) for values in zip(*(row[2:] for row in tries), strict=True))
    return Row(block_bytes, tries[0].blocks, *best)


def measure_once(block_bytes: int, workers: _swap.Workers, rounds: int) -> Row:
    """Move scattered blocks of 30 layers out and in."""
    blocks = min(BLOCKS, BUFFER_BYTES_MAX // (block_bytes * LAYERS))
    cache_blocks = 2 * blocks
    caches = {
        f"layer{i}": torch.full((cache_blocks, block_bytes), i, dtype=torch.uint8)
        for i in range(LAYERS)
    }
    copier = _swap.BlockCopier(segments_of(caches, cache_blocks), cache_blocks, workers)
    total = copier.slot_bytes * blocks
    host, target = (_swap.HostBuffer(total, populate=True) for _ in range(2))
    source = torch.full((total,), 1, dtype=torch.uint8).numpy()  # memory as the caches have it
    ids = random.Random(block_bytes).sample(range(cache_blocks), blocks)
    slots = list(range(blocks))
    rows = torch.frombuffer(target, dtype=torch.uint8).view(blocks, LAYERS, block_bytes)
    layers = list(caches.values())

    def loop() -> None:
        for slot, block in enumerate(ids):
            for layer, cache in enumerate(layers):
                rows[slot, layer].copy_(cache[block])

    taken = best_s(
        {
            "memcpy": lambda: workers.copy(target, source),
            "gather": lambda: copier.gather(ids, host, slots),
            "scatter": lambda: copier.scatter(ids, host, slots),
            "loop": loop,
        },
        rounds,
    )
    loop()
    assert np.array_equal(np.frombuffer(host, np.uint8), np.frombuffer(target, np.uint8))
    return Row(block_bytes, blocks, *(total / taken[k] / 1e9 for k in taken))


def draw(rows: list[Row], file: Path) -> None:
    """Write the ratios over block size as a plot."""
    width, height, left, top = 640, 300, 60, 20
    highest = max(max(r.gather / r.memcpy, r.scatter / r.memcpy) for r in rows) * 1.1
    lines = []
    for name, colour, values in (
        ("gather", "#1668a8", [r.gather / r.memcpy for r in rows]),
        ("scatter", "#c2571a", [r.scatter / r.memcpy for r in rows]),
        ("torch loop", "#7a7a7a", [r.loop / r.memcpy for r in rows]),
    ):
        points = [
            (left + i * width / (len(rows) - 1), top + height * (1 - v / highest))
            for i, v in enumerate(values)
        ]
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = points[-1]
        lines.append(f'<text x="{x + 6:.0f}" y="{y:.0f}" fill="{colour}">{name}</text>')
    for i, row in enumerate(rows):
        x = left + i * width / (len(rows) - 1)
        label = size_name(row.block_bytes)
        lines.append(
            f'<text x="{x:.0f}" y="{top + height + 18}" text-anchor="middle">{label}</text>'
        )
    for value in (GATHER_FLOOR, 1.0):
        y = top + height * (1 - value / highest)
        lines.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y:.0f}" y2="{y:.0f}" stroke="#bbb" '
            f'stroke-dasharray="4"/><text x="{left - 34}" y="{y + 4:.0f}">{value:.2f}</text>'
        )
    lines.append(f'<text x="{left}" y="{top + height + 38}">bytes of a block in one layer; '
                 "bandwidth ÷ that of one memcpy</text>")  # fmt: skip
    body = "\n".join(lines)
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 160}" height="{height + 70}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def size_name(size_bytes: int) -> str:
    """Return a size in words."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def report_cpu(rows: list[Row]) -> bool:
    """Print the table; return whether every floor is met."""
    print(f"{'block':>8} {'blocks':>6} {'memcpy':>11} {'gather÷memcpy':>14} "
          f"{'scatter÷memcpy':>15} {'gather÷loop':>12}")  # fmt: skip
    met = True
    for r in rows:
        print(f"{size_name(r.block_bytes):>8} {r.blocks:>6} {r.memcpy:>6.1f} GB/s "
              f"{r.gather / r.memcpy:>14.2f} {r.scatter / r.memcpy:>15.2f} "
              f"{r.gather / r.loop:>12.2f}  {bar(r.gather / r.memcpy)}")  # fmt: skip
        met &= r.gather / r.memcpy >= GATHER_FLOOR and r.gather / r.loop >= LOOP_FLOOR
    return met


def bar(ratio: float) -> str:
    """Return a ratio as a bar; the mark is the floor."""
    length = min(40, round(ratio * 20))
    line = "#" * length + " " * (40 - length)
    mark = round(GATHER_FLOOR * 20)
    return line[:mark] + "|" + line[mark + 1 :]


def report_cuda(rounds: int) -> None:
    """Print ratios on the first CUDA device; nothing if there is none."""
    if not torch.cuda.is_available():
        print("no CUDA device: the CUDA backend was not run")
        return
    from autellix.server.engine.copier import CudaCopier

    stream = torch.cuda.current_stream()
    for block_bytes in (16 << 10, 64 << 10, 256 << 10):
        caches = {
            f"layer{i}": torch.full((2 * BLOCKS, block_bytes), i, dtype=torch.uint8, device="cuda")
            for i in range(LAYERS)
        }
        copier = CudaCopier(segments_of(caches, 2 * BLOCKS), 2 * BLOCKS, BLOCKS, 0, 256 << 20)
        total = copier.slot_bytes * BLOCKS
        pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(total, dtype=torch.uint8, device="cuda")
        parts = pinned.view(BLOCKS, LAYERS, block_bytes)
        ids = random.Random(1).sample(range(2 * BLOCKS), BLOCKS)
        slots = list(range(BLOCKS))

        def each_block() -> None:
            for slot, block in enumerate(ids):  # noqa: B023 - called within this round
                for layer, cache in enumerate(caches.values()):  # noqa: B023
                    parts[slot, layer].copy_(cache[block], non_blocking=True)  # noqa: B023

        def synced(run: Callable[[], object]) -> Callable[[], object]:
            return lambda: (run(), stream.synchronize())

        taken = best_s(
            {
                "one out": synced(lambda: pinned.copy_(device, non_blocking=True)),  # noqa: B023
                "one in": synced(lambda: device.copy_(pinned, non_blocking=True)),  # noqa: B023
                "out": synced(lambda: copier.swap_out(ids, slots)),  # noqa: B023
                "in": synced(lambda: copier.swap_in(ids, slots)),  # noqa: B023
                "each": synced(each_block),
            },
            rounds,
        )
        print(f"{size_name(block_bytes):>8} {copier.backend}: out÷one copy "
              f"{taken['one out'] / taken['out']:.2f}, in÷one copy "
              f"{taken['one in'] / taken['in']:.2f}, out÷copy per block "
              f"{taken['each'] / taken['out']:.1f}")  # fmt: skip


def main() -> None:
    """Measure, print, and draw if asked to; exit 1 if a floor is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", type=Path, help="write the plot here")
    parser.add_argument("--rounds", type=int, default=3, help="of each try, at least")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    workers = _swap.Workers(args.threads)
    print(f"{LAYERS} layers, {args.threads} threads, best of {TRIES} times {args.rounds} or more")
    rows = [measure(size, workers, args.rounds) for size in SIZES]
    met = report_cpu(rows)
    report_cuda(args.rounds)
    if args.svg is not None:
        draw(rows, args.svg)
    floors = f"gather at least {GATHER_FLOOR} of memcpy and {LOOP_FLOOR} of the loop"
    print(f"{floors}: {'yes' if met else 'NO'}")
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()

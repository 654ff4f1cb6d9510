"""Runs many cells, several at once, and gives their results in the order of the cells."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

from ..engine.lifetime import die_with_parent
from . import trace
from .measure import Cell, run_cell
from .result_cache import ResultCache


class Ran(NamedTuple):
    """A cell's figures, and the seconds it took to get them here and now."""

    result: dict[str, Any]
    took_s: float


def run_cells(cells: Sequence[Cell], results: ResultCache, jobs: int = 1) -> Iterator[Ran]:
    """Yield what each cell gave, in their order, as soon as it and all before it are there.

    Args:
        cells: What to run.
        results: Where results are kept; a cell that is there is not run again.
        jobs: How many processes run cells at once. A result does not depend on it; only the
            decision times, which a clock measures, do.
    """
    if jobs == 1:
        yield from map(partial(_run, results), cells)
        return
    with _processes(jobs) as pool:
        yield from pool.map(partial(_run, results), cells)


@contextmanager
def cell_runner(results: ResultCache, jobs: int) -> Iterator[Callable[[Cell], Ran]]:
    """Yield what runs one cell, for as many threads at once as there are jobs."""
    if jobs == 1:
        yield partial(_run, results)
        return
    with _processes(jobs) as pool:
        yield lambda cell: pool.submit(_run, results, cell).result()


def _processes(jobs: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # vLLM keeps threads, which no fork copies
    # Without the initializer the processes go on with their cell when the command is killed.
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)


def _begin() -> None:
    """Set up a process of its own: its end, and a collector that looks more rarely.

    Hardly anything that a step makes is a cycle, and looking for them so often costs time.
    """
    die_with_parent()
    gc.set_threshold(50_000, 20, 50)


def _run(results: ResultCache, cell: Cell) -> Ran:
    started_s = time.monotonic()
    result = results.get(cell, lambda: run_cell(cell, _load(cell.trace)))
    return Ran(result, time.monotonic() - started_s)


@cache
def _load(name: str) -> tuple[trace.Program, ...]:
    programs = trace.load(name)
    gc.collect()
    gc.freeze()  # they stay: no use in looking through them again and again
    return programs

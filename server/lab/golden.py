"""Golden cells: runs of stock vLLM whose step count and completion order are written down.

Whoever drives vLLM's AsyncScheduler on their own, by the rules below, must get the same figures; so
must every later version of the lab.

* Programs arrive as ``workload.poisson`` says; those whose largest call is above the engine's
  context are left out. Program n is the n-th arrival; a call of it has the trace's id.
* A call starts when its last parent is over, plus its tool's seconds: 0 if not recorded, at most
  300. ``turnaround_s`` is 0: the client takes no time. What may start at once starts in this order:
  children in the order of the trace, and of several calls that end in one step in the batch's.
* A step takes ``gap_s + max(memory, arithmetic)`` of the profile's roofline plus the scheduler's
  fixed and per-call seconds, added with one batch in flight; with two, the larger of model and
  scheduler counts. Memory reads the weights and each call's context at the step's end; of n new
  tokens that end at a context of c, n x (c - n // 2) pairs are attended to.
* **Arrival before output**: what arrives while a step runs is in the queue before the step's
  output is handled.
* An engine without a step under way begins one with the first call that it gets; what else comes
  in the same instant, such as the other first calls of a program, finds that step begun.
* Two batches in flight: the second is scheduled before the first one's output is known, and
  takes its seconds from the first one's end on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from . import cost_model, trace
from .measure import Cell, simulate_cell
from .simulate import order_digest

FILE: Final = Path(__file__).parent / "golden.json"
_PROFILE: Final = "a100-80g-llama-3.1-8b"


def cells() -> list[Cell]:
    """Return the cells, all of stock vLLM on a small engine, so that there is a queue."""
    profile = replace(
        cost_model.load(_PROFILE), kv_tokens=24_000, slots=12, context_tokens_max=20_000,
        turnaround_s=0.0,  # so that whoever computes them again needs no clock of clients
    )  # fmt: skip
    wanted = (
        ("bfcl-gt", 1.0, 12, 1),
        ("bfcl-gt", 1.0, 12, 2),
        ("chat-sharegpt", 2.0, 24, 1),
        ("lats", 0.5, 2, 1),
    )
    return [
        Cell(
            trace=name,
            arm="fcfs",
            profile=replace(profile, batches_in_flight=depth),
            rate_per_s=rate,
            seed=7,
            programs=programs,
        )
        for name, rate, programs, depth in wanted
    ]


def run(cell: Cell) -> dict[str, Any]:
    """Return a cell's figures: exact, so that one token or one call out of order shows."""
    outcome, simulation, _ = simulate_cell(cell, trace.load(cell.trace))
    totals = outcome.totals[0]
    order = [_plain(request_id) for request_id in simulation.completion_order]
    return {
        "trace": cell.trace,
        "rate_per_s": cell.rate_per_s,
        "programs": cell.programs,
        "seed": cell.seed,
        "batches_in_flight": cell.profile.batches_in_flight,
        "steps": totals.steps,
        "computed_tokens": totals.computed_tokens,
        "hit_tokens": totals.hit_tokens,
        "preemptions": totals.preemptions,
        "calls": len(order),
        "first_completed": order[:8],
        "order": order_digest(order),
    }


def recorded() -> list[dict[str, Any]]:
    """Return what is written down."""
    figures: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    return figures


def record() -> None:
    """Write the figures down anew; only after a change that is meant to change them."""
    document = {"vllm": "0.32.0", "cells": [run(cell) for cell in cells()]}
    FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _plain(request_id: str) -> str:
    """Return ``program-call``, both numbers, from a request id of the lab."""
    call_id = request_id.split("-")[1]
    return f"{int(call_id[:6], 16)}-{int(call_id[6:], 16)}"

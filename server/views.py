"""What people look at: programs, engines, queues and fairness as rows of JSON.

A row is a tuple in the order of `COLUMNS`, since 10,000 of them go to every viewer. Times in rows
are seconds of the gateway's clock; with the time of the message a viewer makes ages of them, so
that a program that does nothing needs no new row each second.

*Slowdown* is (service + wait) ÷ service over the calls that engines have reported: 1 is a program
that never waited. A program of stock engines has none, since they do not tell what a call waited.

Pure: time is an argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .process_table import ProcessTable
from .program import IDLE_AFTER_S, Program, ProgramState

#: The fields of a row, in order.
COLUMNS: Final = (
    "id", "name", "framework", "state", "level", "calls", "in_flight", "service_s", "wait_s",
    "engine", "slowdown", "threads", "tokens", "preemptions", "swaps", "arrival_s", "last_s",
    "end_s",
)  # fmt: skip
ID: Final = COLUMNS.index("id")
SERVICE: Final = COLUMNS.index("service_s")
SLOWDOWN: Final = COLUMNS.index("slowdown")
STATE: Final = COLUMNS.index("state")
SETTLES_S: Final = IDLE_AFTER_S  # so long after its last call a program's state changes by itself
ID_START_MIN: Final = 6  # characters of an id that stand for it
CLASSES: Final = 4  # size classes: quartiles of service

_STATE_WORDS: Final = {state: state.value for state in ProgramState}  # an enum's own is slow

Row = tuple[Any, ...]


def row_of(program: Program, now_s: float) -> Row:
    """Return one program as a row."""
    service_s = program.account.service_s  # of a path it is computed, so once
    done_s = program.completed_s
    end_s = None
    if program.is_tombstone:
        end_s = done_s if program.ended_s is None else max(program.ended_s, done_s or 0.0)
    opener = program.opener
    return (
        program.program_id,
        program.name,
        None if opener is None else framework_of(opener),
        _STATE_WORDS[program.state(now_s)],
        program.level,
        program.calls_begun,
        program.in_flight,
        round(service_s, 3),
        round(program.wait_s, 3),
        program.home,
        _slowdown(program, service_s),
        len(program.threads),
        program.output_tokens,
        program.preemptions,
        program.swaps,
        round(program.arrival_s, 3),
        round(program.last_call_s if done_s is None else done_s, 3),
        None if end_s is None else round(end_s, 3),
    )


def find_program(table: ProcessTable, wanted: str) -> Program | None:
    """Return a program by its id, else the newest whose session, name or start of id this is."""
    if (program := table.get(wanted)) is not None:
        return program
    found = None
    for program in table.programs():
        if wanted in (program.session, program.name) or (
            len(wanted) >= ID_START_MIN and program.program_id.startswith(wanted)
        ):
            found = program
    return found


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row with its fields' names."""
    return dict(zip(COLUMNS, row, strict=True))


def slowdown_of(program: Program) -> float | None:
    """Return (service + wait) ÷ service, None where no engine has reported."""
    return _slowdown(program, program.account.service_s)


def _slowdown(program: Program, service_s: float) -> float | None:
    if not program.calls_reported or service_s <= 0:
        return None
    return round(1 + program.wait_s / service_s, 3)


def framework_of(opener: Mapping[str, Any]) -> str | None:
    """Return what the owner said that the program is made with."""
    said = opener.get("framework") or (opener.get("metadata") or {}).get("framework")
    return said[:64] if isinstance(said, str) else None


def settles(program: Program) -> bool:
    """Return whether the state will change without an event, after `SETTLES_S`."""
    return (
        not program.in_flight
        and program.ended_s is None
        and not program.expired
        and not program.tools
        and program.completed_s is not None
    )


def fairness(rows: Iterable[Row]) -> dict[str, Any]:
    """Return how evenly programs are slowed down.

    ``jain`` is Jain's index of the slowdowns (1: all alike), ``quartiles`` are minimum, quartiles
    and maximum with the 90th and 99th percentile, and ``classes`` the mean slowdown of programs by
    size, the least service first.
    """
    sized = sorted((row[SERVICE], row[SLOWDOWN]) for row in rows if row[SLOWDOWN] is not None)
    slowdowns = sorted(slowdown for _, slowdown in sized)
    count = len(slowdowns)
    if not count:
        return {"programs": 0, "jain": None, "percentiles": None, "classes": []}
    total = sum(slowdowns)
    square = sum(value * value for value in slowdowns)
    return {
        "programs": count,
        "jain": round(total * total / (count * square), 4),
        "mean": round(total / count, 3),
        "percentiles": {
            str(percent): slowdowns[min(count - 1, percent * count // 100)]
            for percent in (0, 25, 50, 75, 90, 99, 100)
        },
        "classes": [_class_of(part) for part in _parts(sized, CLASSES)],
    }


def _parts(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return ``items`` in so many parts of nearly one length, without empty ones."""
    edges = [len(items) * index // count for index in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges) if b > a]


def _class_of(part: Sequence[tuple[float, float]]) -> dict[str, Any]:
    return {
        "programs": len(part),
        "service_s_max": part[-1][0],
        "slowdown_mean": round(sum(slowdown for _, slowdown in part) / len(part), 3),
    }


def engine_row(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return one engine as people look at it.

    Args:
        view: What the fleet tells of it: state, calls, the channel's hello and heartbeat.
    """
    hello = view.get("channel") or {}
    load = view.get("load") or {}
    blocks, free = hello.get("kv_blocks"), load.get("kv_blocks_free")
    prompt, hits = view.get("prompt_tokens"), view.get("hit_tokens")
    return {
        "engine": view.get("engine"),
        "state": view.get("state"),
        "calls": view.get("calls", 0),
        "starts": view.get("starts"),
        "running": load.get("running"),
        "waiting": load.get("waiting"),
        "slots": hello.get("slots"),
        "kv_blocks": blocks,
        "kv_use": round(1 - free / blocks, 4) if blocks and free is not None else None,
        "hit_share": round(hits / prompt, 4) if prompt and hits is not None else None,
        "step": load.get("step"),
        "step_age_s": load.get("step_age_s"),
        "longest_step_s": load.get("longest_step_s"),
        "heard_age_s": view.get("heard_age_s"),
        "preemptions": load.get("preemptions"),
        "recomputed": _ratio(load.get("recomputed_tokens"), load.get("computed_tokens")),
        "levels": list(load.get("level_waiting") or ()),
        "policy": hello.get("policy"),
        "scheduler": hello.get("scheduler"),
        "vllm": hello.get("vllm_version"),
        "async": hello.get("async_scheduling"),
        "boot": hello.get("boot_id"),
        "lost": view.get("reports_lost"),
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if whole and part is not None else None


def queue_sample(
    now_s: float, engines: Sequence[Mapping[str, Any]], in_flight: int
) -> tuple[Any, ...]:
    """Return (time, calls in flight, running, waiting, waiting by level) over all engines."""
    levels: list[int] = []
    for engine in engines:
        waiting = engine["levels"]
        levels += [0] * (len(waiting) - len(levels))
        for index, count in enumerate(waiting):
            levels[index] += count
    running = sum(engine["running"] or 0 for engine in engines)
    waits = sum(engine["waiting"] or 0 for engine in engines)
    return (round(now_s, 1), in_flight, running, waits, levels)

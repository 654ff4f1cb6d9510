"""The setting of a run: what runs have to share before one is set against another.

Results come as plain values from JSON; nothing here draws or writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

Result = dict[str, Any]
SINGLE: Final = ("profile", "engines", "balancer", "concurrency", "tokens_max")
GROUPED: Final = ("waits", "rule", "faults")  # several values under one name


class Setting(NamedTuple):
    """All that runs share before one is set against another: not the arm, the load and the seed.

    Attributes:
        trace: Its name.
        parts: Name and value of whatever else a result says of itself, by name.
    """

    trace: str
    parts: tuple[tuple[str, str], ...]


def setting_of(result: Result) -> Setting:
    """Return a run's setting.

    A run without a measuring rule (a smoke run, the live bench, all programs at once) is as long as
    its programs are many, so their number counts too.
    """
    said = {name: result.get(name) for name in SINGLE}
    for group in GROUPED:
        said |= {f"{group}.{name}": value for name, value in (result.get(group) or {}).items()}
    said.pop("waits.seed", None)  # the run's own
    if is_smoke(result):
        said["smoke"] = "run"
    if is_smoke(result) or "rule" not in result or mode_of(result) in ("closed", "offline"):
        said["programs"] = result["programs"]
    parts = sorted(
        (name, value if isinstance(value, str) else json.dumps(value))
        for name, value in said.items()
        if value is not None and value not in ([], ())
    )
    return Setting(result["trace"], tuple(parts))


def is_smoke(result: Result) -> bool:
    """Return whether an open run was cut to some programs; other modes are asked for a number."""
    return bool(result.get("smoke")) and mode_of(result) == "open"


class Group(NamedTuple):
    """The runs of one setting.

    Attributes:
        results: Of any arm, rate, seed and mode.
        heading: The trace, and what tells the setting apart from others of that trace.
        stem: How the names of its figures begin.
    """

    results: list[Result]
    heading: str
    stem: str


def groups(results: Sequence[Result]) -> list[Group]:
    """Return runs by setting, in the order in which the settings come up."""
    by_setting: dict[Setting, list[Result]] = {}
    for r in results:
        by_setting.setdefault(setting_of(r), []).append(r)
    drawn = [s for s, some in by_setting.items() if open_runs(some) or windowed_runs(some)]
    found = []
    for setting, some in by_setting.items():
        others = [s for s in by_setting if s.trace == setting.trace]
        apart = [
            f"{name} {value}"
            for name, value in setting.parts
            if name == "smoke" or not all((name, value) in other.parts for other in others)
        ]
        heading = f"{setting.trace} ({', '.join(apart)})" if apart else setting.trace
        rivals = [s for s in drawn if s.trace == setting.trace]
        is_numbered = setting in drawn and len(rivals) > 1
        stem = f"{setting.trace}-{rivals.index(setting) + 1}" if is_numbered else setting.trace
        found.append(Group(some, heading, stem))
    return found


def mode_of(result: Result) -> str:
    """Return how programs came; by a rate where the result does not say."""
    return str(result.get("mode", "open"))


def open_runs(results: Sequence[Result]) -> list[Result]:
    """Return the runs in which programs come by a rate."""
    return [r for r in results if mode_of(r) == "open"]


def windowed_runs(results: Sequence[Result]) -> list[Result]:
    """Return the runs that say what happened by time of arrival: bursts and crowds."""
    return [r for r in results if r.get("response_by_arrival_s")]

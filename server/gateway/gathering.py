"""Putting together what several gateway processes say of themselves, in documents of one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

#: Of each list the field by which its rows come, and whether the largest is first.
_ORDERS: Final = {"sessions": ("age_s", True), "calls": ("begun_s", True)}


def gathered(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the documents as one: lists are joined, numbers added, and of the rest the first said.

    Engines are the same for everybody; keys have a row for each tenant.

    >>> gathered([{"n": 1, "loads": {"e0": 1}}, {"n": 2, "loads": {"e0": 2, "e1": 1}}])
    {'n': 3, 'loads': {'e0': 3, 'e1': 1}}
    """
    whole: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        whole[name] = _joined(name, values)
    return whole


def _joined(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == "engines":
        return next((value for value in values if value), first)
    if name == "keys":
        return _by_tenant([row for value in values for row in value])
    if isinstance(first, dict):
        return gathered(values)
    if isinstance(first, list):
        rows = [row for value in values for row in value]
        field, is_down = _order_of(name, rows)
        return sorted(rows, key=lambda row: row[field], reverse=is_down) if field else rows
    if name == "now_s":
        return max(values)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(values)
    return first


def _order_of(name: str, rows: Sequence[Any]) -> tuple[str, bool]:
    if name == "programs" and rows:  # for people the newest come first, with a time and no age
        return ("age_s", True) if "age_s" in rows[0] else ("arrival_s", True)
    return _ORDERS.get(name, ("", False))


def _by_tenant(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: dict[str, int] = {}
    for row in rows:
        calls[row["tenant"]] = calls.get(row["tenant"], 0) + row["calls_in_flight"]
    return [{"tenant": tenant, "calls_in_flight": count} for tenant, count in calls.items()]

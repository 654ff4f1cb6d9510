"""What outlives a gateway of a program, as plain data; the journal and Redis keep the same.

Times in a record are of the wall clock, since a monotonic one means nothing to another machine or
after a reboot. A wall clock may jump: an age is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from autellix import wire

from ..accounts import Account
from ..program import CallKey, Program, Thread


def more_of(program: Program) -> bytes:
    """Return what is kept besides figures: threads, joins, the owner's wishes."""
    return orjson.dumps(
        {
            "ttl_s": program.ttl_s,
            "wishes": wishes_of(program),
            "labels": program.labels,
            "unconsumed": list(program.unconsumed),
            "threads": [
                (
                    thread.number, thread.parent, thread.calls_begun, thread.next_seq,
                    thread.last_call, thread.parents, thread.follows,
                )
                for thread in program.threads.values()
            ],
        },
        default=tuple,  # named ones
    )  # fmt: skip


def take_more(program: Program, text: bytes | str | None) -> None:
    """Put into a program what `more_of` said of it."""
    if not text:
        return
    more: Mapping[str, Any] = orjson.loads(text)
    program.ttl_s = more["ttl_s"]
    take_wishes(program, more.get("wishes"))  # a record of an earlier version has none
    program.labels = dict(more["labels"])
    program.unconsumed = {CallKey(*key): None for key in more["unconsumed"]}
    for number, parent, calls_begun, next_seq, last_call, parents, follows in more["threads"]:
        program.threads[number] = Thread(
            number=number,
            parent=wire.ParentCall(*parent) if parent is not None else None,
            follows=tuple(wire.ParentCall(*point) for point in follows),
            calls_begun=calls_begun,
            calls_ended=calls_begun,  # calls in flight have ended with the gateway
            next_seq=next_seq,
            last_call=CallKey(*last_call) if last_call is not None else None,
            moved=False,
            parents=tuple(CallKey(*key) for key in parents),
        )


def wishes_of(program: Program) -> dict[str, Any] | None:
    """Return what its owner says of a program for the policy; its deadline since it came."""
    deadline_s = program.deadline_s
    if program.weight is None and deadline_s is None and program.kind is None:
        return None
    after_s = None if deadline_s is None else deadline_s - program.arrival_s
    return {"weight": program.weight, "deadline_after_s": after_s, "kind": program.kind}


def take_wishes(program: Program, wishes: Mapping[str, Any] | None) -> None:
    """Put into a program what `wishes_of` said of it and nobody has said here."""
    if not wishes:
        return
    if program.weight is None:
        program.weight = wishes["weight"]
    if program.deadline_s is None and wishes["deadline_after_s"] is not None:
        program.deadline_s = program.arrival_s + wishes["deadline_after_s"]
    if program.kind is None:
        program.kind = wishes["kind"]


def remembered(
    *, program_id: str, scope: str, session: str, name: str, age_s: float, now_s: float
) -> Program:
    """Return a program of an earlier life or of another gateway, open and without a call."""
    return Program(
        program_id=program_id,
        scope=scope,
        session=session,
        name=name,
        arrival_s=now_s - max(0.0, age_s),
        account=Account(),  # the table puts its own in
        lease_until_s=now_s,
        last_call_s=now_s,
    )

"""What outlives a gateway of a program, as plain data; the journal and Redis keep the same.

Times in a record are of the wall clock, since a monotonic one means nothing to another machine or
after a reboot. A wall clock may jump: an age is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from autellix import wire

from ..accounts import SumAccount
from ..program import CallKey, Program, Thread


def more_of(program: Program) -> bytes:
    """Return what is kept besides figures: threads, joins, the owner's wishes."""
    return orjson.dumps(
        {
            "ttl_s": program.ttl_s,
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
        account=SumAccount(),  # the table puts its own in
        lease_until_s=now_s,
        last_call_s=now_s,
    )

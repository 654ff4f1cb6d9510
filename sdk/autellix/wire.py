"""The wire protocol, version 1: header names, limits, and how a header value is checked.

Pure, and shared by both sides: the SDK writes these headers, the gateway reads them. Everything is
a header; the body of a call is never touched by the SDK, since strict servers refuse unknown body
fields. Every header is optional, ASCII and at most ``VALUE_BYTES_MAX`` long; a receiver ignores a
malformed one and counts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 1
API_PREFIX: Final = "/autellix/v1"
VALUE_BYTES_MAX: Final = 128
LEASE_S: Final = 60.0
PARENTS_MAX: Final = 16  # points in one `PARENT`, as far as the bytes allow

SESSION: Final = "X-Autellix-Session"
THREAD: Final = "X-Autellix-Thread"
PARENT: Final = "X-Autellix-Parent"
PARENT_SESSION: Final = "X-Autellix-Parent-Session"
SEQ: Final = "X-Autellix-Seq"
CALL: Final = "X-Autellix-Call"
NODE: Final = "X-Autellix-Node"
CONVERSATION: Final = "X-Autellix-Conversation"
CLIENT: Final = "X-Autellix-Client"
ROLE: Final = "X-Autellix-Role"
WEIGHT: Final = "X-Autellix-Weight"
DEADLINE: Final = "X-Autellix-Deadline"  # seconds from now, since clocks differ
KIND: Final = "X-Autellix-Kind"
VLLM_SESSION: Final = "X-Session-ID"  # vLLM's own name for the same value
VERSION: Final = "X-Autellix-Version"  # in responses
LEASE: Final = "X-Autellix-Lease"  # in responses

DYNAMO_SESSION: Final = "X-Dynamo-Session-ID"
DYNAMO_PARENT: Final = "X-Dynamo-Parent-Session-ID"
DYNAMO_FINAL: Final = "X-Dynamo-Session-Final"

#: What a program is for; it can only lower how soon its calls run.
ROLES: Final = ("interactive", "delegated", "background")

#: How much a program counts beside others, and until when it should be over; both decimal.
WEIGHT_MIN: Final = 0.01
WEIGHT_MAX: Final = 100.0
DEADLINE_S_MAX: Final = 604_800.0  # a week; a deadline that is over is negative

REQUEST_HEADERS: Final = (
    SESSION,
    THREAD,
    PARENT,
    PARENT_SESSION,
    SEQ,
    CALL,
    NODE,
    CONVERSATION,
    CLIENT,
    ROLE,
    WEIGHT,
    DEADLINE,
    KIND,
)

#: A header as the HTTP clients keep it: its name, its lower-case name, its value.
Tag = tuple[bytes, bytes, bytes]
_TAG_NAMES: Final = {
    name: (name.encode(), name.lower().encode())
    for name in (*REQUEST_HEADERS, VLLM_SESSION, DYNAMO_SESSION, DYNAMO_PARENT)
}
TAG_KEYS: Final = frozenset(key for _, key in _TAG_NAMES.values())

#: The last part of a path that carries a call; anything else (models, files) is never tagged.
CALL_PATHS: Final = ("/chat/completions", "/completions", "/responses", "/embeddings", "/messages")
CALL_TARGETS: Final = tuple(path.encode() for path in CALL_PATHS)

_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
_PARENT = re.compile(r"(\d{1,9}):(\d{1,9})\Z")
_NUMBER = re.compile(r"\d{1,9}\Z")
_DECIMAL = re.compile(r"-?\d{1,9}(\.\d{1,9})?\Z")


class ParentCall(NamedTuple):
    """The point of a fork: the parent thread, and the number of calls it had made by then."""

    thread: int
    seq: int


def is_valid_id(value: str) -> bool:
    """Return whether ``value`` may be a session, call or conversation id.

    >>> is_valid_id("run-7"), is_valid_id("no spaces"), is_valid_id("")
    (True, False, False)
    """
    return _ID.match(value) is not None


def parse_number(value: str) -> int | None:
    """Return a thread or sequence number, or None if ``value`` is not one.

    >>> parse_number("12"), parse_number("-1"), parse_number("1e3")
    (12, None, None)
    """
    return int(value) if value.isascii() and _NUMBER.match(value) else None


def parse_weight(value: str) -> float | None:
    """Return a weight, or None if ``value`` is none.

    >>> parse_weight("2.5"), parse_weight("0"), parse_weight("1e1"), parse_weight("nan")
    (2.5, None, None, None)
    """
    return _decimal(value, WEIGHT_MIN, WEIGHT_MAX)


def parse_deadline(value: str) -> float | None:
    """Return the seconds to a deadline, negative if it is over, or None if ``value`` is no such.

    >>> parse_deadline("30"), parse_deadline("-0.250"), parse_deadline("soon")
    (30.0, -0.25, None)
    """
    return _decimal(value, -DEADLINE_S_MAX, DEADLINE_S_MAX)


def _decimal(value: str, low: float, high: float) -> float | None:
    number = float(value) if value.isascii() and _DECIMAL.match(value) else None
    return number if number is not None and low <= number <= high else None


def parse_parent(value: str) -> ParentCall | None:
    """Return the fork point in ``thread:seq``, or None if ``value`` is malformed.

    >>> parse_parent("0:3")
    ParentCall(thread=0, seq=3)
    """
    match = _PARENT.match(value) if value.isascii() else None
    return ParentCall(int(match[1]), int(match[2])) if match else None


def parse_parents(value: str) -> tuple[ParentCall, ...]:
    """Return the fork point and what else a thread follows; empty if any of it is malformed.

    >>> parse_parents("0:3,2:1")
    (ParentCall(thread=0, seq=3), ParentCall(thread=2, seq=1))
    >>> parse_parents("0:3,"), parse_parents(",".join(["0:3"] * 17))
    ((), ())
    """
    if len(value) > VALUE_BYTES_MAX or value.count(",") >= PARENTS_MAX:
        return ()
    points = [parse_parent(item) for item in value.split(",")]
    return tuple(p for p in points if p is not None) if None not in points else ()


def join_parents(points: Iterable[tuple[int, int]]) -> str:
    """Return the header value of ``points``, the fork first; what does not fit is left out.

    >>> join_parents([(0, 3), (2, 1), (0, 3)])
    '0:3,2:1'
    """
    text = ""
    for count, (thread, seq) in enumerate(dict.fromkeys(points)):
        longer = f"{text},{thread}:{seq}" if text else f"{thread}:{seq}"
        if count == PARENTS_MAX or len(longer) > VALUE_BYTES_MAX:
            break
        text = longer
    return text


def make_tag(name: str, value: str) -> Tag:
    """Return one of our headers in the form the HTTP clients keep; its value is ASCII.

    >>> make_tag("X-Autellix-Seq", "3")
    (b'X-Autellix-Seq', b'x-autellix-seq', b'3')
    """
    return (*_TAG_NAMES[name], value.encode("ascii"))


def is_call_target(target: bytes) -> bool:
    """Return whether a request's target, path and query in bytes, is a call of a model.

    >>> is_call_target(b"/v1/responses?api-version=2"), is_call_target(b"/v1/models")
    (True, False)
    """
    return target.endswith(CALL_TARGETS) or target.partition(b"?")[0].rstrip(b"/").endswith(
        CALL_TARGETS
    )

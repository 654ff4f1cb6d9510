"""What the gateway tells an engine about a call, on headers stock vLLM carries to its scheduler.

Two values travel: ``X-Session-ID`` names the program, sealed with a key that only the gateway and
its engines hold, so that a client who reaches an engine cannot join somebody's program; it is the
same for all calls of a program. ``X-Request-Id`` names the call and carries the figures that change
from call to call. vLLM puts its own text around the request id, so it is searched for, not matched.
Attained service itself rides on ``X-Vllm-Priority``, which a stock engine understands as well; the
tag says in which measure it is, since gateway and engines do not change their policy at one moment.

Pure: the key is an argument.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from functools import lru_cache
from typing import NamedTuple

_SEAL_HEX = 16
_SEALED = re.compile(r"ax1\.([0-9a-f]{8,40})\.([0-9a-f]{16})\Z")
_CALL = re.compile(
    r"ax1-([0-9a-f]{8,40})-(\d{1,9})-(\d{1,15})-(\d{1,15})(?![\d])"
    # what vLLM puts behind is hexadecimal, and none of these begins like that; the measure is last,
    # since an engine of an earlier version reads no further than to what it does not know
    r"(?:-w(\d{1,6}))?(?:-u(\d{1,15}))?(?:-k([0-9a-f]{12}))?(-[ps])?"
)
_WEIGHT_UNIT = 1000
_PATH = "-p"
_SUM = "-s"

PRIORITY_MAX = 2**53  # int64 on the wire; beyond 2**53 JSON readers lose digits


class CallTag(NamedTuple):
    """The figures of one call, as the gateway knew them when it sent the call off."""

    call_id: str  # lower-case hex, 8 to 40 digits
    thread: int
    wait_ms: int  # the program's wait so far, in the measure of its service
    arrival_ms: int  # when the program began; comparable between programs of one gateway only
    weight: float = 1.0  # of the program, to three digits
    deadline_ms: int | None = None  # of the program, on the clock of ``arrival_ms``
    kind: str | None = None  # of the program, 12 hex digits
    by_path: bool | None = None  # whether service and wait are of paths or sums; None: not said


@lru_cache(maxsize=8192)
def seal_program(program_id: str, key: bytes) -> str:
    """Return the session id that an engine with ``key`` will accept as this program.

    Remembered, since a program makes many calls.

    Args:
        program_id: Lower-case hex, 8 to 40 digits.
        key: The channel key of the pool, not empty.
    """
    sealed = f"ax1.{program_id}.{_mac(program_id, key)}"
    assert _SEALED.match(sealed), f"program id {program_id!r} is not 8 to 40 hex digits"
    return sealed


def unseal_program(session_id: str | None, key: bytes) -> str | None:
    """Return the program id in ``session_id``, or None if it is missing, foreign or forged.

    >>> unseal_program(seal_program("0badcafe", b"k"), b"k")
    '0badcafe'
    >>> unseal_program("ax1.0badcafe.0123456789abcdef", b"k") is None
    True
    """
    match = _SEALED.match(session_id) if session_id else None
    if match is None or not hmac.compare_digest(match[2], _mac(match[1], key)):
        return None
    return match[1]


def format_call(tag: CallTag) -> str:
    """Return ``tag`` as a request id.

    >>> format_call(CallTag("c0ffee00", 2, 1500, 99))
    'ax1-c0ffee00-2-1500-99'
    >>> format_call(CallTag("c0ffee00", 2, 1500, 99, weight=2.5, deadline_ms=4000))
    'ax1-c0ffee00-2-1500-99-w2500-u4000'
    >>> format_call(CallTag("c0ffee00", 2, 1500, 99, weight=2.5, by_path=True))
    'ax1-c0ffee00-2-1500-99-w2500-p'
    >>> format_call(CallTag("c0ffee00", 2, 1500, 99, by_path=False))
    'ax1-c0ffee00-2-1500-99-s'
    """
    text = f"ax1-{tag.call_id}-{tag.thread}-{tag.wait_ms}-{tag.arrival_ms}"
    if tag.weight != 1.0:
        text += f"-w{round(tag.weight * _WEIGHT_UNIT)}"
    if tag.deadline_ms is not None:
        text += f"-u{tag.deadline_ms}"
    if tag.kind is not None:
        text += f"-k{tag.kind}"
    if tag.by_path is not None:
        text += _PATH if tag.by_path else _SUM
    return text


def find_call(request_id: str) -> CallTag | None:
    """Return the tag inside a vLLM request id, or None if there is none.

    >>> find_call("chatcmpl-ax1-c0ffee00-2-1500-99-bc4ca7c3").call_id
    'c0ffee00'
    >>> find_call("resp_0123") is None
    True
    """
    match = _CALL.search(request_id)
    if match is None:
        return None
    weight, deadline_ms, measure = match[5], match[6], match[8]
    return CallTag(
        match[1], int(match[2]), int(match[3]), int(match[4]),
        1.0 if weight is None else int(weight) / _WEIGHT_UNIT,
        None if deadline_ms is None else int(deadline_ms),
        match[7],
        None if measure is None else measure == _PATH,
    )  # fmt: skip


def _mac(program_id: str, key: bytes) -> str:
    return hashlib.blake2b(
        program_id.encode(), key=key[:64], digest_size=_SEAL_HEX // 2
    ).hexdigest()

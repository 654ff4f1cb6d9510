"""Receipts: what an answer says of its own call, as header lines or as a comment of a stream.

A header can only say what is known when the head of the answer passes. The engine's report of a
call usually comes with the end of the call: before the head of an answer that is not streamed, or a
moment after it, and long after the head of a stream.

Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

from .call_log import CallRecord
from .program import Tokens

#: off: who it was, and no more; headers: what is known when the head passes; full: the head
#: of an answer waits a moment for the report, and a stream ends with a comment.
Mode = Literal["off", "headers", "full"]
MODES: Final[tuple[Mode, ...]] = ("off", "headers", "full")

ASK: Final = "X-Autellix-Receipt"  # a client's wish: one of `MODES`
ASK_LOWER: Final = ASK.lower()
CALL_ID: Final = "X-Autellix-Call-Id"
LEVEL: Final = "X-Autellix-Level"
WAIT_MS: Final = "X-Autellix-Wait-Ms"
SERVICE_MS: Final = "X-Autellix-Service-Ms"
PREEMPTIONS: Final = "X-Autellix-Preemptions"
SWAPS: Final = "X-Autellix-Swaps"

_TOLD = f"{LEVEL}: %d\r\n{WAIT_MS}: %d\r\n{SERVICE_MS}: %d\r\n{PREEMPTIONS}: %d\r\n{SWAPS}: %d\r\n"

_USAGE_BYTES: Final = 1024
_PROMPT: Final = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})')
_OUTPUT: Final = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})')
_HIT: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d{1,9})')


def mode_of(asked: str | None, server: Mode) -> Mode:
    """Return which receipt a call gets; a server that gives none cannot be asked for one.

    >>> mode_of(None, "headers"), mode_of("full", "headers"), mode_of("full", "off")
    ('headers', 'full', 'off')
    """
    if asked is None or server == "off":
        return server
    wish = asked.strip().lower()
    return next((mode for mode in MODES if mode == wish), server)


def head_lines(record: CallRecord) -> bytes:
    """Return the header lines of what the engine has said by now, none if nothing."""
    if not record.reports:
        return b""
    return (
        _TOLD
        % (
            record.level or 0,
            int(record.wait_s * 1000),
            int(record.service_s * 1000),
            record.preemptions,
            record.swaps,
        )
    ).encode()


def comment(record: CallRecord) -> bytes:
    """Return the receipt as a comment of an event stream, which clients skip."""
    return b": autellix " + json.dumps(as_dict(record), separators=(",", ":")).encode() + b"\n\n"


def as_dict(record: CallRecord) -> dict[str, Any]:
    """Return the receipt; what the engine has not said is null."""
    told = bool(record.reports)
    return {
        "call": record.call_id,
        "program": record.program_id,
        "engine": record.engine_id,
        "level": record.level,
        "wait_ms": int(record.wait_s * 1000) if told else None,
        "service_ms": int(record.service_s * 1000) if told else None,
        "preemptions": record.preemptions if told else None,
        "promotions": record.promotions if told else None,
        "swaps": record.swaps if told else None,
    }


def usage_in(tail: bytes) -> Tokens | None:
    """Return the usage at the end of an answer, None if it names none.

    A text of the model cannot be taken for it: in JSON its quotes are escaped.

    >>> usage_in(b'..."usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}')
    Tokens(prompt_tokens=7, hit_tokens=None, output_tokens=2)
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    part = tail[at : at + _USAGE_BYTES]
    prompt, output, hit = _PROMPT.search(part), _OUTPUT.search(part), _HIT.search(part)
    if prompt is None:
        return None
    return Tokens(int(prompt[1]), int(hit[1]) if hit else None, int(output[1]) if output else 0)

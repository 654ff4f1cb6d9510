"""The wire protocol, version 1: header names, limits, and how a header value is checked.

Pure, and shared by both sides: the SDK writes these headers, the gateway reads them. Everything is
a header; the body of a call is never touched by the SDK, since strict servers refuse unknown body
fields. Every header is optional, ASCII and at most ``VALUE_BYTES_MAX`` long; a receiver ignores a
malformed one and counts it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 1
API_PREFIX: Final = "/autellix/v1"
VALUE_BYTES_MAX: Final = 128
LEASE_S: Final = 60.0

SESSION: Final = "X-Autellix-Session"
THREAD: Final = "X-Autellix-Thread"
PARENT: Final = "X-Autellix-Parent"
PARENT_SESSION: Final = "X-Autellix-Parent-Session"
SEQ: Final = "X-Autellix-Seq"
CALL: Final = "X-Autellix-Call"
NODE: Final = "X-Autellix-Node"
CONVERSATION: Final = "X-Autellix-Conversation"
CLIENT: Final = "X-Autellix-Client"
VLLM_SESSION: Final = "X-Session-ID"  # vLLM's own name for the same value
VERSION: Final = "X-Autellix-Version"  # in responses
LEASE: Final = "X-Autellix-Lease"  # in responses

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
)

#: The last part of a path that carries a call; anything else (models, files) is never tagged.
CALL_PATHS: Final = ("/chat/completions", "/completions", "/responses", "/embeddings", "/messages")

_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
_PARENT = re.compile(r"(\d{1,9}):(\d{1,9})\Z")
_NUMBER = re.compile(r"\d{1,9}\Z")


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


def parse_parent(value: str) -> ParentCall | None:
    """Return the fork point in ``thread:seq``, or None if ``value`` is malformed.

    >>> parse_parent("0:3")
    ParentCall(thread=0, seq=3)
    """
    match = _PARENT.match(value) if value.isascii() else None
    return ParentCall(int(match[1]), int(match[2])) if match else None


def is_call_path(path: str) -> bool:
    """Return whether a request to ``path`` is a call of a model.

    >>> is_call_path("/v1/chat/completions"), is_call_path("/v1/models")
    (True, False)
    """
    return path.partition("?")[0].rstrip("/").endswith(CALL_PATHS)

"""Which of several gateway processes owns a program, a call or a stored response.

It follows from the id alone, so that every process says the same and nobody has to be asked. A
program's id is a hash already. A call's id ends as its owner wants it, and the id of a stored
response holds the call's: so it is found where its call was made.

Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from .call_tag import find_call
from .program import program_id_of

COUNT_MAX: Final = 64
ROOTED: Final = "response:"  # sessions that are named after the stored response they began with
_HEX: Final = 4  # digits of an id that say whose it is
RANGE: Final = 16**_HEX


@lru_cache(maxsize=8192)
def owner_of_session(scope: str, session: str, count: int) -> int:
    """Return who of ``count`` processes owns a session of one key."""
    if session.startswith(ROOTED) and (owner := owner_of_response(session, count)) is not None:
        return owner
    found = owner_of_id(program_id_of(scope, session), count)
    assert found is not None
    return found


def owner_of_response(response_id: str, count: int) -> int | None:
    """Return who holds a stored response; None: it is none of ours."""
    tag = find_call(response_id)
    return None if tag is None else owner_of_id(tag.call_id, count)


def owner_of_id(hex_id: str, count: int) -> int | None:
    """Return whose a call or a program is by its id; None: that is no id of ours.

    >>> [owner_of_id(i, 2) for i in ("c0ffee00", "c0ffee01", "call-1", "zz")]
    [0, 1, None, None]
    """
    digits = hex_id[-_HEX:]
    if len(digits) < _HEX or not all(digit in "0123456789abcdef" for digit in digits):
        return None
    return int(digits, 16) % count


def owned_digits(index: int, count: int, chance: int) -> str:
    """Return the last digits of an id that a process is to own.

    Args:
        index: The process.
        count: Of how many.
        chance: A random number below ``RANGE // count``.

    >>> owned_digits(1, 2, 0x1234)
    '2469'
    """
    return f"{chance * count + index:0{_HEX}x}"

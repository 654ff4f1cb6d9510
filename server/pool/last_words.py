"""What an engine wrote before it ended: its cause, and the last lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

LINES_SHOWN = 20
_ERROR = re.compile(r"(?:^|[\s|])((?:\w+\.)*\w*(?:Error|Exception)\b: .+)")
# vLLM's front end ends with an error of its own that points at the real one.
_POINTS_UP = "See root cause above"


def cause_in(lines: Sequence[str]) -> str | None:
    """Return the last error that is not about another one, or None.

    >>> cause_in(["(EngineCore) ValueError: too few blocks", "RuntimeError: See root cause above."])
    'ValueError: too few blocks'
    """
    found = [match[1] for line in lines if (match := _ERROR.search(line)) is not None]
    return next((text.strip() for text in reversed(found) if _POINTS_UP not in text), None)


def last_words(lines: Sequence[str]) -> str:
    """Return what to tell of an engine that ended: the cause, if there is one, and the end."""
    shown = list(lines[-LINES_SHOWN:])
    cause = cause_in(lines)
    if cause is not None and not any(cause in line for line in shown):
        shown.insert(0, cause)
    return "\n".join(shown)

"""What the server writes to its log: one line for each event, as text or as JSON.

A line holds what happened to calls, programs and engines, and never what was said in them: no
prompt, no answer, no key, and ids only as they are known in here. What an exception says may quote
a client, so of an exception only its type and the way to it are written, unless it is one of those
that speak of the machine or of settings.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import traceback
from typing import Any, Final, Literal, TextIO

from autellix.errors import AutellixError

Form = Literal["text", "json"]

CALLS: Final = "autellix.calls"  # one event a call
FRAMES_MAX: Final = 30
_SAYS_NOTHING_PRIVATE: Final = (AutellixError, OSError)
_QUOTES_EXCEPTIONS: Final = ("asyncio",)  # loggers whose later lines are the repr of one


def set_up(level: str, form: Form, *, calls: bool = False, stream: TextIO | None = None) -> None:
    """Send this process's log to ``stream``; other libraries' only from warnings on.

    Args:
        level: From where on our own events are written: debug, info, warning or error.
        form: How.
        calls: Whether each call is an event.
        stream: None: standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("autellix").setLevel(level.upper())
    logging.getLogger(CALLS).setLevel(logging.INFO if calls else logging.WARNING)


def fields(**values: Any) -> dict[str, Any]:
    """Return the ``extra`` of a logging call: figures that go with an event."""
    return {"fields": values}


class TextLines(logging.Formatter):
    """``12:34:56 engine e0 is ready  starts=1``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        clock = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")  # noqa: DTZ006
        parts = [clock, _message(record)]
        more = getattr(record, "fields", None) or {}
        parts += (f"{name}={_plain(value)}" for name, value in more.items() if value is not None)
        if record.exc_info and record.exc_info[1] is not None:
            error, way = _exception(record.exc_info[1])
            parts += (f"error={error}", f"at={' < '.join(reversed(way))}")
        return " ".join(parts).replace("\r", "").replace("\n", " | ")


class JsonLines(logging.Formatter):
    """``{"time": …, "level": "info", "logger": …, "event": …, "message": …, …}``.

    ``event`` is the message without its figures, the same each time.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        document: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str(record.msg) if record.args else _message(record),
            "message": _message(record),
        }
        document.update(getattr(record, "fields", None) or {})
        if record.exc_info and record.exc_info[1] is not None:
            document["error"], document["at"] = _exception(record.exc_info[1])
        return json.dumps(document, default=str, ensure_ascii=False)


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text.partition("\n")[0] if record.name in _QUOTES_EXCEPTIONS else text


def _exception(error: BaseException) -> tuple[str, list[str]]:
    """Return an exception without what it may quote: its type, and where it came by."""
    name = type(error).__name__
    if isinstance(error, _SAYS_NOTHING_PRIVATE):
        name += f": {error}"
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_MAX:]
    return name, [f"{_file(f.filename)}:{f.lineno} {f.name}" for f in frames]


def _file(path: str) -> str:
    """Return a file by its last two parts; the folders above are the machine's business."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])


def _plain(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text

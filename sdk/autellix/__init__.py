"""Tag every LLM call of an agent with its program and thread; the server does the rest.

Importing this is enough. It reads the environment and waits for the HTTP clients to be imported; it
does no I/O, starts nothing and loads nothing but the standard library. ``AUTELLIX_ENABLED=0`` turns
it off.
"""

from __future__ import annotations

import os as _os

from .finder import wait as _wait

TYPE_CHECKING = False  # what type checkers take for true, without importing typing

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .carrier import attach, inject
    from .checkup import Report, doctor
    from .client import Client, flush, init, shutdown, status, uninstall
    from .errors import AutellixError, AutellixWarning, CarrierError, ConfigError
    from .program import (
        ThreadInfo,
        current_session,
        current_thread,
        end_session,
        headers,
        propagate,
        session,
        start_session,
        thread,
        tool,
    )
    from .runtime import Status
    from .sessions import Session
    from .wrapping import event_hooks, wrap

#: Where each public name lives; loaded when first asked for, so that importing stays quick.
_HOMES = {
    "AutellixError": "errors", "AutellixWarning": "errors", "CarrierError": "errors",
    "Client": "client", "ConfigError": "errors", "Report": "checkup", "Session": "sessions",
    "Status": "runtime", "ThreadInfo": "program", "attach": "carrier",
    "current_session": "program", "current_thread": "program", "doctor": "checkup",
    "end_session": "program", "event_hooks": "wrapping", "flush": "client",
    "headers": "program", "init": "client", "inject": "carrier", "propagate": "program",
    "session": "program", "shutdown": "client", "start_session": "program", "status": "client",
    "thread": "program", "tool": "program", "uninstall": "client", "wrap": "wrapping",
}  # fmt: skip

__all__ = [
    "AutellixError", "AutellixWarning", "CarrierError", "Client", "ConfigError", "Report",
    "Session", "Status", "ThreadInfo", "__version__", "attach", "current_session",
    "current_thread", "doctor", "end_session", "event_hooks", "flush", "headers", "init", "inject",
    "propagate", "session", "shutdown", "start_session", "status", "thread", "tool", "uninstall",
    "wrap",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name):
        """Load a public name from its module, and put the hooks in place."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        from .arming import arm

        arm()
        value = getattr(import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)


_off = _os.environ.get("AUTELLIX_ENABLED", "1").strip().lower() in ("0", "false", "no", "off")
if not _off and _wait():  # a client was imported before us
    from .arming import arm as _arm

    _arm()

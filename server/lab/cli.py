"""The lab's commands: ``autellix simulate``, ``bench``, ``report`` and ``trace``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence


def simulate(argv: Sequence[str] | None = None) -> int:
    """Run the simulator; see docs/lab.md."""
    from . import simulate_command

    return _run(simulate_command.main, "simulate", argv)


def trace(argv: Sequence[str] | None = None) -> int:
    """List, check and record traces."""
    from . import trace_command

    return _run(trace_command.main, "trace", argv)


def _run(command: Callable[[Sequence[str]], int], name: str, argv: Sequence[str] | None) -> int:
    """Run a command and turn a user's mistake into one line and status 2."""
    from .arms import UnknownArmError
    from .cost_model import ProfileError
    from .trace import TraceError

    try:
        return command(sys.argv[2:] if argv is None else argv)
    except (TraceError, ProfileError, UnknownArmError, argparse.ArgumentTypeError) as error:
        sys.stderr.write(f"autellix {name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130

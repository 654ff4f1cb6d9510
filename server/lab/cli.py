"""The lab's commands: ``autellix simulate``, ``bench``, ``report`` and ``trace``."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence


def simulate(argv: Sequence[str] | None = None) -> int:
    """Run the simulator; see docs/lab.md."""
    from . import simulate_command

    return _run(simulate_command.main, "simulate", argv)


def trace(argv: Sequence[str] | None = None) -> int:
    """List, check and record traces."""
    from . import trace_command

    return _run(trace_command.main, "trace", argv)


def report(argv: Sequence[str] | None = None) -> int:
    """Draw what runs have left."""
    from . import report_command

    return _run(report_command.main, "report", argv)


def bench(argv: Sequence[str] | None = None) -> int:
    """Replay a trace against live servers through the SDK."""
    from . import bench_command

    return _run(bench_command.main, "bench", argv)


bench.uses_sdk = True  # type: ignore[attr-defined]  # the command line arms the SDK for it


def _run(command: Callable[[Sequence[str]], int], name: str, argv: Sequence[str] | None) -> int:
    """Run a command and turn a user's mistake into one line and status 2."""
    from autellix.errors import ConfigError

    from ..policy.balancer import UnknownPlacementError
    from .arms import UnknownArmError
    from .cost_model import ProfileError
    from .report import ReportError
    from .serve_arms import ServerError
    from .trace import TraceError

    mistakes = (
        ArgumentTypeError, ConfigError, ProfileError, ReportError, ServerError, TraceError,
        UnknownArmError, UnknownPlacementError,
    )  # fmt: skip

    try:
        return command(sys.argv[2:] if argv is None else argv)
    except mistakes as error:
        sys.stderr.write(f"autellix {name}: {error}\n")
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130

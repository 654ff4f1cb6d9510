"""The server: a gateway, a pool of stock vLLM engines, and the scheduler inside each engine.

The names below are the Python API (docs/python-api.md). They are loaded when they are asked for,
since an engine imports this package too and needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gateway.client import CallError
    from .generation import Completion, Generation, Output
    from .multi_engine import MultiEngine, TooManyCallsError
    from .programs import ProgramEngine, ProgramResult, ProgramsRun, run_on, run_programs

__all__ = [
    "CallError", "Completion", "Generation", "MultiEngine", "Output", "ProgramEngine",
    "ProgramResult", "ProgramsRun", "TooManyCallsError", "run_on", "run_programs",
]  # fmt: skip

_HOMES = {
    "CallError": "gateway.client",
    "Completion": "generation",
    "Generation": "generation",
    "MultiEngine": "multi_engine",
    "Output": "generation",
    "ProgramEngine": "programs",
    "ProgramResult": "programs",
    "ProgramsRun": "programs",
    "TooManyCallsError": "multi_engine",
    "run_on": "programs",
    "run_programs": "programs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)

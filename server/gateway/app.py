"""The gateway's application: what is where, and who owns what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from .. import types
from ..clock import Clock
from ..process_table import ProcessTable
from .config import GatewayConfig


def create_app(
    *,
    config: GatewayConfig,
    table: ProcessTable,
    engines: types.Engines,
    place: Callable[[types.CallInfo, Sequence[types.Engine]], types.Engine],
    clock: Clock,
    key: bytes,
    forget_programs: Callable[[Sequence[str]], None],
    engine_views: Callable[[], Sequence[Mapping[str, Any]]],
) -> web.Application:
    """Return the gateway; run it with `make_runner`, which sets what the relay relies on.

    Args:
        config: The gateway's settings.
        table: The process table; the caller may fold the engines' reports into it.
        engines: The pool.
        place: Chooses among the ready engines, of which there is at least one.
        clock: The clock of ``table``.
        key: The key that seals program ids; the engines hold the same.
        forget_programs: Told of programs that are over.
        engine_views: Rows for ``GET /autellix/v1/engines``.
    """
    raise NotImplementedError


def make_runner(app: web.Application) -> web.AppRunner:
    """Return a runner with the settings that the relay needs.

    A handler is cancelled when its client hangs up, which is what cancels the engine's call.
    """
    return web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=75.0)

"""The gateway's application: what is where, and who owns what.

Only routes in these tables reach an engine. vLLM has others that stop, reload or reconfigure it;
they are nobody's business but the pool's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from autellix import wire
from autellix.errors import ConfigError

from .. import types
from ..balancing import EngineBalancer
from ..clock import Clock
from ..process_table import ProcessTable
from ..tracing import TracingConfig, open_tracer
from . import calls, health, relay, sessions
from .backend import open_backend
from .bodies import BodyRoom
from .book import CallBook
from .config import GatewayConfig
from .explain import explain_errors
from .garbage import rare_collections
from .keys import parse_keys
from .models import ModelIndex
from .responses import ResponseHomes
from .server import make_runner
from .siblings import Siblings
from .state import GATEWAY, Gateway
from .tasks import keep_running
from .upstream import Connections

__all__ = ["create_app", "make_runner"]

_log = logging.getLogger(__name__)

SWEEP_S: Final = 1.0
CHECKED_MAX: Final = 500  # programs that are checked each second

#: Calls: charged to a program. Those that vLLM gives no session to are charged by wall time alone.
CALL_ROUTES: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages",
    "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
#: Not calls: answered by any ready engine.
PLAIN_ROUTES: Final = (
    ("GET", "/v1/models"), ("GET", "/v1/models/{model:.+}"), ("GET", "/version"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/messages/count_tokens"),
)  # fmt: skip
#: About a stored response: answered by the engine that holds it.
STORED_ROUTES: Final = (
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
)


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
    siblings: Siblings | None = None,
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
        siblings: Of several gateway processes on one address; None: it is the only one.

    Raises:
        ConfigError: the keys in ``config`` are malformed, or its longest body finds no room.
    """
    if config.body_bytes_total_max < config.body_bytes_max:
        raise ConfigError(
            f"gateway.body_bytes_total_max: {config.body_bytes_total_max} is not allowed; allowed "
            f"is body_bytes_max, {config.body_bytes_max}, or more"
        )
    middlewares = [explain_errors, *([siblings.middleware] if siblings is not None else ())]
    app = web.Application(client_max_size=config.body_bytes_max, middlewares=middlewares)
    app[GATEWAY] = Gateway(
        config=config,
        table=table,
        engines=engines,
        place=place,
        clock=clock,
        key=key,
        forget_programs=forget_programs,
        engine_views=engine_views,
        tenants=parse_keys(config.api_keys),
        connections=Connections(connect_s=config.connect_s, idle_s=config.upstream_idle_s),
        homes=ResponseHomes(),
        models=ModelIndex(engines),
        bodies=BodyRoom(config.body_bytes_total_max),
        siblings=siblings,
    )
    if config.calls_remembered:
        app[GATEWAY].book = CallBook(
            clock, receipts=config.receipts, calls_max=config.calls_remembered
        )
    _add_routes(app.router)
    if siblings is not None:
        siblings.add_routes(app)
    app.cleanup_ctx.append(_run)
    return app


def _add_routes(router: web.UrlDispatcher) -> None:
    for path in CALL_ROUTES:
        router.add_post(path, relay.relay_call)
    for method, path in PLAIN_ROUTES:
        router.add_route(method, path, relay.relay_plain)
    for method, path in STORED_ROUTES:
        router.add_route(method, path, relay.relay_stored)
    router.add_get("/health", health.health)
    router.add_get("/live", health.live)
    api = wire.API_PREFIX
    router.add_get(f"{api}/info", sessions.info)
    router.add_get(f"{api}/programs", sessions.list_programs)
    router.add_get(f"{api}/engines", sessions.list_engines)
    router.add_get(f"{api}/calls", calls.list_calls)
    router.add_get(f"{api}/calls/{{call}}", calls.get_call)
    router.add_get(f"{api}/sessions", sessions.list_sessions)
    router.add_post(f"{api}/sessions", sessions.create_session)
    router.add_post(f"{api}/sessions/heartbeat", sessions.heartbeat)
    router.add_get(f"{api}/sessions/{{session}}", sessions.get_session)
    router.add_put(f"{api}/sessions/{{session}}", sessions.put_session)
    router.add_delete(f"{api}/sessions/{{session}}", sessions.delete_session)
    router.add_post(f"{api}/sessions/{{session}}/heartbeat", sessions.heartbeat_one)
    router.add_post(f"{api}/sessions/{{session}}/tools", sessions.tool_hint)


def attach_balancer(gateway: Gateway, balancer: EngineBalancer, tracing: TracingConfig) -> None:
    """Let a balancer know of calls that are over, and the book of the balancer."""
    gateway.call_over = balancer.call_over
    if gateway.book is not None:
        clock = gateway.clock
        gateway.book.rule = balancer.rule
        gateway.book.tracer = open_tracer(tracing, lambda: clock.unix_s() - clock.now_s())
        gateway.book.balancer_leaks = lambda: balancer.leaks


async def _run(app: web.Application) -> AsyncIterator[None]:
    """Own the sweeping of the table, what remembers it and the connections to the engines."""
    gateway = app[GATEWAY]
    if gateway.siblings is not None:
        await gateway.siblings.open()
    backend = open_backend(gateway)
    tasks = [
        keep_running("sweep", lambda: _sweep(gateway), gateway),
        keep_running("models", gateway.models.run, gateway),
    ]
    if backend is not None:
        _log.info("%d sessions are back", await backend.restore())
        tasks.append(keep_running("state", backend.run, gateway))
    with rare_collections():
        yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if backend is not None:
        await backend.flush()
        await backend.close()
    if gateway.book is not None:
        await gateway.book.close()
    gateway.connections.close()
    if gateway.siblings is not None:
        await gateway.siblings.close()


async def _sweep(gateway: Gateway) -> None:
    """Let leases run out, and look at some of the table each second, in use or idle."""
    said: list[str] = []
    while True:
        slept_s = gateway.clock.now_s()
        await asyncio.sleep(SWEEP_S)
        if gateway.book is not None:
            gateway.book.tick(gateway.clock.now_s() - slept_s - SWEEP_S)
        more = True
        while more:
            now_s = gateway.clock.now_s()
            over = gateway.table.sweep(now_s)
            if over:
                gateway.forget_programs(over)
                if gateway.book is not None:
                    programs = (gateway.table.get(program_id) for program_id in over)
                    gateway.book.programs_over(p for p in programs if p is not None)
            more = gateway.table.has_due(now_s)
            await asyncio.sleep(0)  # calls go on in between
        wrong = gateway.table.check_integrity(programs_max=CHECKED_MAX)
        if wrong:
            gateway.count("table unsound")
            if wrong != said:
                _log.error("the process table does not add up: %s", "; ".join(wrong[:5]))
            said = wrong

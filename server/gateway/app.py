"""The gateway's application: what is where, and who owns what.

Only routes in these tables reach an engine. vLLM has others that stop, reload or reconfigure it;
they are nobody's business but the pool's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from autellix import wire

from .. import types
from ..clock import Clock
from ..process_table import ProcessTable
from . import health, relay, sessions
from .config import GatewayConfig
from .errors import ApiError, NotFound
from .garbage import rare_collections
from .journal import Journal
from .keys import parse_keys
from .responses import ResponseHomes
from .server import make_runner
from .state import GATEWAY, Gateway
from .upstream import CLIENT_BUFFER_BYTES, Connections

__all__ = ["create_app", "make_runner"]

_log = logging.getLogger(__name__)

SWEEP_S: Final = 1.0

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

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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

    Raises:
        ConfigError: the keys in ``config`` are malformed.
    """
    app = web.Application(client_max_size=config.body_bytes_max, middlewares=[_explain_errors])
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
        admins=parse_keys(config.admin_keys),
        connections=Connections(connect_s=config.connect_s, idle_s=config.upstream_idle_s),
        homes=ResponseHomes(),
    )
    _add_routes(app.router)
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
    router.add_get(f"{api}/sessions", sessions.list_sessions)
    router.add_post(f"{api}/sessions", sessions.create_session)
    router.add_post(f"{api}/sessions/heartbeat", sessions.heartbeat)
    router.add_get(f"{api}/sessions/{{session}}", sessions.get_session)
    router.add_put(f"{api}/sessions/{{session}}", sessions.put_session)
    router.add_delete(f"{api}/sessions/{{session}}", sessions.delete_session)
    router.add_post(f"{api}/sessions/{{session}}/heartbeat", sessions.heartbeat_one)
    router.add_post(f"{api}/sessions/{{session}}/tools", sessions.tool_hint)


async def _run(app: web.Application) -> AsyncIterator[None]:
    """Own the sweeping of the table, the journal and the connections to the engines."""
    gateway = app[GATEWAY]
    tasks = [asyncio.create_task(_sweep(gateway), name="gateway sweep")]
    journal = None
    if gateway.config.state not in ("", ":memory:"):
        journal = Journal(Path(gateway.config.state), gateway.table, gateway.clock)
        _log.info("%d sessions are back from the journal", journal.restore())
        tasks.append(asyncio.create_task(journal.run(), name="gateway journal"))
    with rare_collections():
        yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if journal is not None:
        await journal.flush()
        journal.close()
    gateway.connections.close()


async def _sweep(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        more = True
        while more:
            now_s = gateway.clock.now_s()
            over = gateway.table.sweep(now_s)
            if over:
                gateway.forget_programs(over)
            more = gateway.table.has_due(now_s)
            await asyncio.sleep(0)  # calls go on in between


@web.middleware
async def _explain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer every error as OpenAI's clients expect it."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=CLIENT_BUFFER_BYTES)
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = NotFound(f"{request.method} {request.path[:256]}: {error.reason}").response()
        answer.set_status(error.status)
        for name, value in error.headers.items():
            if name.lower() == "allow":
                answer.headers[name] = value
        return answer
    except ConnectionError:
        raise  # the client has gone: there is nobody to tell
    except Exception:  # noqa: BLE001  (logged; the client is told)
        _log.exception("a mistake in the gateway")
        return ApiError("the gateway made a mistake; its log says more").response()

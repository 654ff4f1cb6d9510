"""Whether the gateway can serve: it can when an engine can."""

from __future__ import annotations

import orjson
from aiohttp import web

from .state import GATEWAY


async def health(request: web.Request) -> web.Response:
    """Answer 200 if an engine is ready, else 503; the body says how each engine is."""
    gateway = request.app[GATEWAY]
    states = {engine.engine_id: engine.state.value for engine in gateway.engines.all()}
    ready = bool(gateway.ready())
    return web.Response(
        status=200 if ready else 503,
        body=orjson.dumps({"status": "ready" if ready else "not ready", "engines": states}),
        content_type="application/json",
    )


async def live(_request: web.Request) -> web.Response:
    """Answer 200 as long as the gateway itself runs."""
    return web.json_response({"status": "live"})

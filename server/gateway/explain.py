"""Every error of a handler, as OpenAI's clients expect it; the outermost layer of both sites."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from .errors import ApiError, NotFound
from .request import give_room_back
from .upstream import CLIENT_BUFFER_BYTES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


@web.middleware
async def explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as OpenAI's clients expect it."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=CLIENT_BUFFER_BYTES)
    try:
        await request.writer.drain()  # what is answered in small pieces is bounded too
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
    finally:
        give_room_back(request)

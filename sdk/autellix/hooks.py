"""The hooks on the clients: where a call gets its tags.

The first net is ``BaseClient._build_request`` of the OpenAI client (and of Anthropic's, which is
generated from the same template): one method for sync and async, passed once per attempt. It is
private, so it may vanish; the second net is the public ``send`` of ``httpx`` and ``httpx2``. It
leaves a request alone that already carries our tags. Whatever fails in here is counted, and the
call goes out as the user made it. Responses and streams are never touched.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

from . import wire
from .config import Origin, default_port
from .runtime import get_runtime

if TYPE_CHECKING:
    from .runtime import Runtime

MARK = "__autellix_original__"


def tag_request(runtime: Runtime, request: Any, call_id: str | None, hook: str) -> None:
    """Add our headers to an httpx or httpx2 request, if it is a call to an allowed origin.

    A header that the user set stays. May raise; the callers catch.
    """
    url = request.url
    if not wire.is_call_path(url.path):
        return
    headers = request.headers
    if wire.SESSION in headers:
        return
    scheme, host, port = url.scheme, url.host, url.port
    if not runtime.origins.allow(scheme, host, port):
        runtime.count("foreign")
        runtime.warn("foreign", f"{host} gets no tags: it is not a configured server", "info")
        return
    origin = Origin(scheme, host, port or default_port(scheme))
    if hook == "httpx" and runtime.last_untagged() is request:
        return  # the first net has looked at it already
    tags = runtime.tag(origin, call_id, hook, headers.get("authorization"))
    if tags is None:
        runtime.last_untagged = weakref.ref(request)
        return
    for name, value in tags:
        if name == wire.VLLM_SESSION and name in headers:
            continue
        headers[name] = value


def wrap_build_request(original: Any) -> Any:
    """Return ``_build_request`` such that what it builds is tagged."""

    @wraps(original)
    def _build_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        runtime = get_runtime()
        if not runtime.is_off:
            try:
                options = args[0] if args else kwargs.get("options")
                call_id = getattr(options, "idempotency_key", None)
                tag_request(runtime, request, call_id, "openai")
            except Exception as error:  # noqa: BLE001 - nothing of ours may fail a user's call
                runtime.note_error("openai hook", error)
        return request

    return _build_request


def wrap_send(original: Any) -> Any:
    """Return the sync ``send`` of an HTTP client such that calls get tagged."""

    @wraps(original)
    def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _tag_safely(request, "httpx")
        return original(self, request, *args, **kwargs)

    return send


def wrap_async_send(original: Any) -> Any:
    """Return the async ``send`` of an HTTP client such that calls get tagged."""

    @wraps(original)
    async def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _tag_safely(request, "httpx")
        return await original(self, request, *args, **kwargs)

    return send


def _tag_safely(request: Any, hook: str) -> None:
    runtime = get_runtime()
    if runtime.is_off:
        return
    try:
        tag_request(runtime, request, None, hook)
    except Exception as error:  # noqa: BLE001 - nothing of ours may fail a user's call
        runtime.note_error(f"{hook} hook", error)

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
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from . import wire
from .runtime import get_runtime

if TYPE_CHECKING:
    from .runtime import Runtime

MARK = "__autellix_original__"
_key_of = itemgetter(1)
_keeps_list: dict[Any, bool] = {}  # two classes at most: of httpx and of httpx2


def tag_request(
    runtime: Runtime, request: Any, call_id: str | None, hook: str, *, is_retry: bool = False
) -> None:
    """Add our headers to an httpx or httpx2 request, if it is a call to an allowed origin.

    A header that the user set stays. May raise; the callers catch.
    """
    # On the path of every call: the usual answers are looked up here, only the others by a call.
    url, headers = request.url, request.headers
    target = url.raw_path
    if not (target.endswith(wire.CALL_TARGETS) or wire.is_call_target(target)):
        return
    entries = headers._list if _keeps_list.get(type(headers)) else list_of(headers)
    present = names_in(headers) if entries is None else set(map(_key_of, entries))
    is_new = present.isdisjoint(wire.TAG_KEYS)  # of all that we may add, none is there
    if not is_new and runtime.mark in present:
        return
    place = (url.scheme, url.host, url.port)
    origin = runtime.origins.known.get(place) or runtime.origins.allow(*place)
    if origin is None:
        runtime.count("foreign")
        runtime.warn("foreign", f"{url.host} gets no tags: it is not a configured server", "info")
        return
    if hook == "httpx" and runtime.last_untagged() is request:
        return  # the first net has looked at it already
    tags = runtime.tag(origin, call_id, hook, headers, is_retry=is_retry, request=request)
    if tags is None:
        runtime.last_untagged = weakref.ref(request)
        return
    if not is_new:
        tags = [tag for tag in tags if tag[1] not in present]
    if entries is not None:
        entries += tags
        return
    for name, _, value in tags:
        headers[name.decode()] = value.decode()


def names_in(headers: Any) -> set[bytes]:
    """Return the lower-case names of headers."""
    return {name.lower().encode() for name in headers}


def list_of(headers: Any) -> list[wire.Tag] | None:
    """Return the list that these headers are kept in, if that is how their class keeps them."""
    kind = type(headers)
    known = _keeps_list.get(kind)
    if known is None:
        known = _keeps_list[kind] = _does_keep_list(kind)
    return headers._list if known else None


def _does_keep_list(kind: Any) -> bool:
    """Return whether this class keeps its headers as (name, lower-case name, value) in a list.

    Setting a header by the public way costs a scan of all of them; there are six to set. The
    short way is taken only if this class, tried on one header, is built as expected.
    """
    try:
        one = kind([("A", "b")])
        one._list.append((b"C", b"c", b"d"))
        return bool(one._list[0] == (b"A", b"a", b"b") and one["c"] == "d" and len(one) == 2)
    except Exception:  # noqa: BLE001 - any surprise means the public way
        return False


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
                is_retry = bool(kwargs.get("retries_taken"))
                tag_request(runtime, request, call_id, "openai", is_retry=is_retry)
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
        headers = request.headers
        entries = headers._list if _keeps_list.get(type(headers)) else None
        if entries and entries[-1][1] == runtime.mark:
            return  # the first net has put it there, as the last one
        tag_request(runtime, request, None, hook)
    except Exception as error:  # noqa: BLE001 - nothing of ours may fail a user's call
        runtime.note_error(f"{hook} hook", error)

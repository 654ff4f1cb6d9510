"""Tags without a patch: ``event_hooks`` for an HTTP client, and ``wrap`` for what holds one."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar

from . import wire
from .errors import AutellixWarning
from .hooks import names_in, tag_request
from .runtime import get_runtime

T = TypeVar("T")

#: The package of a class → the adapter that wraps it, loaded only when such an object comes.
_ADAPTERS: Final = {
    "langgraph": ("autellix.integrations.langgraph", "wrap_graph"),
    "langchain_core": ("autellix.integrations.langchain", "wrap"),
    "autogen_core": ("autellix.integrations.autogen", "wrap_runtime"),
}
_OURS: Final = (
    *wire.REQUEST_HEADERS, wire.VLLM_SESSION, wire.DYNAMO_SESSION, wire.DYNAMO_PARENT,
)  # fmt: skip


def _on_request(request: Any) -> None:
    runtime = get_runtime()
    if runtime.is_off:
        return
    try:
        url = request.url
        if not runtime.origins.allow(url.scheme, url.host, url.port):
            # A redirect to a stranger: the client has copied our headers along.
            is_tagged = runtime.mark in names_in(request.headers)
            for name in _OURS if is_tagged else ():
                request.headers.pop(name, None)
            return
        tag_request(runtime, request, None, "event")
    except Exception as error:  # noqa: BLE001 - nothing of ours may fail a user's call
        runtime.note_error("event hook", error)


async def _on_request_async(request: Any) -> None:
    _on_request(request)


def event_hooks(async_: bool = False) -> dict[str, list[Callable[..., Any]]]:
    """Return ``event_hooks`` for an httpx or httpx2 client; runs at every hop of a redirect.

    >>> list(event_hooks())
    ['request']
    """
    return {"request": [_on_request_async if async_ else _on_request]}


def wrap(obj: T, **options: Any) -> T:
    """Tag the calls of one object, with no patch: the same object, or one of the same type.

    Args:
        obj: An OpenAI or Anthropic client, an httpx or httpx2 client, or AutoGen's model client:
            its calls get tags. A LangGraph graph, a LangChain runnable, an AutoGen team or
            runtime class: each run becomes a session.
        options: For the latter: passed on to the adapter.
    """
    kind = obj if isinstance(obj, type) else type(obj)
    holder = None if isinstance(obj, type) else _holder_of_hooks(obj)
    if holder is not None:
        hook = _on_request_async if hasattr(holder, "aclose") else _on_request
        hooks = dict(holder.event_hooks)
        if hook not in hooks.get("request", ()):
            hooks["request"] = [*hooks.get("request", ()), hook]
            holder.event_hooks = hooks
        return obj
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for package, (module, name) in _ADAPTERS.items():
        if package in packages:
            adapter = getattr(importlib.import_module(module), name)
            wrapped: T = adapter(obj, **options)
            return wrapped
    warnings.warn(
        f"wrap() knows no way to tag a {kind.__name__}; it is returned as it was",
        AutellixWarning,
        stacklevel=2,
    )
    return obj


def _holder_of_hooks(obj: Any) -> Any:
    """Return the HTTP client: the object, its client, or its client's client; else None."""
    for _ in range(3):
        if hasattr(obj, "event_hooks"):
            return obj
        obj = getattr(obj, "_client", None)
    return None

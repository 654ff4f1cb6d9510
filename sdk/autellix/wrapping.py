"""Tags without a patch: ``event_hooks`` for an HTTP client, and ``wrap`` for what holds one."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar

from . import wire
from .errors import AutellixWarning
from .hooks import tag_request
from .runtime import get_runtime

T = TypeVar("T")

#: The package of a class → the adapter that wraps it, loaded only when such an object comes.
_ADAPTERS: Final = {
    "langgraph": ("autellix.integrations.langgraph", "wrap_graph"),
    "autogen_core": ("autellix.integrations.autogen", "wrap_runtime"),
}
_OURS: Final = (*wire.REQUEST_HEADERS, wire.VLLM_SESSION)


def _on_request(request: Any) -> None:
    runtime = get_runtime()
    if runtime.is_off:
        return
    try:
        url = request.url
        if not runtime.origins.allow(url.scheme, url.host, url.port):
            # A redirect to a stranger: the client has copied our headers along.
            for name in _OURS if wire.SESSION in request.headers else ():
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
        obj: An OpenAI or Anthropic client, an httpx or httpx2 client, a LangGraph graph, or an
            AutoGen runtime class.
        options: For graphs and runtimes: passed on to the adapter.
    """
    kind = obj if isinstance(obj, type) else type(obj)
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for package, (module, name) in _ADAPTERS.items():
        if package in packages:
            adapter = getattr(importlib.import_module(module), name)
            wrapped: T = adapter(obj, **options)
            return wrapped
    holder: Any = obj
    if not hasattr(holder, "event_hooks"):
        holder = getattr(obj, "_client", None)
    if holder is None or not hasattr(holder, "event_hooks"):
        warnings.warn(
            f"wrap() knows no way to tag a {kind.__name__}; it is returned as it was",
            AutellixWarning,
            stacklevel=2,
        )
        return obj
    hook = _on_request_async if hasattr(holder, "aclose") else _on_request
    hooks = dict(holder.event_hooks)
    if hook not in hooks.get("request", ()):
        hooks["request"] = [*hooks.get("request", ()), hook]
        holder.event_hooks = hooks
    return obj

"""Puts the hooks in place, lazily: nothing is imported for it, and nothing happens before it must.

A finder at the front of ``sys.meta_path`` waits for the modules in ``_TARGETS``. It lets the other
finders find the module and only adds a step after it has run; the loader stays what it was.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from . import threads
from .hooks import MARK, wrap_async_send, wrap_build_request, wrap_send
from .runtime import get_runtime

Wrapper = Callable[[Any], Any]

#: module → (the setting that turns it on, class, method, wrapper)
_TARGETS: Final[dict[str, tuple[tuple[str, str, str, Wrapper], ...]]] = {
    "openai._base_client": (("openai", "BaseClient", "_build_request", wrap_build_request),),
    "anthropic._base_client": (("openai", "BaseClient", "_build_request", wrap_build_request),),
    "httpx": (
        ("httpx", "Client", "send", wrap_send),
        ("httpx", "AsyncClient", "send", wrap_async_send),
    ),
    "httpx2": (
        ("httpx", "Client", "send", wrap_send),
        ("httpx", "AsyncClient", "send", wrap_async_send),
    ),
    "concurrent.futures.thread": (
        ("threads", "ThreadPoolExecutor", "submit", threads.wrap_submit),
    ),
    "threading": (("threads", "Thread", "start", threads.wrap_start),),
}

_patched: list[tuple[type, str, Any, Any]] = []
_lock = threading.RLock()


class _Finder:
    """Finds nothing itself; makes the modules we wait for tell us when they have run."""

    def __init__(self) -> None:
        self._asked = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders have for a module we wait for, else None."""
        if name not in _TARGETS or getattr(self._asked, "now", False):
            return None
        self._asked.now = True
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find and finder is not self else None
                if spec is not None:
                    _watch(spec.loader, name)
                    return spec
        finally:
            self._asked.now = False
        return None


def _watch(loader: Any, name: str) -> None:
    """Patch module ``name`` once ``loader`` has run it; leaves the loader as it was then."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        patch_module(name, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader that cannot be told: the other net has to do
        get_runtime().hooks[name] = "not armed: its loader is fixed"


_finder = _Finder()


def arm() -> None:
    """Put every hook in place, or in wait for its module; a second time changes nothing."""
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
            _register_fork()
        for name in _TARGETS:
            module = sys.modules.get(name)
            if module is not None:
                patch_module(name, module)


def patch_module(name: str, module: Any) -> None:
    """Patch the classes of a module that has run; what is not there is noted, never an error."""
    runtime = get_runtime()
    with _lock:
        for setting, class_name, method, wrapper in _TARGETS[name]:
            wanted = runtime.config.threads if setting == "threads" else (
                setting in runtime.config.patch
            )  # fmt: skip
            if not wanted or _finder not in sys.meta_path:
                continue
            where = f"{name}.{class_name}.{method}"
            owner = getattr(module, class_name, None)
            original = vars(owner).get(method) if isinstance(owner, type) else None
            if owner is None or original is None:
                if getattr(getattr(module, "__spec__", None), "_initializing", False):
                    continue  # in the middle of its import: the finder's step comes later
                version = getattr(sys.modules.get(name.partition(".")[0]), "__version__", "?")
                runtime.hooks[where] = "missing"
                runtime.warn(where, f"{where} is not in this version ({version}); next net")
                continue
            if hasattr(original, MARK):
                runtime.hooks[where] = "on"
                continue
            patched = wrapper(original)
            setattr(patched, MARK, original)
            setattr(owner, method, patched)
            _patched.append((owner, method, original, patched))
            runtime.hooks[where] = "on"


def disarm() -> None:
    """Take every hook away; one that somebody else has wrapped since stays, and does nothing."""
    with _lock:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        for owner, method, original, patched in reversed(_patched):
            if vars(owner).get(method) is patched:
                setattr(owner, method, original)
        _patched.clear()
        get_runtime().hooks.clear()


def is_armed() -> bool:
    """Return whether the hooks are in place or in wait."""
    return _finder in sys.meta_path


_fork_registered = False


def _register_fork() -> None:
    global _fork_registered
    if not _fork_registered and hasattr(os, "register_at_fork"):
        _fork_registered = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    get_runtime().after_fork()

"""Puts the hooks in place, and takes them away.

Nothing is imported for it: a module that is not there yet is patched when the finder says that it
has run. Methods are patched, classes never replaced, and each patch is marked, so that none is put
on twice.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from . import finder, threads
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

_armed = False
_patched: list[tuple[type, str, Any, Any]] = []
_lock = threading.RLock()


def module_ran(name: str, module: Any) -> None:
    """A watched module has run: the rest of the SDK is wanted now. Never raises into the import."""
    try:
        arm()
        if not get_runtime().is_off:
            patch_module(name, module)
    except Exception as error:  # noqa: BLE001 - the user's import must not fail for us
        get_runtime().note_error(f"arming {name}", error)


def arm() -> None:
    """Put every hook in place, or in wait for its module; a second time changes nothing."""
    global _armed
    if get_runtime().is_off:
        return
    with _lock:
        _armed = True
        finder.wait()
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
            if not wanted or not _armed:
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
    global _armed
    with _lock:
        _armed = False
        finder.stop()
        for owner, method, original, patched in reversed(_patched):
            if vars(owner).get(method) is patched:
                setattr(owner, method, original)
        _patched.clear()
        get_runtime().hooks.clear()


def is_armed() -> bool:
    """Return whether the hooks are in place or in wait."""
    return _armed


_fork_registered = False


def _register_fork() -> None:
    global _fork_registered
    if not _fork_registered and hasattr(os, "register_at_fork"):
        _fork_registered = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    get_runtime().after_fork()

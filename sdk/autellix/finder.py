"""Waits for the clients to be imported; the only part of the SDK that ``import autellix`` loads.

A finder at the front of ``sys.meta_path`` looks out for a few modules. It lets the other finders
find them and only adds a step after they have run: that loads the SDK proper and puts the hooks in
place. The loader stays what it was. Kept free of imports, so that a script that never calls a model
pays nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Modules after whose import the rest of the SDK is loaded.
CLIENTS = ("openai._base_client", "anthropic._base_client", "httpx", "httpx2")
#: Patched too, but no reason to load anything: without a session there is nothing to inherit.
POOLS = "concurrent.futures.thread"

WATCHED = frozenset((*CLIENTS, POOLS))


class Finder:
    """Finds nothing itself; tells the SDK when a watched module has run."""

    def __init__(self) -> None:
        self._asking: set[str] = set()  # a module is found once at a time: its import lock is held

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders have for a watched module, else None."""
        if name not in WATCHED or name in self._asking:
            return None
        self._asking.add(name)
        try:
            for other in list(sys.meta_path):
                find = getattr(other, "find_spec", None)
                spec = find(name, path, target) if find and other is not self else None
                if spec is not None:
                    _watch(spec.loader, name)
                    return spec
        finally:
            self._asking.discard(name)
        return None


def _watch(loader: Any, name: str) -> None:
    """Put the hooks in place once ``loader`` has run module ``name``; it is as before then."""
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        if name == POOLS and f"{__package__}.arming" not in sys.modules:
            return
        from .arming import module_ran

        module_ran(name, module)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader that cannot be told; the other net has to do
        return


finder = Finder()


def wait() -> bool:
    """Begin to wait; returns whether a watched module is there already."""
    if finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)
    return any(name in sys.modules for name in CLIENTS)


def stop() -> None:
    """Wait no more."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)

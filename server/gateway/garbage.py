"""Python's garbage collector, kept from stopping all calls at once.

A full collection visits every object: with 100,000 programs in the table it stops the loop for
hundreds of milliseconds. Calls and programs make no cycles (see `accounts.Cost` and
`ProcessTable._drop`), so reference counts free them; what is left for the collector is little, and
it may come seldom.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

YOUNG: Final = 5_000  # new objects between two small collections, a millisecond each
MIDDLE: Final = 5
FULL: Final = 10_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect seldom inside; what is there already is not visited at all."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

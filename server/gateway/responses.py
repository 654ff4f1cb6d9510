"""Which engine holds which stored response: such a response lives in one engine's memory only.

What is kept here outlives the gateway, if it keeps a journal or shares its state: the engine may be
one that runs elsewhere and goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from ..types import EngineAddress

HOMES_MAX: Final = 65_536


class ResponseHome(NamedTuple):
    """Where a response is, and whose it is."""

    engine_id: str
    address: EngineAddress  # of the engine's life; a restarted one of ours listens elsewhere
    scope: str
    program_session: str | None


class ResponseHomes:
    """A bounded table of response ids; the longest unused is forgotten first."""

    def __init__(self, homes_max: int = HOMES_MAX) -> None:
        self._homes: OrderedDict[str, ResponseHome] = OrderedDict()
        self._homes_max = homes_max
        self._changed: OrderedDict[str, None] | None = None

    def __len__(self) -> int:
        return len(self._homes)

    def watch(self) -> None:
        """Note from now on what is put, for `take_changed`."""
        self._changed = OrderedDict()

    def take_changed(self) -> list[tuple[str, ResponseHome]]:
        """Return what was put since the last time this was asked."""
        taken = [(i, self._homes[i]) for i in self._changed or () if i in self._homes]
        if self._changed:
            self._changed.clear()
        return taken

    def put_back(self, response_ids: Iterable[str]) -> None:
        """Take homes as changed again, that could not be remembered."""
        for response_id in response_ids:
            self._note(response_id)

    def put(self, response_id: str, home: ResponseHome, *, is_news: bool = True) -> None:
        """Remember where a response is; it is no news if it comes from what is remembered."""
        if is_news:
            self._note(response_id)
        self._homes[response_id] = home
        self._homes.move_to_end(response_id)
        while len(self._homes) > self._homes_max:
            self._homes.popitem(last=False)

    def _note(self, response_id: str) -> None:
        if self._changed is not None:
            self._changed[response_id] = None
            while len(self._changed) > self._homes_max:
                self._changed.popitem(last=False)

    def peek(self, response_id: str) -> ResponseHome | None:
        """Return where a response is, whoever asks; the asker looks at the scope."""
        return self._homes.get(response_id)

    def get(self, response_id: str, scope: str) -> ResponseHome | None:
        """Return where a response is; one of another scope is not there."""
        home = self._homes.get(response_id)
        if home is None or home.scope != scope:
            return None
        self._homes.move_to_end(response_id)
        return home

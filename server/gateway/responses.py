"""Which engine holds which stored response: such a response lives in one engine's memory only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

HOMES_MAX: Final = 65_536


class ResponseHome(NamedTuple):
    """Where a response is, and whose it is."""

    engine_id: str
    address: object  # of the engine's life; a restarted one listens elsewhere and holds nothing
    scope: str
    program_session: str | None


class ResponseHomes:
    """A bounded table of response ids; the longest unused is forgotten first."""

    def __init__(self, homes_max: int = HOMES_MAX) -> None:
        self._homes: OrderedDict[str, ResponseHome] = OrderedDict()
        self._homes_max = homes_max

    def __len__(self) -> int:
        return len(self._homes)

    def put(self, response_id: str, home: ResponseHome) -> None:
        """Remember where a response is."""
        self._homes[response_id] = home
        self._homes.move_to_end(response_id)
        while len(self._homes) > self._homes_max:
            self._homes.popitem(last=False)

    def get(self, response_id: str, scope: str) -> ResponseHome | None:
        """Return where a response is; one of another scope is not there."""
        home = self._homes.get(response_id)
        if home is None or home.scope != scope:
            return None
        self._homes.move_to_end(response_id)
        return home

"""Room for request bodies: how many bytes of them all connections together may hold.

A body takes room as it comes, and gives it back when its call is over, since the gateway keeps it
until then for another engine to try.
"""

from __future__ import annotations

from .errors import Busy


class BodyRoom:
    """See the module.

    Args:
        limit_bytes: How much there is.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.held_bytes = 0
        self._limit_bytes = limit_bytes

    def take(self, count: int) -> bool:
        """Take some; return whether there was so much."""
        held = self.held_bytes + count
        if held > self._limit_bytes:
            return False
        self.held_bytes = held
        return True

    def give(self, count: int) -> None:
        """Give back what was taken."""
        self.held_bytes -= count
        assert self.held_bytes >= 0, "what was not taken cannot be given back"

    def is_full(self) -> Busy:
        """Return the error for a body that finds no room."""
        return Busy(
            f"body: the request bodies of all clients together are {self._limit_bytes} bytes, "
            "which is the most this server holds at once"
        )

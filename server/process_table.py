"""The process table: programs, their threads and calls, and the service they have had.

Pure: time is an argument.
"""

from __future__ import annotations

from typing import Any, Literal

from . import channel

Accounting = Literal["plas", "atlas"]


class ProcessTable:
    """All programs of one gateway."""

    def __init__(
        self, *, accounting: Accounting = "plas", now_s: float = 0.0, lease_s: float = 60.0
    ) -> None:
        self.accounting = accounting

    def fold_report(
        self, engine_id: str, boot_id: str, report: channel.CallReport, now_s: float
    ) -> bool:
        """Charge what an engine measured, once; return whether the report changed anything."""
        raise NotImplementedError

    def program_views(self, now_s: float) -> list[dict[str, Any]]:
        """Return a row for each program, oldest first."""
        raise NotImplementedError

    def loads(self) -> dict[str, int]:
        """Return the calls in flight by engine id."""
        raise NotImplementedError

"""What a scheduling policy is asked, and what comes with a call.

The live scheduler, the simulator and the tests run the same policies; time is passed in.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .call import Call
from .config import PolicyConfig
from .service import Ledger


class Arrival(NamedTuple):
    """A call as it comes in, with what the gateway knew of its program when it sent it off."""

    call_id: str
    program_id: str | None  # None: a program of its own
    service_s: float = 0.0  # the program's attained service, all engines
    wait_s: float = 0.0  # the program's wait, all engines
    program_arrival_s: float | None = None  # on this engine's clock; None: not known


class Policy(Protocol):
    """Where calls queue. Every call: ``arrive``, then any number of events, then one ``leave``."""

    config: PolicyConfig
    ledger: Ledger

    def arrive(self, arrival: Arrival, now_s: float) -> Call:
        """Return the call, in its level, waiting."""
        ...

    def enter(self, call: Call) -> None:
        """Put a call that is in the engine into its level anew, after a change of policy."""
        ...

    def charge(self, calls: Iterable[Call], seconds: float) -> bool:
        """Charge each of these calls; return whether one has changed its level."""
        ...

    def run(self, call: Call, now_s: float) -> None:
        """The call begins to run."""
        ...

    def wait(self, call: Call, now_s: float) -> None:
        """The call was taken out of the batch and waits."""
        ...

    def promote(self, now_s: float) -> list[Call]:
        """Promote the waiting calls that are due; return them with their new keys."""
        ...

    def leave(self, call: Call, now_s: float) -> None:
        """The call is over, however it ended; its service goes to its program."""
        ...

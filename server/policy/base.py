"""What a scheduling policy is asked, and what comes with a call.

The live scheduler, the simulator and the tests run the same policies; time is passed in.

Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol

from .call import Call
from .config import PolicyConfig
from .service import Ledger


class Arrival(NamedTuple):
    """A call as it comes in, with what the gateway knew of its program when it sent it off."""

    call_id: str
    program_id: str | None  # None: a program of its own
    service_s: float = 0.0  # the program's attained service, all engines; see ``by_path``
    wait_s: float = 0.0  # the program's wait, all engines; see ``by_path``
    program_arrival_s: float | None = None  # on this engine's clock; None: not known
    prompt_tokens: int = 0
    hashes: Sequence[Hashable] = ()  # of the blocks of its prompt, each for all tokens before it
    kind: str | None = None  # as the client names programs of this kind
    weight: float = 1.0
    deadline_s: float | None = None  # of the program, on this engine's clock
    by_path: bool | None = None  # whether service and wait are of paths; None: as the policy's own


class Displaced(NamedTuple):
    """A program whose KV loses its place."""

    program_id: str
    hashes: Sequence[Hashable]  # of its blocks, those that it shares with others too
    call_ids: tuple[str, ...]  # of its calls that wait to go on from there


class Policy(Protocol):
    """Where calls queue. Every call: ``arrive``, then any number of events, then one ``leave``."""

    config: PolicyConfig
    ledger: Ledger
    by_work: bool  # whether it wants ``charge_work`` as well

    def arrive(self, arrival: Arrival, now_s: float) -> Call:
        """Return the call, in its level, waiting."""
        ...

    def enter(self, call: Call) -> None:
        """Put a call that is in the engine into its level anew, after a change of policy."""
        ...

    def charge(self, calls: Iterable[Call], seconds: float) -> bool:
        """Charge each of these calls; return whether one has changed its level."""
        ...

    def charge_work(self, parts: Sequence[tuple[Call, int, int]], seconds: float) -> bool:
        """Share a step among its calls; return whether one has changed its place.

        Each comes with its tokens in the step and its context.
        """
        ...

    def run(self, call: Call, now_s: float) -> None:
        """The call begins to run."""
        ...

    def wait(self, call: Call, now_s: float, *, for_slot: bool = False) -> None:
        """The call was taken out of the batch and waits; ``for_slot``: nobody needs its KV."""
        ...

    def promote(self, now_s: float) -> list[Call]:
        """Promote the waiting calls that are due; return them with their new keys."""
        ...

    def leave(self, call: Call, now_s: float) -> None:
        """The call is over, however it ended; its service goes to its program."""
        ...

    def forget(self, program_ids: Iterable[str]) -> None:
        """These programs are over; those with calls when the last one has left."""
        ...

    def note_tool(self, program_id: str, tool: str | None, now_s: float) -> None:
        """The program waits for this tool from now on; None: for none any more."""
        ...

    def note_fetch(self, token_s: float) -> None:
        """It takes so long to save a token's KV elsewhere and fetch it back; endless: it cannot."""
        ...

    def displaced(self) -> list[Displaced]:
        """Return programs whose KV loses its place though they are to come back; each once.

        To be asked before ``evictable``, which lets it go.
        """
        ...

    def evictable(self) -> list[Sequence[Hashable]]:
        """Return the blocks whose KV nobody is expected to want, by their hashes; each once.

        The last block of a chain is of no use without the first, so it is the first to go.
        """
        ...

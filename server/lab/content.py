"""What the calls of a trace say: token ids with real shared prefixes, and their block hashes.

A trace holds token counts only. Here each call gets a segment of its own, an endless sequence of
token ids that differs from every other segment's; its prompt is a prefix of an earlier call's
prompt + output (or of a group's segment) followed by its own segment, and its output goes on in
the same segment. So vLLM's prefix cache finds exactly what the trace says it could find.

Ids are defined so that anybody can make them again (``segment_tokens``). Blocks are hashed from the
ids as in vLLM, each with its parent's hash, but with a cheaper function, and the hashes that a call
shares with an earlier one are taken over instead of computed again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .trace import Call, Prefix, Program

VOCABULARY: Final = 131072
_IDS: Final = list(range(VOCABULARY))  # shared objects: a list of ids then costs 8 bytes a token
_STRIDE: Final = 7919  # a prime: neighbouring segments begin far apart
_HASH_BYTES: Final = 16

Piece = tuple[int, int, int]  # segment, first position in it, tokens


def segment_tokens(segment: int, start: int, stop: int) -> list[int]:
    """Return the token ids at positions ``start``..``stop`` of a segment.

    Positions 0 and 1 hold the segment's number, the rest counts up from a place of its own.

    >>> segment_tokens(5, 0, 4)
    [5, 0, 39597, 39598]
    """
    tokens: list[int] = []
    position = start
    while position < min(stop, 2):
        number = segment if position == 0 else segment // VOCABULARY
        tokens.append(_IDS[number % VOCABULARY])
        position += 1
    while position < stop:
        place = (segment * _STRIDE + position) % VOCABULARY
        take = min(stop - position, VOCABULARY - place)
        tokens += _IDS[place : place + take]
        position += take
    return tokens


class BlockHasher:
    """Hashes a request's full blocks; vLLM calls it when the request is made and as it grows.

    Args:
        block_tokens: Size of a block.
        known: Hashes of the first blocks, from a call that has the same first tokens.
    """

    __slots__ = ("_block_tokens", "_known")

    def __init__(self, block_tokens: int, known: Sequence[bytes] = ()) -> None:
        self._block_tokens = block_tokens
        self._known: Sequence[bytes] | None = known

    def __call__(self, request: Any) -> list[bytes]:
        """Return the hashes of the blocks that have become full since the last time."""
        size = self._block_tokens
        hashes: list[bytes] = []
        have = len(request.block_hashes)
        count = request.num_tokens // size
        if have >= count:
            return hashes
        if self._known:  # the first time: what another call has computed already
            hashes += self._known[have:count]
            self._known = None
        done = have + len(hashes)
        last = hashes[-1] if hashes else (request.block_hashes[-1] if have else b"")
        if done < count:
            tokens = request._all_token_ids[done * size : count * size]
            for at in range(0, len(tokens), size):
                block = array("I", tokens[at : at + size]).tobytes()
                last = hashlib.blake2b(last + block, digest_size=_HASH_BYTES).digest()
                hashes.append(last)
        return hashes


class Segments:
    """Hands out segment numbers: one per call, one per group of programs that share a prefix.

    Args:
        block_tokens: Size of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._next = 0
        self._groups: dict[str, int] = {}
        self._hashes: dict[str, Sequence[bytes]] = {}

    def fresh(self) -> int:
        """Return a segment that nobody has."""
        self._next += 1
        return self._next

    def of_group(self, group: str) -> int:
        """Return the segment that all programs of a group begin with."""
        if group not in self._groups:
            self._groups[group] = self.fresh()
        return self._groups[group]

    def hashes_of_group(self, group: str) -> Sequence[bytes]:
        """Return the hashes of the group's first blocks that are known so far."""
        return self._hashes.get(group, ())

    def learn(self, group: str, hashes: Sequence[bytes]) -> None:
        """Take over the hashes of a group's first blocks if they are more than are known."""
        if len(hashes) > len(self._hashes.get(group, ())):
            self._hashes[group] = hashes


class Prompt(NamedTuple):
    """A call's token ids, and how to go on."""

    tokens: list[int]
    segment: int  # of its own tokens, prompt and output
    output_start: int  # where the output begins in that segment
    shared_tokens: int  # first tokens that stand in an earlier call or in its group
    known_hashes: Sequence[bytes]
    pieces: tuple[Piece, ...] = ()  # where prompt and output come from

    def output_token(self, place: int) -> int:
        """Return the token that the call generates after ``place`` others."""
        position = self.output_start + place
        if position < 2:
            return segment_tokens(self.segment, position, position + 1)[0]
        return _IDS[(self.segment * _STRIDE + position) % VOCABULARY]


class _Laid(NamedTuple):
    """Where a call's prompt + output come from."""

    pieces: tuple[Piece, ...]
    segment: int
    new_tokens: int  # of the prompt, in the call's own segment
    shared_tokens: int


class ProgramContent:
    """The token ids of one running program.

    A call may share a prefix with a sibling that has not begun yet, so what a call says is laid
    down when anybody asks for it first.
    """

    def __init__(self, program: Program, segments: Segments) -> None:
        self._program = program
        self._calls = {call.id: call for call in program.calls}
        self._segments = segments
        self._laid: dict[int, _Laid] = {}
        self._hashes: dict[int, Sequence[bytes]] = {}
        self._references: dict[int, int] = {}
        for call in program.calls:
            if call.cached_prefix_of is not None:
                source = call.cached_prefix_of
                self._references[source] = self._references.get(source, 0) + 1

    def begin(self, call: Call, *, with_tokens: bool = True) -> Prompt:
        """Return the prompt of a call whose parents are over."""
        laid = self._lay(call)
        tokens: list[int] = []
        left = call.prompt_tokens
        for segment, start, count in laid.pieces if with_tokens else ():
            take = min(count, left)
            tokens += segment_tokens(segment, start, start + take)
            left -= take
        known = self._known(call)[: laid.shared_tokens // self._segments.block_tokens]
        return Prompt(tokens, laid.segment, laid.new_tokens, laid.shared_tokens, known, laid.pieces)

    def lay_down(self) -> None:
        """Fix what every call says now, so that it does not depend on which of them begins first.

        The simulator does without: it says nothing that is compared, and most calls of a long run
        are not reached at once.
        """
        for call in self._program.calls:
            self._lay(call)

    def made(self, call: Call, hashes: Sequence[bytes]) -> None:
        """Keep the growing list of a request's hashes for the calls that continue it."""
        if self._references.get(call.id):
            self._hashes[call.id] = hashes
        group = self._group(call)
        if call.cached_prefix_of is None and group is not None:
            shared = min(group.tokens, call.prompt_tokens)
            self._segments.learn(group.group, hashes[: shared // self._segments.block_tokens])

    def _group(self, call: Call) -> Prefix | None:
        return self._program.role_prefixes.get(call.role or "") or self._program.shared_prefix

    def _lay(self, call: Call) -> _Laid:
        laid = self._laid.get(call.id)
        if laid is None:
            prefix = self._prefix(call)
            shared = sum(count for _, _, count in prefix)
            segment = self._segments.fresh()
            new = call.prompt_tokens - shared
            own = (segment, 0, new + call.output_tokens)
            laid = self._laid[call.id] = _Laid((*prefix, own), segment, new, shared)
        return laid

    def _prefix(self, call: Call) -> tuple[Piece, ...]:
        if call.cached_prefix_of is not None:
            source = self._lay(self._calls[call.cached_prefix_of])
            return _cut(source.pieces, call.prefix_tokens)
        group = self._group(call)
        if group is None:
            return ()
        count = min(group.tokens, call.prompt_tokens)
        return ((self._segments.of_group(group.group), 0, count),)

    def _known(self, call: Call) -> Sequence[bytes]:
        source = call.cached_prefix_of
        if source is None:
            group = self._group(call)
            return self._segments.hashes_of_group(group.group) if group is not None else ()
        known = self._hashes.get(source, ())
        self._references[source] -= 1
        if not self._references[source]:
            self._hashes.pop(source, None)
        return known


def _cut(pieces: tuple[Piece, ...], tokens: int) -> tuple[Piece, ...]:
    kept = []
    for segment, start, count in pieces:
        if tokens <= 0:
            break
        kept.append((segment, start, min(count, tokens)))
        tokens -= count
    return tuple(kept)

"""Token ids: shared exactly as far as the trace says, hashed exactly as often as needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.lab import trace
from autellix.server.lab.content import (
    VOCABULARY,
    BlockHasher,
    ProgramContent,
    Segments,
    segment_tokens,
)


def common(one: list[int], two: list[int]) -> int:
    """Return how many first tokens two lists share."""
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(st.integers(1, 10**9), st.integers(0, 300_000), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_segment_is_the_same_in_pieces(segment: int, start: int, one: int, two: int):
    """Cutting a segment anywhere changes no token."""
    middle, stop = start + one, start + one + two
    whole = segment_tokens(segment, start, stop)
    assert whole == segment_tokens(segment, start, middle) + segment_tokens(segment, middle, stop)
    assert len(whole) == one + two
    assert all(0 <= token < VOCABULARY for token in whole)


def test_two_segments_never_begin_alike():
    """The first two tokens name the segment, also past the size of the vocabulary."""
    heads = {tuple(segment_tokens(n, 0, 2)) for n in (*range(1, 500), VOCABULARY + 1, 2**33)}
    assert len(heads) == 501


@pytest.mark.parametrize("name", ["bfcl-gt", "chat-sharegpt", "lats", "claude-code"])
def test_prompts_share_what_the_trace_says(name: str):
    """A prompt's first prefix_tokens are its source's prompt + output, and no token more."""
    program = min(trace.load(name)[:60], key=lambda p: p.largest_tokens)
    content = ProgramContent(program, Segments(16))
    said: dict[int, list[int]] = {}
    for call in program.calls:
        prompt = content.begin(call)
        assert len(prompt.tokens) == call.prompt_tokens
        output = [prompt.output_token(place) for place in range(call.output_tokens)]
        said[call.id] = prompt.tokens + output
        if call.cached_prefix_of is not None:
            shared = min(call.prefix_tokens, len(said[call.cached_prefix_of]))
            assert prompt.shared_tokens == shared
            found = common(prompt.tokens, said[call.cached_prefix_of])
            assert found == shared or prompt.tokens[:shared] == prompt.tokens


def test_programs_of_a_group_share_its_prefix_and_nothing_else():
    """Two programs of one group begin alike for exactly the group's tokens."""
    programs = [p for p in trace.load("bfcl-gt") if p.shared_prefix is not None]
    first = programs[0]
    second = next(p for p in programs[1:] if p.shared_prefix == first.shared_prefix)
    segments = Segments(16)
    one, two = (ProgramContent(p, segments).begin(p.calls[0]) for p in (first, second))
    assert common(one.tokens, two.tokens) == first.shared_prefix.tokens  # type: ignore[union-attr]


def test_known_hashes_change_nothing():
    """A request that takes over hashes has the same ones as if it had computed all."""
    program = trace.load("bfcl-gt")[0]
    content = ProgramContent(program, Segments(16))
    for call in program.calls[:4]:
        prompt = content.begin(call)
        results = []
        for known in (prompt.known_hashes, ()):
            hasher = BlockHasher(16, known)
            request = SimpleNamespace(
                _all_token_ids=list(prompt.tokens), num_tokens=len(prompt.tokens), block_hashes=[]
            )
            request.block_hashes += hasher(request)
            results.append(request.block_hashes)
        assert results[0] == results[1]
        assert len(results[0]) == call.prompt_tokens // 16
        content.made(call, results[0])


def test_the_cheap_hasher_finds_the_same_hits_as_vllms_own(small_profile):
    """Which blocks are equal is what decides hits; both hashers say the same."""
    from autellix.server.engine.build import make_request

    program = trace.load("lats")[0]
    content = ProgramContent(program, Segments(16))
    ours: dict[bytes, set[bytes]] = {}
    theirs: dict[bytes, set[bytes]] = {}
    for call in program.calls[:30]:
        prompt = content.begin(call)
        request = make_request("r", prompt.tokens, 1, block_tokens=16)
        mine = SimpleNamespace(
            _all_token_ids=list(prompt.tokens), num_tokens=len(prompt.tokens), block_hashes=[]
        )
        for a, b in zip(BlockHasher(16)(mine), request.block_hashes, strict=True):
            ours.setdefault(a, set()).add(bytes(b))
            theirs.setdefault(bytes(b), set()).add(a)
    assert all(len(s) == 1 for s in (*ours.values(), *theirs.values()))

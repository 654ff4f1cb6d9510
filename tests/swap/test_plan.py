"""Where a block's bytes lie, and which blocks a resumed call misses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autellix.server.swap.plan import blocks_for, missing_blocks, pieces_of


def bytes_of_block(tensor: torch.Tensor, block_count: int, block: int) -> set[int]:
    """Return the storage offsets of a block's bytes, by the pieces."""
    item = tensor.element_size()
    found: set[int] = set()
    for piece in pieces_of(tuple(tensor.shape), tuple(tensor.stride()), item, block_count):
        start = piece.offset_bytes + block * piece.stride_bytes
        span = set(range(start, start + piece.size_bytes))
        assert found.isdisjoint(span), "two pieces share bytes"
        found |= span
    return found


@pytest.mark.parametrize(
    ("shape", "order", "axis"),
    [
        ((6, 2, 4, 2, 8), (0, 1, 2, 3, 4), 0),  # blocks, K/V, tokens, heads, head size
        ((2, 6, 4, 2, 8), (0, 1, 2, 3, 4), 1),  # keys and values apart
        ((6, 2, 4, 2, 8), (0, 1, 3, 2, 4), 0),  # heads before tokens
        ((6, 2, 4, 16), (0, 2, 1, 3), 0),  # the interior permuted in memory
        ((6, 2, 4, 16), (1, 0, 2, 3), 0),  # blocks inside, K/V outside
        ((6, 3, 4, 8), (2, 0, 1, 3), 0),  # tokens outermost: many pieces
    ],
)
def test_pieces_are_exactly_the_bytes_of_a_block(shape, order, axis):
    """For every block and layout the pieces cover what torch says the block is."""
    memory = torch.empty([shape[i] for i in order], dtype=torch.int16)
    tensor = memory.permute([order.index(i) for i in range(len(shape))])
    assert tuple(tensor.shape) == shape
    ids = (
        torch.arange(memory.numel())
        .reshape(memory.shape)
        .permute([order.index(i) for i in range(len(shape))])
    )
    for block in range(6):
        elements = ids.select(axis, block).flatten().tolist()
        wanted = {2 * e + b for e in elements for b in (0, 1)}
        assert bytes_of_block(tensor, 6, block) == wanted


def test_smaller_kernel_blocks_are_merged():
    """A cache with three kernel blocks a block has one piece a block all the same."""
    tensor = torch.empty(12, 5, 4, dtype=torch.float32)
    (piece,) = pieces_of(tuple(tensor.shape), tuple(tensor.stride()), 4, 4)
    assert piece.stride_bytes == piece.size_bytes == 3 * 5 * 4 * 4


def test_a_padded_block_leaves_its_padding_out():
    """A stride larger than the block is kept."""
    tensor = torch.empty(6 * 40, dtype=torch.int8).as_strided((6, 4, 8), (40, 8, 1))
    (piece,) = pieces_of(tuple(tensor.shape), tuple(tensor.stride()), 1, 6)
    assert (piece.stride_bytes, piece.size_bytes) == (40, 32)


def test_what_is_no_cache_is_refused():
    """No dimension of blocks, or a block that overlaps itself."""
    with pytest.raises(ValueError, match="counts 7 blocks"):
        pieces_of((5, 3), (3, 1), 4, 7)
    with pytest.raises(ValueError, match="overlap"):
        pieces_of((4, 3, 8), (24, 4, 1), 1, 4)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 20), st.sampled_from([1, 16, 128]))
def test_a_resumed_call_gets_exactly_what_it_misses(saved, call_tokens, hit_blocks, block_tokens):
    """Hits and loads together cover what is usable, and one token is left to compute."""
    hit = hit_blocks * block_tokens
    missing = missing_blocks(saved, call_tokens, hit, block_tokens)
    usable = min(saved, call_tokens - 1)
    if usable <= hit:
        assert missing.tokens == 0
        assert missing.first == missing.last
    else:
        assert hit + missing.tokens == usable < call_tokens
        assert missing.first * block_tokens == hit
        assert missing.last == blocks_for(usable, block_tokens)

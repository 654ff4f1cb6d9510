"""What to move: where a block's bytes lie in a cache, and which blocks a resumed call misses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """One contiguous part of every block: block b's is ``size_bytes`` at offset + b * stride."""

    offset_bytes: int
    stride_bytes: int
    size_bytes: int


class Missing(NamedTuple):
    """The blocks a resumed call must get back: indices ``first`` up to and without ``last``."""

    first: int
    last: int
    tokens: int


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold this many tokens.

    >>> blocks_for(0, 16), blocks_for(16, 16), blocks_for(17, 16)
    (0, 1, 2)
    """
    assert tokens >= 0
    assert block_tokens >= 1
    return -(-tokens // block_tokens)


def pieces_of(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int, block_count: int
) -> tuple[Piece, ...]:
    """Return the contiguous parts of every block of one layer's cache, whatever its layout.

    Args:
        shape: Of the layer's tensor. The dimension of blocks has ``block_count`` entries or, if
            the kernel uses smaller blocks, a multiple of it.
        strides: In elements, as torch has them.
        item_bytes: Size of an element.
        block_count: Blocks as the engine counts them.

    Raises:
        ValueError: no dimension counts the blocks, or the parts of a block do not follow one
            another at a fixed distance.

    >>> pieces_of((2, 8, 16), (128, 16, 1), 4, 8)  # keys and values apart
    (Piece(offset_bytes=0, stride_bytes=64, size_bytes=64), \
Piece(offset_bytes=512, stride_bytes=64, size_bytes=64))
    """
    axis = _block_axis(shape, block_count)
    per_block = shape[axis] // block_count
    stride = strides[axis] * per_block
    inner = [(strides[i], shape[i]) for i in range(len(shape)) if i != axis and shape[i] > 1]
    if per_block > 1:
        inner.append((strides[axis], per_block))
    inner.sort()
    run = 1
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    offsets = [0]
    for step, count in inner:
        if step < run:
            raise ValueError(f"the parts of a block overlap: strides {tuple(strides)}")
        offsets = [offset + i * step for offset in offsets for i in range(count)]
    return tuple(
        Piece(offset * item_bytes, stride * item_bytes, run * item_bytes)
        for offset in sorted(offsets)
    )


def _block_axis(shape: Sequence[int], block_count: int) -> int:
    """Return the dimension that counts blocks: an exact match first, then a multiple."""
    assert block_count >= 1
    for axis, size in enumerate(shape[:2]):
        if size == block_count:
            return axis
    for axis, size in enumerate(shape[:2]):
        if size and size % block_count == 0:
            return axis
    raise ValueError(f"no dimension of {tuple(shape)} counts {block_count} blocks")


def missing_blocks(
    saved_tokens: int, call_tokens: int, hit_tokens: int, block_tokens: int
) -> Missing:
    """Return what a resumed call lacks when the device still has its first tokens.

    At least one token is left to compute, or there would be nothing to sample from: what was
    saved beyond ``call_tokens`` - 1 (rejected drafts among it) is not loaded.

    Args:
        saved_tokens: Tokens whose KV is in the host pool.
        call_tokens: Tokens the call has now.
        hit_tokens: Tokens found on the device; whole blocks.
        block_tokens: Tokens of a block.

    >>> missing_blocks(saved_tokens=70, call_tokens=71, hit_tokens=32, block_tokens=16)
    Missing(first=2, last=5, tokens=38)
    """
    usable = min(saved_tokens, call_tokens - 1)
    if usable <= hit_tokens:
        return Missing(0, 0, 0)
    assert hit_tokens % block_tokens == 0, "hits are whole blocks"
    return Missing(
        hit_tokens // block_tokens, blocks_for(usable, block_tokens), usable - hit_tokens
    )

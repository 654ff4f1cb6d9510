"""The native module: bulk copies of KV blocks between a paged cache and host memory.

A cache is described by *segments* ``(address, stride, size)`` in bytes: block ``b`` has one
contiguous piece of ``size`` bytes at ``address + b * stride`` in each. A *slot* holds one block of
all segments, one piece after the other, in their order. Whoever makes a copier keeps the memory
behind the addresses alive. Every argument is checked before a byte moves, and the GIL is free
while bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer

Segment = tuple[int, int, int]

CUDA_BUILT: bool
"""Whether the CUDA backend was built; it lies beside this module as ``_swap_cuda.so``."""

def plan_runs(block_ids: Sequence[int], block_count: int) -> list[tuple[int, int, int]]:
    """Merge neighbouring block ids, in their order, into ``(first_block, first_slot, count)``.

    Raises:
        IndexError: an id is negative or not below ``block_count``.
    """

class HostBuffer(Buffer):
    """Page-aligned host memory, writable through the buffer protocol as bytes.

    Args:
        size_bytes: Its size, at least 1.
        populate: Take the memory at once; else page by page as it is first written.

    Raises:
        ValueError: the size is zero.
        MemoryError: the system refuses.
    """

    def __init__(self, size_bytes: int, populate: bool = False) -> None: ...
    @property
    def size_bytes(self) -> int:
        """Its size."""

class Workers:
    """A fixed number of threads, the caller's among them; started at the first use.

    Safe to call from several threads (one job runs at a time) and in the child of a fork.

    Raises:
        ValueError: ``thread_count`` is not in 1..64.
    """

    def __init__(self, thread_count: int) -> None: ...
    @property
    def thread_count(self) -> int:
        """How many threads share a job."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy one contiguous buffer to another of the same size, shared among the threads.

        Raises:
            ValueError: the sizes differ, they overlap, or one is not contiguous.
        """

class BlockCopier:
    """Moves blocks between a cache in host memory and slots.

    Args:
        segments: Where a block's pieces lie; 1 to 4096.
        block_count: Blocks in the cache.
        workers: The threads that copy.

    Raises:
        ValueError: a size is zero, a piece is longer than its stride, an address overflows, or two
            segments share bytes.
    """

    def __init__(self, segments: Sequence[Segment], block_count: int, workers: Workers) -> None: ...
    @property
    def slot_bytes(self) -> int:
        """The bytes of one block in all segments."""

    def gather(self, block_ids: Sequence[int], host: HostBuffer, slot_ids: Sequence[int]) -> int:
        """Copy block ``block_ids[i]`` to slot ``slot_ids[i]``, for every i; return bytes moved.

        Raises:
            IndexError: a block is not in the cache or a slot not in the buffer.
            ValueError: unequal lengths, a slot given twice, or the buffer overlaps the cache.
        """

    def scatter(self, block_ids: Sequence[int], host: HostBuffer, slot_ids: Sequence[int]) -> int:
        """Copy slot ``slot_ids[i]`` to block ``block_ids[i]``, for every i; return bytes moved.

        Raises:
            IndexError: a block is not in the cache or a slot not in the buffer.
            ValueError: unequal lengths, a block given twice, or the buffer overlaps the cache.
        """

class CudaLibrary:
    """The CUDA backend, opened from its shared object.

    Raises:
        RuntimeError: it cannot be loaded, is of another version, or finds no driver or device.
    """

    def __init__(self, path: str) -> None: ...

class CudaBlockCopier:
    """Moves blocks between a cache in device memory and pinned slots, asynchronously.

    Pins ``host`` for its own lifetime. Not for several threads at once.

    Args:
        library: The backend.
        segments: Device addresses; all three figures are multiples of 16.
        block_count: Blocks in the cache.
        host: The slots.
        device: The CUDA device's number.
        staging_bytes: Device memory to take for staging, in two halves of whole slots.

    Raises:
        ValueError: as for ``BlockCopier``.
        RuntimeError: CUDA refuses.
    """

    def __init__(
        self,
        library: CudaLibrary,
        segments: Sequence[Segment],
        block_count: int,
        host: HostBuffer,
        device: int,
        staging_bytes: int,
    ) -> None: ...
    @property
    def slot_bytes(self) -> int:
        """The bytes of one block in all segments."""

    @property
    def method(self) -> str:
        """The way of copying that was fastest when it started: kernel, batch or per-block."""

    def gather(self, block_ids: Sequence[int], slot_ids: Sequence[int], stream: int) -> int:
        """Queue a swap-out on ``stream`` (a cudaStream_t as a number); return its fence.

        Raises:
            IndexError, ValueError: as ``BlockCopier.gather``.
            RuntimeError: CUDA refuses.
        """

    def scatter(self, block_ids: Sequence[int], slot_ids: Sequence[int], stream: int) -> int:
        """Queue a swap-in on ``stream``; return its fence. Raises as ``gather``."""

    def wait(self, fence: int, stream: int) -> None:
        """Let ``stream`` wait for a fence; the host goes on."""

    def done(self, fence: int) -> bool:
        """Return whether the copy before a fence has ended."""

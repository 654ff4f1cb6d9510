"""Moves the bytes: turns torch's KV tensors into addresses for the native module, and calls it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..swap.plan import pieces_of

STAGING_BYTES_MAX = 256 << 20  # device memory that vLLM's budget did not plan for


class CopierError(Exception):
    """Blocks cannot be copied here; the message says why. Everything is recomputed."""


class Moved(NamedTuple):
    """One transfer. ``seconds`` is None when it was only queued (CUDA)."""

    size_bytes: int
    seconds: float | None


class Copier(Protocol):
    """Copies blocks to slots and back, many at once."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block in all layers."""
        ...

    @property
    def backend(self) -> str:
        """The name of what copies, for logs."""
        ...

    def swap_out(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        """Copy blocks to slots, ordered before whatever overwrites them on the device."""
        ...

    def swap_in(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        """Copy slots to blocks, ordered before whatever reads them on the device."""
        ...


class HostCopier:
    """The cache is host memory: the copy is done on return."""

    def __init__(
        self, segments: list[tuple[int, int, int]], block_count: int, slot_count: int, threads: int
    ) -> None:
        from .. import _swap

        self._copier = _swap.BlockCopier(segments, block_count, _swap.Workers(threads))
        self._host = _swap.HostBuffer(self._copier.slot_bytes * slot_count)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self._copier.slot_bytes

    @property
    def backend(self) -> str:
        """The name of what copies."""
        return "cpu"

    def swap_out(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        """Copy blocks to slots."""
        start_s = time.perf_counter()
        size_bytes = self._copier.gather(block_ids, self._host, slot_ids)
        return Moved(size_bytes, time.perf_counter() - start_s)

    def swap_in(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        """Copy slots to blocks."""
        start_s = time.perf_counter()
        size_bytes = self._copier.scatter(block_ids, self._host, slot_ids)
        return Moved(size_bytes, time.perf_counter() - start_s)


class CudaCopier:
    """The cache is device memory: copies are queued on the engine's own stream.

    That stream runs the step that last wrote the blocks before the gather, and the step that
    reads or overwrites them after the copy. Should the engine change streams, the new one waits
    for the fence of the last transfer.
    """

    def __init__(
        self,
        segments: list[tuple[int, int, int]],
        block_count: int,
        slot_count: int,
        device: int,
        staging_bytes: int,
    ) -> None:
        from .. import _swap

        slot_bytes = sum(size for _, _, size in segments)
        self._host = _swap.HostBuffer(slot_bytes * slot_count, populate=True)
        path = Path(_swap.__file__).with_name("_swap_cuda.so")
        self._copier = _swap.CudaBlockCopier(
            _swap.CudaLibrary(str(path)), segments, block_count, self._host, device, staging_bytes
        )
        self._last: tuple[int, int] | None = None  # stream, fence

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self._copier.slot_bytes

    @property
    def backend(self) -> str:
        """The name of what copies."""
        return f"cuda, {self._copier.method}"

    def swap_out(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        """Queue the copy of blocks to slots."""
        stream = self._fenced_stream()
        self._last = (stream, self._copier.gather(block_ids, slot_ids, stream))
        return Moved(len(block_ids) * self.slot_bytes, None)

    def swap_in(self, block_ids: list[int], slot_ids: list[int]) -> Moved:
        """Queue the copy of slots to blocks."""
        stream = self._fenced_stream()
        self._last = (stream, self._copier.scatter(block_ids, slot_ids, stream))
        return Moved(len(block_ids) * self.slot_bytes, None)

    def _fenced_stream(self) -> int:
        import torch

        stream = int(torch.cuda.current_stream().cuda_stream)
        if self._last is not None and self._last[0] != stream:
            self._copier.wait(self._last[1], stream)
        return stream


def segments_of(kv_caches: dict[str, Any], block_count: int) -> list[tuple[int, int, int]]:
    """Return the segments of a block in all layers; layers that share memory count once.

    Args:
        kv_caches: Each layer's tensor, as vLLM registers them.
        block_count: Blocks as the scheduler counts them.

    Raises:
        CopierError: a layer's layout cannot be described by segments.
    """
    segments: dict[tuple[int, int, int], None] = {}
    for name, tensor in kv_caches.items():
        if not hasattr(tensor, "data_ptr"):
            raise CopierError(f"{name} has several tensors for a layer")
        try:
            pieces = pieces_of(
                tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), block_count
            )
        except ValueError as error:
            raise CopierError(f"{name}: {error}") from error
        base = tensor.data_ptr()
        for piece in pieces:
            segments[(base + piece.offset_bytes, piece.stride_bytes, piece.size_bytes)] = None
    return list(segments)


def open_copier(
    kv_caches: dict[str, Any], block_count: int, slot_count: int, threads: int
) -> Copier:
    """Return what copies the blocks of these caches.

    Args:
        kv_caches: Each layer's tensor.
        block_count: Blocks in the cache.
        slot_count: Slots of the host pool; their memory is taken here.
        threads: That copy, where the cache is host memory.

    Raises:
        CopierError: there is no native module, no usable backend or no way to describe the cache.
    """
    devices = {tensor.device for tensor in kv_caches.values() if hasattr(tensor, "device")}
    if len(devices) != 1:
        raise CopierError(f"the cache lies on {len(devices)} devices")
    device = devices.pop()
    segments = segments_of(kv_caches, block_count)
    try:
        if device.type == "cpu":
            return HostCopier(segments, block_count, slot_count, threads)
        if device.type == "cuda":
            return CudaCopier(
                segments, block_count, slot_count, device.index or 0, STAGING_BYTES_MAX
            )
    except (ImportError, RuntimeError, ValueError, MemoryError) as error:
        raise CopierError(str(error)) from error
    raise CopierError(f"no backend copies blocks of a {device.type} device")

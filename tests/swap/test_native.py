"""The native module: swap-out then swap-in is the identity, and wrong arguments move nothing."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server import _swap
from autellix.server.engine.copier import CopierError, HostCopier, open_copier, segments_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]
BLOCKS = 12
# Of a layer's tensor: its shape, and the order of its dimensions in memory.
LAYOUTS = {
    "blocks first": ((BLOCKS, 2, 16, 3, 8), (0, 1, 2, 3, 4)),
    "keys and values apart": ((2, BLOCKS, 16, 3, 8), (0, 1, 2, 3, 4)),
    "heads before tokens": ((BLOCKS, 3, 16, 16), (0, 1, 2, 3)),
    "tokens before heads in memory": ((BLOCKS, 3, 16, 16), (0, 2, 1, 3)),
    "small kernel blocks": ((BLOCKS * 4, 4, 3, 16), (0, 1, 2, 3)),
    "blocks inside": ((BLOCKS, 2, 4, 8), (1, 0, 2, 3)),
}


def random_cache(layout: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a layer's cache full of random bytes."""
    shape, order = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    stored = memory.view(dtype).reshape([shape[i] for i in order])
    return stored.permute([order.index(i) for i in range(len(shape))])


def raw(cache: torch.Tensor) -> bytes:
    """Return a copy of all bytes behind a cache, in memory order."""
    storage = cache.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def overwrite(cache: torch.Tensor, block: int) -> None:
    """Fill one block with other bytes."""
    axis = next(i for i, size in enumerate(cache.shape) if size % BLOCKS == 0)
    per_block = cache.shape[axis] // BLOCKS
    part = cache.narrow(axis, block * per_block, per_block)
    part.copy_(torch.zeros(part.shape, dtype=torch.float32).to(part.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(
    blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_swap_out_then_swap_in_is_the_identity(layout, dtype, blocks, threads, data):
    """Bit for bit, for random block tables and slots, in every layout and dtype."""
    caches = {f"layer{i}": random_cache(layout, dtype, i) for i in range(3)}
    slots = data.draw(st.permutations(range(BLOCKS)))[: len(blocks)]
    copier = open_copier(caches, BLOCKS, BLOCKS, threads)
    before = [raw(cache) for cache in caches.values()]
    moved = copier.swap_out(blocks, slots)
    assert moved.size_bytes == copier.slot_bytes * len(blocks)
    for cache in caches.values():
        for block in blocks:
            overwrite(cache, block)
    copier.swap_in(blocks, slots)
    for cache, wanted in zip(caches.values(), before, strict=True):
        assert raw(cache) == wanted


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(BLOCKS)), st.integers(1, BLOCKS))
def test_blocks_come_back_in_other_places(table, count):
    """A resumed call has new blocks: the content follows its position, not its old place."""
    cache = random_cache("blocks first", torch.float16, 1)
    copier = open_copier({"layer": cache}, BLOCKS, BLOCKS, 2)
    old, new = list(range(count)), table[:count]
    content = cache.clone()
    copier.swap_out(old, old)
    copier.swap_in(new, old)
    for position, block in enumerate(new):
        assert torch.equal(cache[block].view(torch.uint8), content[position].view(torch.uint8))


def small_copier() -> tuple[np.ndarray, _swap.BlockCopier, _swap.HostBuffer]:
    """Return a cache of 8 blocks of 64 bytes, its copier and a buffer of 4 slots."""
    cache = np.arange(512, dtype=np.uint32).astype(np.uint8)
    copier = _swap.BlockCopier([(cache.ctypes.data, 64, 64)], 8, _swap.Workers(2))
    return cache, copier, _swap.HostBuffer(256)


@pytest.mark.parametrize(
    ("blocks", "slots", "error", "message"),
    [
        ([8], [0], IndexError, "block id 8 is not in 0..7"),
        ([-1], [0], IndexError, "block id -1"),
        ([0], [4], IndexError, "slot id 4 is not in 0..3"),
        ([0, 1], [0], ValueError, "2 blocks for 1 slots"),
        ([0, 1], [2, 2], ValueError, "slot id 2 is written twice"),
        ([2**70], [0], TypeError, "incompatible"),
    ],
)
def test_wrong_ids_raise_and_move_nothing(blocks, slots, error, message):
    """Everything is checked before the first byte."""
    cache, copier, host = small_copier()
    before = cache.copy()
    with pytest.raises(error, match=message):
        copier.gather(blocks, host, slots)
    assert not np.frombuffer(host, np.uint8).any()
    assert np.array_equal(cache, before)


def test_a_block_is_not_written_twice():
    """Two slots for one block have no right answer."""
    _, copier, host = small_copier()
    with pytest.raises(ValueError, match="block id 3 is written twice"):
        copier.scatter([3, 3], host, [0, 1])


@pytest.mark.parametrize(
    ("segments", "blocks", "message"),
    [
        ([], 8, "segments"),
        ([(4096, 64, 0)], 8, "no bytes"),
        ([(0, 64, 64)], 8, "no address"),
        ([(4096, 32, 64)], 8, "longer than its stride"),
        ([(4096, 64, 64)], 0, "at least one block"),
        ([(4096, 2**62, 64)], 8, "address space"),
        ([(4096, 64, 64), (4128, 64, 64)], 8, "share bytes"),
    ],
)
def test_wrong_layouts_are_refused(segments, blocks, message):
    """A cache that cannot be is named, not copied."""
    with pytest.raises(ValueError, match=message):
        _swap.BlockCopier(segments, blocks, _swap.Workers(1))


def test_a_host_buffer_inside_the_cache_is_refused():
    """Source and target never overlap."""
    host = _swap.HostBuffer(1024)
    address = np.frombuffer(host, np.uint8).ctypes.data
    copier = _swap.BlockCopier([(address, 64, 64)], 8, _swap.Workers(1))
    with pytest.raises(ValueError, match="overlaps the cache"):
        copier.gather([0], host, [0])


def test_the_gil_is_free_and_threads_share_the_workers():
    """Several Python threads copy with one set of workers; each gets its own bytes."""
    workers = _swap.Workers(2)
    errors: list[str] = []

    def copy(value: int) -> None:
        source = np.full(1 << 20, value, np.uint8)
        for _ in range(5):
            target = np.zeros(1 << 20, np.uint8)
            workers.copy(target, source)
            if not (target == value).all():
                errors.append(f"{value} was mixed with another")

    threads = [threading.Thread(target=copy, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_copies_too():
    """The workers of the parent are not there; the child makes its own."""
    workers = _swap.Workers(3)
    source, target = np.full(1 << 21, 7, np.uint8), np.zeros(1 << 21, np.uint8)
    workers.copy(target, source)
    child = os.fork()
    if child == 0:
        target[:] = 0
        workers.copy(target, source)
        os._exit(0 if bool((target == 7).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_unequal_or_overlapping_buffers_are_refused():
    """One plain copy has the same care."""
    workers = _swap.Workers(1)
    memory = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="differ in size"):
        workers.copy(memory[:16], memory[16:48])
    with pytest.raises(ValueError, match="overlap"):
        workers.copy(memory[:32], memory[16:48])
    with pytest.raises(ValueError, match="contiguous"):
        workers.copy(memory[::2], memory[::2].copy())
    with pytest.raises(ValueError, match="not in 1"):
        _swap.Workers(0)


def test_layers_that_share_memory_are_copied_once():
    """Two names for one tensor are one segment."""
    cache = random_cache("blocks first", torch.float32, 1)
    assert len(segments_of({"a": cache, "b": cache}, BLOCKS)) == 1


def test_a_cache_that_cannot_be_described_is_refused_by_name():
    """The layer is named."""
    with pytest.raises(CopierError, match="odd"):
        segments_of({"odd": torch.zeros(5, 7)}, BLOCKS)
    with pytest.raises(CopierError, match="several tensors"):
        segments_of({"mamba": [torch.zeros(1)]}, BLOCKS)
    with pytest.raises(CopierError, match="meta device"):
        open_copier({"a": torch.zeros(BLOCKS, 4, device="meta")}, BLOCKS, 1, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.skipif(not _swap.CUDA_BUILT, reason="built without a CUDA compiler")
def test_the_cuda_backend_says_why_it_is_not_usable():
    """It was compiled and loads; without a driver it names the reason instead of crashing."""
    from pathlib import Path

    path = Path(_swap.__file__).with_name("_swap_cuda.so")
    with pytest.raises(RuntimeError, match="CUDA is not usable"):
        _swap.CudaLibrary(str(path))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["blocks first", "keys and values apart"])
def test_on_a_gpu_swap_out_then_swap_in_is_the_identity(layout):
    """The same, through device memory and pinned slots."""
    caches = {f"layer{i}": random_cache(layout, torch.float16, i).cuda() for i in range(3)}
    before = {name: cache.clone() for name, cache in caches.items()}
    copier = open_copier(caches, BLOCKS, BLOCKS, 1)
    copier.swap_out([3, 7, 5], [2, 0, 9])
    for cache in caches.values():
        for block in (3, 5, 7):
            overwrite(cache, block)
    copier.swap_in([3, 7, 5], [2, 0, 9])
    torch.cuda.synchronize()
    for name, cache in caches.items():
        assert torch.equal(cache.view(torch.uint8), before[name].view(torch.uint8))


def test_the_host_copier_names_its_backend():
    """For the log."""
    cache = random_cache("blocks first", torch.float32, 1)
    copier = HostCopier(segments_of({"a": cache}, BLOCKS), BLOCKS, 2, 1)
    assert copier.backend == "cpu"

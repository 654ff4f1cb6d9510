"""Fuzz on the pipeline harness: nothing is lost, doubled, leaked or computed wrongly."""

from __future__ import annotations

import pytest

from . import fuzz


@pytest.mark.parametrize(("depth", "v2"), fuzz.MODES)
@pytest.mark.parametrize("seed", range(6))
def test_random_workloads(seed: int, depth: int, v2: bool):
    """Random calls, aborts, policy changes and cache resets, 300 steps."""
    fuzz.Fuzz(seed, depth, v2).play(300)


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_long_random_workloads(seed: int):
    """The same with 10,000 steps, 200 seeds, the modes in turn."""
    fuzz.Fuzz(seed, *fuzz.MODES[seed % len(fuzz.MODES)]).play(10_000)

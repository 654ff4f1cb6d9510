"""The simulator against live rounds that were replayed once and kept (docs/lab.md, fidelity)."""

from __future__ import annotations

from pathlib import Path

import pytest

from autellix.server.lab import cost_model
from benchmarks.paper import fidelity

MEASURED = Path(__file__).parents[2] / "benchmarks" / "paper" / "measured"


@pytest.mark.parametrize("policy", ["fcfs", "plas"])
def test_kept_live_rounds_are_met(policy: str):
    """Prefix hits are those of the live engine, latencies within 15 %, round by round."""
    kept = fidelity.Kept(MEASURED / "live.json")
    live = kept.rounds["bfcl-gt"][policy]
    assert len(live) == 5
    profile = fidelity.limited(cost_model.load(str(MEASURED / "profile.toml")), 2, 60, 256)
    for seed, measured in enumerate(live):
        simulated = fidelity.simulated_round("bfcl-gt", policy, profile, seed)
        assert simulated.hit_share == pytest.approx(measured.hit_share, abs=1e-5)
        for one, other in (
            (measured.mean_s, simulated.mean_s),
            (measured.p95_s, simulated.p95_s),
        ):
            assert abs(one / other - 1) <= fidelity.WITHIN


def test_rounds_are_kept_and_found_again(tmp_path: Path):
    """What is in the file is not replayed again."""
    kept = fidelity.Kept(tmp_path / "live.json")
    assert not kept.has("bfcl-gt", ["fcfs"], 1)
    kept.add("bfcl-gt", "fcfs", fidelity.Round(1.5, 2.5, 0.5))
    again = fidelity.Kept(tmp_path / "live.json")
    assert again.has("bfcl-gt", ["fcfs"], 1)
    assert not again.has("bfcl-gt", ["fcfs", "plas"], 1)
    assert again.rounds["bfcl-gt"]["fcfs"] == [fidelity.Round(1.5, 2.5, 0.5)]

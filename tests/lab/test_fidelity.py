"""The simulator against live rounds that were replayed once and kept (docs/lab.md, fidelity)."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from autellix.server.lab import cost_model
from benchmarks.paper import fidelity

MEASURED = Path(__file__).parents[2] / "benchmarks" / "paper" / "measured"


@pytest.mark.parametrize("policy", ["fcfs", "plas"])
def test_kept_live_rounds_are_met(policy: str):
    """Prefix hits are those of the live engine, latencies within 15 %, round by round."""
    kept = fidelity.Kept(MEASURED / "live-bfcl.json")
    live = kept.rounds["bfcl-gt"][policy]
    assert len(live) == 5
    profile = fidelity.limited(cost_model.load(str(MEASURED / "profile-bfcl.toml")), 2, 60, 256)
    for seed, measured in enumerate(live):
        simulated = fidelity.simulated_round("bfcl-gt", policy, profile, seed)
        assert simulated.hit_share == pytest.approx(measured.hit_share, abs=1e-5)
        for one, other in (
            (measured.mean_s, simulated.mean_s),
            (measured.p95_s, simulated.p95_s),
        ):
            assert abs(one / other - 1) <= fidelity.WITHIN


def test_the_chat_rounds_are_met_in_the_median():
    """Hits round by round, the median of each ratio within 15 %, and the order of the policies."""
    live = fidelity.Kept(MEASURED / "live-chat.json").rounds["chat-sharegpt"]
    profile = fidelity.limited(cost_model.load(str(MEASURED / "profile-chat.toml")), 2, 60, 512)
    simulated = {
        policy: [
            fidelity.simulated_round("chat-sharegpt", policy, profile, seed)
            for seed in range(len(rounds))
        ]
        for policy, rounds in live.items()
    }
    orders = []
    for side in (live, simulated):
        medians = {policy: median(r.mean_s for r in side[policy]) for policy in side}
        orders.append(sorted(medians, key=medians.__getitem__))
    assert orders == [["plas", "fcfs"]] * 2
    for policy, rounds in live.items():
        pairs = list(zip(rounds, simulated[policy], strict=True))
        assert len(pairs) == 5
        assert all(a.hit_share == pytest.approx(b.hit_share, abs=1e-5) for a, b in pairs)
        for ratio in (median(a.mean_s / b.mean_s for a, b in pairs),
                      median(a.p95_s / b.p95_s for a, b in pairs)):  # fmt: skip
            assert abs(ratio - 1) <= fidelity.WITHIN


def test_rounds_are_kept_and_found_again(tmp_path: Path):
    """What is in the file is not replayed again."""
    kept = fidelity.Kept(tmp_path / "live.json")
    assert not kept.has("bfcl-gt", ["fcfs"], 1)
    kept.add("bfcl-gt", "fcfs", fidelity.Round(1.5, 2.5, 0.5))
    again = fidelity.Kept(tmp_path / "live.json")
    assert again.has("bfcl-gt", ["fcfs"], 1)
    assert not again.has("bfcl-gt", ["fcfs", "plas"], 1)
    assert again.rounds["bfcl-gt"]["fcfs"] == [fidelity.Round(1.5, 2.5, 0.5)]

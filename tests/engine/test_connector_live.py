"""Swapping on real vLLM: forced preemptions change no token, and nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEAR_TIE = 1e-3  # below this gap two kernels' rounding may choose differently (pitfalls 27)


def run_forced(model: Path, *options: str, timeout_s: float = 170) -> dict[str, Any]:
    """Run the program in a process of its own and return its report."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.forced_preemption", str(model), *options],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
            return report
    pytest.fail(f"no report; the end of its output:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def check_report(report: dict[str, Any]) -> None:
    """Check what holds for every run with swapping."""
    assert report["refusal"] is None
    assert report["counts"]["failed"] == 0
    assert report["counts"]["changed"] == 0
    assert report["owners"] == report["saved"] == 0, "slots without a living owner"
    assert report["calls"] > 0
    assert all(gap < NEAR_TIE for gap in report["differences"]), report["differences"]
    assert len(report["differences"]) <= max(1, report["calls"] // 100)


@pytest.mark.live
def test_forced_preemptions_and_aborts_leave_every_token_as_it_was(tiny_model):
    """Greedy answers with 60 forced preemptions are those without any."""
    report = run_forced(tiny_model, "--preemptions", "60", "--every-steps", "1")
    check_report(report)
    assert report["forced"] == 60
    assert report["counts"]["swap_outs"] >= 55
    assert report["free_slots"] == 64


@pytest.mark.heavy
@pytest.mark.live
@pytest.mark.timeout(900)
def test_500_forced_preemptions_of_a_real_model_under_load(smollm2):
    """The real model, an engine short of KV, a quarter of the calls aborted."""
    report = run_forced(
        smollm2,
        *("--preemptions", "500", "--every-steps", "1", "--victims", "3"),
        *("--calls", "12", "--tokens", "32", "--kv-blocks", "22", "--pool-blocks", "60"),
        timeout_s=880,
    )
    check_report(report)
    assert report["forced"] == 500
    assert report["counts"]["swap_ins"] > 100
    assert report["free_slots"] == 60

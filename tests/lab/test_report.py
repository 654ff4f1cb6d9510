"""The report: figures and one page from JSON, and no made-up answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autellix.server.lab import cli, report
from autellix.server.lab.simulate_command import document


def result(arm: str, rate: float, latency_s: float) -> dict:
    """Return a result with one latency everywhere."""
    spread = dict.fromkeys(("mean", "p50", "p95", "p99"), latency_s)
    times = {"token_latency_s": spread, "response_s": spread, "slowdown": spread}
    return {
        "trace": "t", "arm": arm, "rate_per_s": rate, "seed": 0, "mode": "open", "programs": 3,
        "unfinished": 0, "wait_share": 0.5, "by_size": [{"programs": 1, **times}] * 4,
        "engine": {"prefix_hit_share": 0.5}, **times,
    }  # fmt: skip


RESULTS = [
    result("fcfs", 1.0, 0.1), result("fcfs", 2.0, 0.9),
    result("plas", 1.0, 0.1), result("plas", 2.0, 0.3),
]  # fmt: skip


def test_a_report_is_png_files_and_one_page(tmp_path: Path, capsys):
    """The page holds its pictures in itself and refers to nothing outside."""
    (tmp_path / "runs.json").write_text(document(RESULTS))
    assert cli.report([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    pictures = sorted(p.name for p in (tmp_path / "out").glob("*.png"))
    assert "t-token_latency_s.png" in pictures
    assert all((tmp_path / "out" / p).read_bytes().startswith(b"\x89PNG") for p in pictures)
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures)
    assert 'src="http' not in page
    assert "<link" not in page
    assert "<script" not in page
    assert "plas: 0.5 s/token at not crossed in this sweep" in capsys.readouterr().out


def test_a_limit_that_is_not_crossed_has_no_rate():
    """Interpolated where it is crossed, None where it is not."""
    gains = report.gain_at(RESULTS, "t", 0.5)
    assert gains["fcfs"] == pytest.approx(1.5)
    assert gains["plas"] is None


def test_ratios_are_paired_by_seed(tmp_path: Path, capsys):
    """Only seeds that both arms have count, and the interval is printed with their number."""
    runs = [
        {**result(arm, 1.0, latency_s), "seed": seed}
        for arm, seed, latency_s in (
            ("fcfs", 0, 1.0), ("fcfs", 1, 2.0), ("fcfs", 2, 9.0), ("plas", 0, 0.5), ("plas", 1, 1.0)
        )
    ]  # fmt: skip
    assert report.paired_ratios(runs, "t", 1.0, "plas", "fcfs", "response_s") == [0.5, 0.5]
    (tmp_path / "runs.json").write_text(document(runs))
    assert cli.report([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "t 1/s plas ÷ fcfs response_s: 0.500 (0.500 to 0.500, 2 seeds)" in printed


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"form": 1, "results": []})])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, capsys):
    """One line, status 2."""
    (tmp_path / "x.json").write_text(text)
    assert cli.report([str(tmp_path)]) == 2
    assert "autellix report:" in capsys.readouterr().err

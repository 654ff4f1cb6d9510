"""The report: figures and one page from JSON, and no made-up answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autellix.server.lab import cli, report
from autellix.server.lab.setting import groups
from autellix.server.lab.simulate_command import document


def result(arm: str, rate: float, latency_s: float) -> dict:
    """Return a result with one latency everywhere."""
    spread = dict.fromkeys(("mean", "p50", "p95", "p99"), latency_s)
    times = {"token_latency_s": spread, "response_s": spread, "slowdown": spread}
    return {
        "trace": "t", "arm": arm, "rate_per_s": rate, "seed": 0, "mode": "open", "programs": 3,
        "unfinished": 0, "wait_share": 0.5, "by_size": [{"programs": 1, **times}] * 4,
        "engine": {"prefix_hit_share": 0.5},
        "call": {"hit_share_within_programs": 0.4, "hit_share_across_programs": 0.1}, **times,
    }  # fmt: skip


def burst(arm: str) -> dict:
    """Return a burst with latencies that no open run has."""
    windows = [[0.0, 2, 1.0], [150.0, 4, 9.0]]
    return {**result(arm, 2.0, 50.0), "mode": "burst", "response_by_arrival_s": windows}


RESULTS = [
    result("fcfs", 1.0, 0.1), result("fcfs", 2.0, 0.9),
    result("plas", 1.0, 0.1), result("plas", 2.0, 0.3), burst("fcfs"), burst("plas"),
]  # fmt: skip
FIGURES = {
    "burst", "gain", "hits", "response_s", "sizes", "slowdown", "token_latency_s", "waiting",
    "waiting-sizes",
}  # fmt: skip


def report_of(results: list[dict], folder: Path, *arguments: str) -> tuple[set[str], str]:
    """Run the command on results; return the names of its figures, and the page."""
    (folder / "runs.json").write_text(document(results))
    assert cli.report([str(folder), "--out", str(folder / "out"), *arguments]) == 0
    pictures = {path.stem for path in (folder / "out").glob("*.png")}
    return pictures, (folder / "out" / "index.html").read_text()


def test_a_report_is_png_files_and_one_page(tmp_path: Path, capsys):
    """The page holds its pictures in itself and refers to nothing outside."""
    pictures, page = report_of(RESULTS, tmp_path)
    assert pictures == {f"t-{name}" for name in FIGURES}
    for path in (tmp_path / "out").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == len(pictures)
    assert 'src="http' not in page
    assert "<link" not in page
    assert "<script" not in page
    assert "smoke run" not in page
    assert "<tr><td>plas</td><td>not crossed</td><td></td></tr></table>" in page
    assert "plas: 0.5 s/token is not crossed in this sweep" in capsys.readouterr().out


def test_what_no_result_says_has_no_figure(tmp_path: Path):
    """The live bench says nothing of waiting and of whose the hits are: no empty frames."""
    runs = [{k: v for k, v in r.items() if k not in ("call", "wait_share")} for r in RESULTS]
    pictures, _ = report_of(runs[:1], tmp_path)
    assert pictures == {f"t-{n}" for n in ("response_s", "sizes", "slowdown", "token_latency_s")}


def test_gain_at_equal_latency_is_a_figure_and_a_table(tmp_path: Path, capsys):
    """Rates at --limit and ratios to --base, with the arms that do not cross it named as such."""
    pictures, page = report_of(RESULTS, tmp_path, "--limit", "0.2", "--base", "plas")
    assert "t-gain" in pictures
    assert (
        "t: programs per second at a mean token latency of 0.2 s</h2><table>"
        "<tr><th>policy</th><th>rate</th><th>÷ plas</th></tr>"
        "<tr><td>fcfs</td><td>1.12</td><td>0.75</td></tr>"
        "<tr><td>plas</td><td>1.5</td><td>1</td></tr></table>"
    ) in page
    assert "t fcfs: 0.2 s/token at 1.12 programs/s, 0.75 x plas\n" in capsys.readouterr().out


def test_a_gain_is_to_the_base_alone():
    """Without a rate of the base's there is no ratio, not even of the arm that has one."""
    assert report.gains(RESULTS, "t", 0.5, "plas") == [
        ("fcfs", pytest.approx(1.5), None), ("plas", None, None)
    ]  # fmt: skip


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


SETTINGS = {
    "profile": ("a", "b"),
    "engines": (1, 2),
    "balancer": ("locality", "round-robin"),
    "faults": ({"slow": []}, {"slow": [[0, 2.0]]}),
    "waits": ({"scale": 1.0, "seed": 0}, {"scale": 0.0, "seed": 0}),
    "rule": ({"horizon_s": 3600.0}, {"horizon_s": 300.0}),
    "smoke": (False, True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_unlike_runs_are_not_averaged(name: str):
    """Each setting is a group of its own, whose heading says what is different."""
    one, other = ([{**r, name: value} for r in RESULTS[:4]] for value in SETTINGS[name])
    first, second = groups(one + other)
    assert (first.results, first.stem) == (one, "t-1")
    assert (second.results, second.stem) == (other, "t-2")
    assert first.heading != second.heading
    assert second.heading.startswith(
        ("t (programs", "t (smoke") if name == "smoke" else f"t ({name}"
    )
    with pytest.raises(report.ReportError, match="2 settings"):
        report.gain_at(one + other, "t", 0.5)


def test_alike_runs_are_one_group_without_more_words():
    """The arm, the rate and the seed, that of the waits too, are not the setting."""
    runs = [{**r, "waits": {"seed": seed}, "seed": seed} for r in RESULTS for seed in (0, 1)]
    assert groups(runs) == [(runs, "t", "t")]


def test_each_setting_has_its_own_figures_and_rate(tmp_path: Path, capsys):
    """Two profiles at 1 and 3 s are two points, not one at 2 s; so with the rates at a limit."""
    runs = [
        {**result("fcfs", rate, rate * factor), "profile": profile}
        for profile, factor in (("a", 1.0), ("b", 3.0)) for rate in (1.0, 2.0)
    ]  # fmt: skip
    pictures, page = report_of(runs, tmp_path, "--limit", "1.5")
    assert pictures == {f"t-1-{n}" for n in FIGURES - {"burst"}} | {
        f"t-2-{n}" for n in FIGURES - {"burst", "gain"}
    }
    assert "<h2>t (profile a): slowdown over load</h2>" in page
    assert "<h2>t (profile b): slowdown over load</h2>" in page
    printed = capsys.readouterr().out
    assert "t (profile a) fcfs: 1.5 s/token at 1.5 programs/s" in printed
    assert "t (profile b) fcfs: 1.5 s/token is not crossed" in printed


def test_ratios_of_two_profiles_are_not_mixed(tmp_path: Path, capsys, monkeypatch):
    """The same seed on another profile is another pair."""
    runs = [
        {**result(arm, 1.0, latency_s), "profile": profile}
        for arm, profile, latency_s in (
            ("fcfs", "a", 1.0), ("plas", "a", 0.5), ("fcfs", "b", 10.0), ("plas", "b", 8.0)
        )
    ]  # fmt: skip
    with pytest.raises(report.ReportError, match="2 settings"):
        report.paired_ratios(runs, "t", 1.0, "plas", "fcfs", "response_s")
    monkeypatch.setattr(report, "draw", lambda *_, **__: [])
    (tmp_path / "runs.json").write_text(document(runs))
    assert cli.report([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "t (profile a) 1/s plas ÷ fcfs response_s: 0.500 (one seed" in printed
    assert "t (profile b) 1/s plas ÷ fcfs response_s: 0.800 (one seed" in printed


def test_only_programs_that_come_by_a_rate_stand_over_a_rate(tmp_path: Path, capsys):
    """Bursts and offline runs at the same rate move neither a curve, a bar nor a ratio."""
    report_of([r for r in RESULTS if r["mode"] == "open"], tmp_path)
    before = {path.stem: path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    capsys.readouterr()
    offline = [{**result(arm, 2.0, 70.0), "mode": "offline"} for arm in ("fcfs", "plas")]
    pictures, _ = report_of(RESULTS + offline, tmp_path)
    assert pictures == before.keys() | {"t-burst"}
    for name, data in before.items():
        assert (tmp_path / "out" / f"{name}.png").read_bytes() == data, name
    printed = capsys.readouterr().out
    assert "t 2/s plas ÷ fcfs response_s: 0.333 (one seed" in printed
    assert "t burst 2/s plas ÷ fcfs response_s: 1.000 (one seed" in printed
    assert "t offline 2/s plas ÷ fcfs response_s: 1.000 (one seed" in printed


def test_a_smoke_run_is_labelled(tmp_path: Path):
    """In every title, in the table and in words, though nothing else is beside it."""
    _, page = report_of([{**RESULTS[0], "smoke": True}], tmp_path)
    assert "<h2>t (smoke run): slowdown over load</h2>" in page
    assert page.count("<td>smoke run</td>") == 1
    assert "no ratio of such runs means anything" in page


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"form": 1, "results": []})])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, capsys):
    """One line, status 2."""
    (tmp_path / "x.json").write_text(text)
    assert cli.report([str(tmp_path)]) == 2
    assert "autellix report:" in capsys.readouterr().err

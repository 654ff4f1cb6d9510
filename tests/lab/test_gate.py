"""The gate: what its limits say of hand-made results, and what the command makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autellix.server.lab import cli, gate
from autellix.server.lab.gate import Limit, verdict

MEAN = Limit("mean token latency ÷ stock's", 1.02)


def result(arm: str, latency_s: float, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Return a result with one figure everywhere."""
    spread = {"mean": latency_s, "p99": latency_s}
    return {
        "trace": "t", "profile": "p", "rate_per_s": 1.0, "seed": seed, "arm": arm,
        "token_latency_s": spread, "response_s": spread, "slowdown": spread,
        "by_size": [{"slowdown": spread}] * 4, "programs_per_s": 1.0, **changed,
    }  # fmt: skip


def by_size(*slowdowns: float) -> list[dict[str, Any]]:
    """Return size quartiles of these mean slowdowns."""
    return [{"slowdown": {"mean": slowdown}} for slowdown in slowdowns]


def ratio(name: str, *results: dict[str, Any]) -> float:
    """Return what the limit of a ratio says the figure is."""
    (judged,) = verdict(results, [Limit(name, 100.0)])
    assert judged.met
    return float(judged.line.rpartition(": ")[2].partition(",")[0])


def test_a_limit_is_met_up_to_its_bound_and_missed_above():
    """The line has the load, the ratio, its figure and the bound."""
    stock = result("fcfs", 1.0)
    (met,) = verdict([stock, result("adaptive", 1.02)], [MEAN])
    (missed,) = verdict([stock, result("adaptive", 1.03)], [MEAN])
    said = "t at 1/s on p, mean token latency ÷ stock's"
    assert met == (True, f"met      {said}: 1.020, at most 1.02")
    assert missed == (False, f"MISSED   {said}: 1.030, at most 1.02")


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("mean token latency ÷ stock's", "adaptive", "fcfs is missing"),
        ("mean token latency ÷ stock's", "fcfs", "adaptive is missing"),
        ("mean token latency ÷ clairvoyant reference", "adaptive", "no arm that knows the future"),
        ("mean token latency ÷ best other arm", "adaptive", "no other arm is there"),
    ],
)
def test_a_limit_without_its_arm_is_neither(name: str, there: str, message: str):
    """It is said which arm; nothing counts as met."""
    ((met, line),) = verdict([result(there, 1.0)], [Limit(name, 1.5)])
    assert met is None
    assert line.startswith("not run ")
    assert message in line


def test_a_run_that_measured_nothing_meets_nothing():
    """Short runs have size quartiles without a program, or no program at all."""
    ours = result("adaptive", 1.0, by_size=[{"slowdown": {}}] * 4, token_latency_s={})
    both = [Limit("worst quartile's slowdown ÷ stock's worst", 1.0), MEAN]
    assert [v.met for v in verdict([result("fcfs", 1.0), ours], both)] == [None, None]


def test_seeds_are_paired_and_the_bad_end_of_the_interval_is_judged():
    """A mean of 0.95 with one seed of four far above the bound is a miss."""
    ours = [0.8, 0.8, 0.8, 1.4]
    some = [result("adaptive", s * (n + 1), n) for n, s in enumerate(ours)]
    some += [result("fcfs", float(n + 1), n) for n in range(4)]
    ((met, line),) = verdict(some, [MEAN])
    assert not met
    assert "0.950 [0.800, 1.250] of 4 seeds, at most 1.02" in line
    some[3] = result("adaptive", 0.8 * 4, 3)
    ((met, line),) = verdict(some, [MEAN])
    assert met
    assert "0.800 [0.800, 0.800] of 4 seeds" in line


def test_a_seed_without_stock_leaves_the_load_without_a_figure():
    """Another seed's would be no pair."""
    some = [result("fcfs", 1.0, 0), result("adaptive", 1.0, 0), result("adaptive", 1.0, 1)]
    assert [v.met for v in verdict(some, [MEAN])] == [None]


def test_a_limit_of_some_loads_is_judged_there_and_where_the_share_is_not_known():
    """Each rate is a load of its own."""
    limit = Limit("mean token latency ÷ stock's", 1.0, (0.0, 0.3))
    some = [
        {**result(arm, 1.0, rate_per_s=rate), **({} if rho is None else {"rho": rho})}
        for arm in ("fcfs", "adaptive")
        for rate, rho in ((0.5, 0.3), (1.5, 0.9), (2.0, None))
    ]
    lines = [v.line for v in verdict(some, [limit])]
    assert [line.split(",")[0] for line in lines] == [
        "met      t at 0.5/s (rho 0.3) on p", "met      t at 2/s on p",
    ]  # fmt: skip


def test_each_ratio_is_the_one_it_says():
    """Of hand-made figures, all different."""
    ours = result("adaptive", 3.0, by_size=by_size(1, 2, 3, 6), programs_per_s=2.0,
                  slowdown={"mean": 5.0, "p99": 7.0}, response_s={"mean": 11.0})  # fmt: skip
    stock = result("fcfs", 4.0, by_size=by_size(2, 1, 2, 8), programs_per_s=3.0,
                   slowdown={"mean": 4.0, "p99": 14.0}, response_s={"mean": 10.0})  # fmt: skip
    some = (ours, stock, result("mlfq", 2.5), result("srpt", 2.0), result("srpt-smith", 1.0),
            {**result("clairvoyant", 1.0), "member": "srpt-smith"})  # fmt: skip
    assert {name: ratio(name, *some) for name in gate.RATIOS} == {
        "mean token latency ÷ stock's": 0.75,
        "mean response ÷ stock's": 1.1,
        "mean slowdown ÷ stock's": 1.25,
        "P99 slowdown ÷ stock's": 0.5,
        "worst quartile's slowdown ÷ stock's worst": 0.75,
        "a quartile's slowdown ÷ its own under stock, worst": 2.0,
        "mean token latency ÷ clairvoyant reference": 3.0,
        "mean token latency ÷ best other arm": 1.2,
        "best other arm's programs/s ÷ ours": 1.5,
    }


def test_the_limits_of_the_file_are_these():
    """Of the adaptive policy beside stock vLLM; a looser one is a decision and shows here."""
    limits = gate.limits()
    assert {(limit.arm, limit.stock) for limit in limits} == {("adaptive", "fcfs")}
    assert {limit.ratio: (limit.at_most, *limit.rho) for limit in limits} == {
        "mean token latency ÷ stock's": (1.02, 0.0, 0.3),
        "mean response ÷ stock's": (1.02, 0.0, 0.3),
        "mean slowdown ÷ stock's": (1.02, 0.0, 0.3),
        "P99 slowdown ÷ stock's": (1.0, 0.0, float("inf")),
        "worst quartile's slowdown ÷ stock's worst": (1.0, 0.0, float("inf")),
        "a quartile's slowdown ÷ its own under stock, worst": (1.3, 0.0, float("inf")),
        "mean token latency ÷ clairvoyant reference": (1.5, 0.9, float("inf")),
        "mean token latency ÷ best other arm": (1.05, 0.0, float("inf")),
        "best other arm's programs/s ÷ ours": (1.0, 0.9, float("inf")),
    }


def test_the_set_has_the_arms_of_its_limits():
    """Wherever a limit is judged, the judged arm, stock's and one that knows the future run."""
    loads: dict[tuple[str, float], set[str]] = {}
    for rho, cell in gate.cells():
        loads.setdefault((cell.trace, rho), set()).add(cell.arm)
    assert len(loads) == 16
    for (trace, rho), run in loads.items():
        some = [result(arm, 1.0, trace=trace, rho=rho) for arm in run]
        judged = verdict(some, gate.limits())
        assert len(judged) >= 4
        assert all(v.met for v in judged), [v.line for v in judged]


TINY = """
horizon_s = 45
[capacity]
"a100-80g-llama-3.1-8b" = { "bfcl-gt" = 2.0 }
[[cells]]
traces = ["bfcl-gt"]
profile = "a100-80g-llama-3.1-8b"
arms = ["coarse-fcfs", "coarse-plas"]
rho = [0.25, 0.5]
[judged]
arm = "coarse-plas"
stock = "coarse-fcfs"
[[limits]]
ratio = "mean token latency ÷ stock's"
at_most = 1.1
[[limits]]
ratio = "mean slowdown ÷ stock's"
at_most = AT_MOST
rho = [0.5, inf]
"""


@pytest.mark.parametrize(("at_most", "status"), [("1.1", 0), ("0.1", 1)])
def test_the_gate_runs_every_seed_and_says_what_it_makes_of_them(
    at_most: str, status: int, tmp_path: Path, monkeypatch, capsys
):
    """A row and a result per seed with the load's share, a line per limit, and the status."""
    (tmp_path / "gate.toml").write_text(TINY.replace("AT_MOST", at_most), encoding="utf-8")
    monkeypatch.setattr(gate, "FILE", tmp_path / "gate.toml")
    out = tmp_path / "r.json"
    assert cli.simulate(["--gate", "--seed", "3", "--seeds", "2", "--json", str(out)]) == status
    results = json.loads(out.read_bytes())["results"]
    assert sorted((r["seed"], r["rho"], r["rate_per_s"], r["arm"]) for r in results) == [
        (seed, rho, 2 * rho, arm)
        for seed in (3, 4) for rho in (0.25, 0.5) for arm in ("coarse-fcfs", "coarse-plas")
    ]  # fmt: skip
    _, *rows, low, high, second, last = capsys.readouterr().out.splitlines()
    assert [row[row.index("  rho"):] for row in rows] == ["  rho 0.25", "  rho 0.25",
                                                          "  rho 0.5", "  rho 0.5"] * 2  # fmt: skip
    assert low.startswith("met      bfcl-gt at 0.5/s (rho 0.25) on a100-80g-llama-3.1-8b, mean tok")
    assert high.startswith("met      bfcl-gt at 1/s (rho 0.5)")
    assert all(line.split(", at most")[0].endswith(" of 2 seeds") for line in (low, high, second))
    assert second.startswith("MISSED" if status else "met ")
    assert last == f"{3 - status} of 3 limits are met"

"""The clairvoyant reference by name, and searches over several seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autellix.server.lab import capacity, cli, metrics
from autellix.server.lab.arms import CLAIRVOYANT
from autellix.server.lab.capacity import NotCrossedError, references, told

SMALL = ["--trace", "bfcl-gt", "--programs", "12"]


def result(arm: str, latency_s: float | None, seed: int = 0) -> dict:
    """Return a result; without a latency nothing was measured."""
    token = {} if latency_s is None else {"mean": latency_s}
    return {"trace": "t", "profile": "p", "rate_per_s": 1.0, "engines": 1, "balancer": "b",
            "seed": seed, "arm": arm, "token_latency_s": token}  # fmt: skip


def test_the_reference_is_the_best_member_cell_by_cell():
    """Arms that know nothing of the future do not count, nor does a run without a figure."""
    some = [result("srpt", 0.2), result("srpt-smith", 0.1), result("fcfs", 0.01),
            result("srpt-admit", None, 1), result("srpt", 0.3, 1), result("srpt-smith", 0.4, 1),
            ]  # fmt: skip
    found = [(r["seed"], r["arm"], r["member"]) for r in references(some)]
    assert found == [(0, "clairvoyant", "srpt-smith"), (1, "clairvoyant", "srpt")]
    assert [r["token_latency_s"]["mean"] for r in references(some)] == [0.1, 0.3]
    assert references([result("fcfs", 0.1)]) == []


def test_the_reference_by_name_is_its_four_members_and_a_row(tmp_path: Path, capsys):
    """Each member is run once, also if it is named besides; the row says whose figures it has."""
    out = tmp_path / "r.json"
    arguments = ["--trace", "bfcl-gt", "--programs", "3", "--rate", "4", "--json", str(out)]
    assert cli.simulate([*arguments, "--policy", "clairvoyant,srpt"]) == 0
    *members, reference = json.loads(out.read_bytes())["results"]
    assert tuple(r["arm"] for r in members) == CLAIRVOYANT
    assert reference["arm"] == "clairvoyant"
    by_arm = {r["arm"]: r["token_latency_s"]["mean"] for r in members}
    best = min(by_arm, key=by_arm.__getitem__)
    assert (reference["member"], reference["token_latency_s"]["mean"]) == (best, by_arm[best])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("clairvoyant ")
    assert row.endswith(f"  = {best}")


def test_a_search_of_the_reference_asks_each_member_at_each_rate(tmp_path: Path, capsys):
    """The reference's row is judged against the limit."""
    out = tmp_path / "r.json"
    arguments = ["--trace", "bfcl-gt", "--programs", "1", "--rate", "1,2", "--json", str(out)]
    assert cli.simulate([*arguments, "--slo", "9", "--policy", "clairvoyant"]) == 1
    results = json.loads(out.read_bytes())["results"]
    assert [(r["rate_per_s"], r["arm"]) for r in results] == [
        (rate, arm) for rate in (1.0, 2.0) for arm in (*CLAIRVOYANT, "clairvoyant")
    ]
    assert "clairvoyant: no figure: it still holds at 2.0/s" in capsys.readouterr().out


def test_the_rate_at_a_limit_is_found_for_each_seed(tmp_path: Path, capsys):
    """Printed are the mean, and of the second arm the paired ratios, with their intervals."""
    out = tmp_path / "r.json"
    arguments = [*SMALL, "--rate", "0.2,40", "--slo", "0.03", "--seeds", "2", "--json", str(out)]
    assert cli.simulate([*arguments, "--policy", "coarse-fcfs,coarse-plas"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    held = {}
    for r in json.loads(out.read_bytes())["results"]:
        if r["token_latency_s"]["mean"] <= 0.03:
            cell = (r["arm"], r["seed"])
            held[cell] = max(held.get(cell, 0.0), r["rate_per_s"])
    assert set(held) == {(arm, n) for arm in ("coarse-fcfs", "coarse-plas") for n in (0, 1)}
    fcfs, plas = ([held[arm, n] for n in (0, 1)] for arm in ("coarse-fcfs", "coarse-plas"))
    assert fcfs[0] != fcfs[1]
    said = "bfcl-gt, mean token latency <= 0.03 s, "
    assert first == f"{said}coarse-fcfs: {mean(fcfs)} programs/s, 2 seeds"
    ratios = [plas[n] / fcfs[n] for n in (0, 1)]
    assert second == (
        f"{said}coarse-plas: {mean(plas)} programs/s, 2 seeds; {mean(ratios)} x coarse-fcfs"
    )
    alone = out.read_bytes()
    assert cli.simulate([*arguments, "--policy", "coarse-fcfs,coarse-plas", "--jobs", "2"]) == 0
    assert out.read_bytes() == alone, "several searches at once find and write the same"
    assert capsys.readouterr().out.splitlines()[-2:] == [first, second]


def mean(values: list[float]) -> str:
    """Return the mean of two values with its interval, as it is printed."""
    low, high = metrics.bootstrap(values)
    return f"{sum(values) / 2:.3f} [{low:.3f}, {high:.3f}]"


def test_a_seed_without_a_rate_leaves_no_mean():
    """Of the rest it would be one of other programs; who is set beside such an arm has no ratio."""
    none = NotCrossedError("it still holds")
    assert told([1.0]) == "1.000 programs/s"
    assert told([none]) == "no figure: it still holds"
    assert told([1.0, none], 5) == "no figure: seed 6: it still holds"
    assert told([2.0, 2.0], base=("fcfs", [1.0, none])) == (
        "2.000 [2.000, 2.000] programs/s, 2 seeds"
    )
    assert told([2.0, 4.0], base=("fcfs", [1.0, 2.0])).endswith("; 2.000 [2.000, 2.000] x fcfs")


@pytest.mark.parametrize(("ends", "status"), [("0.05,20", 0), ("10,20", 1)])
def test_the_capacity_is_found_for_each_seed_and_kept(
    ends: str, status: int, tmp_path: Path, capsys
):
    """What was run is written, whether there is a rate or not."""
    out = tmp_path / "r.json"
    arguments = ["--horizon", "60", "--policy", "coarse-fcfs", "--capacity", ends, "--seeds", "2"]
    assert cli.simulate([*arguments, "--json", str(out)]) == status
    results = json.loads(out.read_bytes())["results"]
    assert {r["seed"] for r in results} == {0, 1}
    printed = capsys.readouterr()
    last = (printed.err if status else printed.out).splitlines()[-1]
    if status:
        assert "no figure: seed 0: it does not hold at 10.0/s" in last
        return
    rates = [max(r["rate_per_s"] for r in results if r["seed"] == n and capacity.sustains(r))
             for n in (0, 1)]  # fmt: skip
    assert last == f"bfcl-gt on a100-80g-llama-3.1-8b: {mean(rates)} programs/s, 2 seeds"

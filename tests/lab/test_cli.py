"""The lab's commands from outside: what they print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autellix.server.lab import cli
from autellix.server.lab.result_cache import ResultCache, key
from autellix.server.lab.simulate_command import main as simulate_main
from tests.processes import children_of, is_alive
from tests.serve_process import wait_until


def test_a_smoke_run_prints_a_row_per_policy_and_writes_json(tmp_path: Path, capsys):
    """Two policies, one line each, the documented figures in the file, and the cache is used."""
    out, cache = tmp_path / "out" / "r.json", tmp_path / "cache"
    arguments = ["--trace", "bfcl-gt", "--policy", "fcfs,plas:beta=null;level_bounds_s=[1,4]"]
    arguments += ["--programs", "2", "--json", str(out), "--cache", str(cache)]
    assert cli.simulate(arguments) == 0
    first = out.read_bytes()
    assert len(list(cache.glob("*.json"))) == 2
    assert cli.simulate(arguments) == 0
    assert out.read_bytes() == first
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:3]] == ["fcfs", "plas:beta=null;level_bounds_s=[1,4]"]
    results = json.loads(first)["results"]
    for result in results:
        assert result["programs"] == 2
        assert {"token_latency_s", "response_s", "slowdown", "by_size", "engine", "call",
                "goodput_share", "wait_share", "backlog_slope_per_s"} <= set(result)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing"], "no trace 'nothing'"),
        (["--policy", "best"], "no policy 'best'"),
        (["--profile", "abacus"], "no profile 'abacus'"),
        (["--policy", "plas:levels=3"], "unknown scheduler setting 'levels'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], message: str, capsys):
    """No traceback for what a user typed."""
    assert cli.simulate([*arguments, "--programs", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        *(f"--{name}={value}" for name in ("rate", "capacity", "slo", "horizon", "drain")
          for value in ("0", "-1", "nan", "inf", "soon")),
        *(f"--{name}={value}" for name in ("engines", "programs", "concurrency", "seeds", "jobs")
          for value in ("0", "-1", "1.5", "many")),
        *(f"--{name}={value}" for name in ("wait-scale", "wait-cap")
          for value in ("-1", "nan", "inf", "long")),
        *(f"--{name}={value}" for name in ("slow", "dead")
          for value in ("2", "a=1", "1=0", "1=nan", "1=2=3")),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(wrong: str, capsys):
    """Argparse names the option and the value, and ends with its own status."""
    with pytest.raises(SystemExit) as ended:
        simulate_main([wrong])
    assert ended.value.code == 2
    name, value = wrong.split("=", 1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {name}: {value!r} is no " in last


def test_a_short_run_may_leave_long_programs_more_time(tmp_path: Path):
    """--horizon scales the drain limit with the rest; --drain sets it by itself."""
    drains_s = {}
    for name, more in (("scaled", []), ("set", ["--drain", "900"])):
        out = tmp_path / f"{name}.json"
        arguments = ["--horizon", "30", "--policy", "coarse-fcfs", "--rate", "0.5", *more]
        assert cli.simulate([*arguments, "--json", str(out)]) == 0
        rule = json.loads(out.read_bytes())["results"][0]["rule"]
        drains_s[name] = (rule["drain_s"], rule["warmup_s"])
    assert drains_s == {"scaled": (60.0, 5.0), "set": (900.0, 5.0)}


SMALL = ["--trace", "bfcl-gt", "--programs", "12"]


def test_the_rate_at_a_limit_lies_where_the_limit_is_crossed(tmp_path: Path, capsys):
    """By bisection between two rates, to 2 %, for each policy by itself."""
    out = tmp_path / "r.json"
    arguments = [*SMALL, "--rate", "0.2,40", "--slo", "0.03", "--json", str(out)]
    assert cli.simulate([*arguments, "--policy", "coarse-fcfs,coarse-plas"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    results = json.loads(out.read_bytes())["results"]
    for arm, line in (("coarse-fcfs", first), ("coarse-plas", second)):
        ran = {r["rate_per_s"]: r["token_latency_s"]["mean"] for r in results if r["arm"] == arm}
        held = max(rate for rate, mean in ran.items() if mean <= 0.03)
        crossed = min(rate for rate, mean in ran.items() if mean > 0.03)
        assert held < crossed <= held * 1.02 + 1e-6
        assert line == f"bfcl-gt, mean token latency <= 0.03 s, {arm}: {held:.3f} programs/s"


def test_a_limit_that_is_not_crossed_is_no_figure(tmp_path: Path, capsys):
    """It is said for which policy, the status says it too, and what was run is kept."""
    out = tmp_path / "r.json"
    arguments = [*SMALL, "--rate", "0.2,0.4", "--slo", "5", "--policy", "coarse-fcfs"]
    assert cli.simulate([*arguments, "--json", str(out)]) == 1
    assert "coarse-fcfs: no figure: it still holds at 0.4/s" in capsys.readouterr().out
    assert [r["rate_per_s"] for r in json.loads(out.read_bytes())["results"]] == [0.2, 0.4]


def test_a_capacity_is_that_of_the_members_that_are_named(capsys):
    """Without --policy all that know the future are asked."""
    arguments = [*SMALL, "--capacity", "100,200", "--policy", "coarse-fcfs"]
    assert cli.simulate(arguments) in (0, 1)
    rows = capsys.readouterr().out.splitlines()[1:]
    assert {row.split()[0] for row in rows if not row.startswith("bfcl-gt")} == {"coarse-fcfs"}


def test_a_run_with_drawn_waits_is_drawn(tmp_path: Path):
    """The page and its pictures lie in the folder; the waits are others than those of nothing."""
    tool_s = {}
    for waits in ("zero", "drawn"):
        out = tmp_path / f"{waits}.json"
        arguments = ["--programs", "2", "--policy", "coarse-fcfs", "--json", str(out)]
        arguments += ["--plot", str(tmp_path / waits), "--null-waits", waits]
        assert cli.simulate(arguments) == 0
        tool_s[waits] = json.loads(out.read_bytes())["results"][0]["tool_s_mean"]
    assert tool_s["drawn"] > tool_s["zero"] == 0
    assert "<table>" in (tmp_path / "drawn" / "index.html").read_text(encoding="utf-8")
    pictures = list((tmp_path / "drawn").glob("*.png"))
    assert pictures
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_trace_check_prints_the_means(capsys):
    """One line per set."""
    assert cli.trace(["check", "chat-real", "tau-airline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["chat-real", "30"], ["tau-airline", "92"]]


def test_the_key_of_a_result_is_all_it_depends_on(tmp_path: Path, small_profile):
    """Another seed, rate or constant is another result; the same cell is run once."""
    from dataclasses import replace

    from autellix.server.lab.measure import Cell

    cell = Cell(trace="bfcl-gt", arm="fcfs", profile=small_profile, rate_per_s=1.0)
    others = [replace(cell, seed=1), replace(cell, rate_per_s=2.0), replace(cell, arm="plas"),
              replace(cell, profile=small_profile.scaled("gap_s", 1.3))]  # fmt: skip
    assert len({key(c) for c in (cell, *others)}) == 5
    calls = []
    cache = ResultCache(tmp_path)
    for _ in range(2):
        result = cache.get(cell, lambda: calls.append(1) or {"value": 7})
    assert result == {"value": 7}
    assert calls == [1]


def test_a_killed_run_takes_its_processes_with_it():
    """Of ``--jobs``: each would go on with its cell, for minutes."""
    command = [sys.executable, "-m", "autellix", "simulate", "--trace", "chat-sharegpt"]
    command += ["--policy", "fcfs,plas", "--rate", "2", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        wait_until(lambda: len(busy_below(run.pid)) == 2, 120)
        children = children_of(run.pid)
        run.kill()
    wait_until(lambda: not any(map(is_alive, children)), 20)


def busy_below(pid: int) -> list[int]:
    """Return the processes below that have taken over 5 s of a processor: they are in a cell."""
    ticks = {}
    for child in children_of(pid):
        stat = Path(f"/proc/{child}/stat")
        if stat.exists():
            ticks[child] = int(stat.read_text().rpartition(")")[2].split()[11])
    return [child for child, spent in ticks.items() if spent > 500]

"""What the key of a kept result hangs on besides the cell: code, trace, drawn waits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from autellix.server.lab import result_cache
from autellix.server.lab.measure import Cell
from autellix.server.lab.result_cache import key
from autellix.server.lab.workload import Waits


@pytest.fixture
def cell(small_profile, monkeypatch) -> Cell:
    """A cell; nothing that a key is made of is remembered from before."""
    for digest in (result_cache.code_key, result_cache._trace_key):
        digest.cache_clear()
        # Whatever a test puts in place is forgotten with it.
        monkeypatch.setattr(result_cache, digest.__name__, digest.__wrapped__)
    return Cell(trace="bfcl-gt", arm="fcfs", profile=small_profile, rate_per_s=1.0)


def test_other_code_is_another_key(cell: Cell, tmp_path: Path, monkeypatch):
    """A file that decides in a simulation changed, came or has another name; no other file."""
    server = tmp_path / "server"
    shutil.copytree(result_cache._SERVER, server, ignore=shutil.ignore_patterns("traces", "*.so"))
    before = key(cell)
    monkeypatch.setattr(result_cache, "_SERVER", server)
    assert key(cell) == before
    (server / "gateway" / "app.py").write_text("")
    (server / "lab" / "notes.md").write_text("")
    assert key(cell) == before
    keys = [before]
    for name in ("lab/simulate.py", "engine/scheduler.py", "policy/service.py", "call_tag.py"):
        with (server / name).open("a") as file:
            file.write("\n")
        keys.append(key(cell))
    (server / "policy" / "another.py").write_text("")
    keys.append(key(cell))
    (server / "policy" / "another.py").rename(server / "policy" / "renamed.py")
    keys.append(key(cell))
    assert len(set(keys)) == 7


def test_another_trace_is_another_key(cell: Cell, tmp_path: Path):
    """Of a file the content counts."""
    path = tmp_path / "some.jsonl"
    path.write_text("{}\n")
    of_file = replace(cell, trace=str(path))
    before = key(of_file)
    assert key(of_file) == before
    path.write_text("{} \n")
    assert key(of_file) != before


def test_a_set_that_changed_is_another_key(cell: Cell, tmp_path: Path, monkeypatch):
    """So it is for the mixed one, which is of all sets."""
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path)
    mixed = replace(cell, trace="mixed")
    (tmp_path / "bfcl-gt.jsonl.xz").write_bytes(b"a")
    before = key(cell), key(mixed)
    (tmp_path / "chat-real.jsonl.xz").write_bytes(b"a")
    assert key(cell) == before[0]
    assert key(mixed) != before[1]
    (tmp_path / "bfcl-gt.jsonl.xz").write_bytes(b"b")
    assert key(cell) != before[0]


def test_drawn_waits_hang_on_what_they_are_drawn_from(cell: Cell, tmp_path: Path, monkeypatch):
    """A wait that counts nothing does not."""
    shutil.copy(result_cache.FOLDER / "distributions.json", tmp_path)
    shutil.copy(result_cache.FOLDER / "bfcl-gt.jsonl.xz", tmp_path)
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path)
    drawn = replace(cell, waits=Waits(null="drawn"))
    before = key(cell), key(drawn)
    assert before[0] != before[1]
    with (tmp_path / "distributions.json").open("a") as file:
        file.write("\n")
    assert key(cell) == before[0]
    assert key(drawn) != before[1]

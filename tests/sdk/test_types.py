"""Type checkers see exact types through every decorator."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = "tests/typing/sdk_types.py"


def test_mypy_sees_exact_types():
    """Strict, with each wrong use refused."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", FILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    mine = [line for line in done.stdout.splitlines() if line.startswith("tests/typing")]
    assert not mine, done.stdout
    assert "Success" in done.stdout or "tests/typing" not in done.stdout


def test_pyright_sees_exact_types():
    """The same file, where pyright is installed."""
    pyright = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright is not installed")
    done = subprocess.run(
        [pyright, "--level", "error", "--pythonpath", sys.executable, FILE],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

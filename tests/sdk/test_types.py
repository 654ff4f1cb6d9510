"""Type checkers see exact types through every decorator."""

from __future__ import annotations

import re
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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    mine = [line for line in done.stdout.splitlines() if line.startswith("tests/typing")]
    assert not mine, done.stdout
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_sees_exact_types():
    """Where it is installed: it objects to each wrong use in the file, and to nothing else."""
    pyright = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("basedpyright is not installed")
    command = [pyright, "--level", "error", "--pythonpath", sys.executable, FILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    objected = {int(n) for n in re.findall(r"sdk_types\.py:(\d+):\d+ - error", done.stdout)}
    lines = (ROOT / FILE).read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# type: ignore[" in line}
    assert objected == wrong, done.stdout

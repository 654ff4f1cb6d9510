"""Make each environment, run its tests in it, and write the table of what happened.

    python -m tests.sdk.compat.run [NAME …]

An environment is made once for its list of packages; `make clean-compat` makes them all anew. The
table is written after each one, from the latest report of every environment.

The interpreters are ``python3.10`` and so on from PATH, or from ``PYTHONS``, a list of folders.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from .environments import CORE, ENVIRONMENTS, Environment

ROOT = Path(__file__).parents[3]
HOME = ROOT / ".venv-compat"
TABLE = ROOT / "docs" / "compatibility.md"
TOOLS = ("pytest>=9", "pytest-asyncio", "pytest-timeout", "typing_extensions")
UPSTREAM = "\n<!-- by tests.sdk.compat.upstream -->\n\n"
HEAD = """\
# Compatibility

Written by `make compat`; do not edit. Each row is an environment of its own, made from scratch with
the newest versions that its requirement allows. The tests ask a fake OpenAI server on loopback what
session, thread and parent each call carried. The last column is what `autellix doctor` found there:
each client that is installed, and the hook that tags its calls.

| environment | Python | versions | tests passed | skipped | failed | doctor |
|---|---|---|---|---|---|---|
"""


class Outcome(NamedTuple):
    """What the tests of one environment did."""

    environment: Environment
    python: str
    versions: str
    passed: int
    skipped: int
    failed: tuple[str, ...]
    doctor: str  # which hook tags each client that is installed
    cases: tuple[tuple[str, str], ...]  # what was shown, and how it ended


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that starts, or None."""
    folders = os.environ.get("PYTHONS", "").replace(":", os.pathsep)
    path = os.pathsep.join(p for p in (folders, os.environ.get("PATH", "")) if p)
    found = shutil.which(f"python{version}", path=path)
    if found is None or subprocess.run([found, "-V"], capture_output=True).returncode != 0:
        return None
    return found


def prepare(environment: Environment) -> Path | None:
    """Return the interpreter of a fresh environment, or None if there is no such Python."""
    python = find_python(environment.python)
    if python is None:
        return None
    folder = HOME / environment.name
    inside = folder / "bin" / "python"
    stamp = folder / "made-from"
    recipe = "\n".join((environment.python, *TOOLS, *environment.packages))
    if stamp.exists() and stamp.read_text() == recipe:
        return inside
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    install = [str(inside), "-m", "pip", "install", "-qq", "--disable-pip-version-check",
               "--no-compile"]  # fmt: skip  # most of it is never imported
    subprocess.run([*install, *TOOLS, *environment.packages], check=True)
    stamp.write_text(recipe)
    return inside


def run(environment: Environment, python: Path) -> Outcome:
    """Run the tests of an environment."""
    report_of(environment).unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-c", "tests/sdk/compat/pytest.ini",
               "--rootdir", str(ROOT), "--confcutdir", str(ROOT),
               f"--junitxml={report_of(environment)}", *environment.tests]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AUTELLIX_", "OPENAI_"))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # what is imported is compiled once
    env["PYTHONPATH"] = str(lay_out())
    subprocess.run(command, cwd=ROOT, env=env)
    ask_doctor(environment, python, env)
    return read(environment)


def lay_out() -> Path:
    """Return a folder with the package as a wheel has it: the SDK with its adapters inside."""
    package = HOME / "package" / "autellix"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for part in (ROOT / "sdk" / "autellix").iterdir():
        if part.name != "__pycache__":
            (package / part.name).symlink_to(part)
    (package / "integrations").symlink_to(ROOT / "integrations")
    return package.parent


def ask_doctor(environment: Environment, python: Path, env: Mapping[str, str]) -> None:
    """Keep what ``autellix doctor`` says in an environment."""
    command = [str(python), "-m", "autellix", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    (HOME / f"{environment.name}.doctor").write_text(done.stdout)


def report_of(environment: Environment) -> Path:
    """Return where the tests of an environment leave their report."""
    return HOME / f"{environment.name}.xml"


def read(environment: Environment) -> Outcome:
    """Return what the latest run of an environment's tests showed."""
    report = report_of(environment)
    cases: list[tuple[str, str]] = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in case}
        how = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "✓"
        cases.append((case.get("name", "?").removeprefix("test_").replace("_", " "), how))
    failed = [name for name, how in cases if how == "failed"]
    if not cases:
        failed.append("the tests did not run")
    about = dict(
        line.partition(" = ")[::2]
        for line in (HOME / environment.name / "pyvenv.cfg").read_text().splitlines()
    )
    full = about.get("version") or about.get("version_info", "?")
    versions = ", ".join(f"{p} {version_of(environment, p)}" for p in environment.shows)
    passed = sum(how == "✓" for _, how in cases)
    skipped = sum(how == "skipped" for _, how in cases)
    said = diagnosis(environment)
    return Outcome(environment, full, versions, passed, skipped, tuple(failed), said, tuple(cases))


def diagnosis(environment: Environment) -> str:
    """Return what ``autellix doctor`` said in an environment: each client, and the hook it has."""
    report = HOME / f"{environment.name}.doctor"
    text = report.read_text() if report.exists() else ""
    findings = json.loads(text)["findings"] if text else []
    return ", ".join(f"{f['package']}: {f['hook']}" for f in findings) or "none"


def version_of(environment: Environment, package: str) -> str:
    """Return the installed version of a package."""
    folders = (HOME / environment.name / "lib").glob("python*/site-packages")
    found = distributions(name=package, path=[str(folder) for folder in folders])
    return next((one.version for one in found), "none")


def write(outcomes: Sequence[Outcome], missing: Sequence[Environment]) -> None:
    """Write the table."""
    rows = [
        f"| {o.environment.name} | {o.python} | {o.versions} | {o.passed} | {o.skipped} "
        f"| {'; '.join(o.failed) or '0'} | {o.doctor} |"
        for o in outcomes
    ]
    rows += [f"| {e.name} | {e.python} | not run: no such Python here | | | | |" for e in missing]
    text = HEAD + "\n".join(rows) + "\n"
    frameworks = [o for o in outcomes if CORE[0] not in o.environment.tests]
    if frameworks:
        text += "\n## What was shown with each framework\n"
    for outcome in frameworks:
        text += f"\n### {outcome.environment.name}\n\n"
        text += "\n".join(f"* {name}: {how}" for name, how in outcome.cases) + "\n"
    TABLE.parent.mkdir(exist_ok=True)
    before = TABLE.read_text() if TABLE.exists() else ""
    _, found, upstream = before.partition(UPSTREAM)
    TABLE.write_text(text + found + upstream)


def write_section(title: str, text: str) -> None:
    """Put what the published tests did at the end of the table's document."""
    before = TABLE.read_text() if TABLE.exists() else HEAD
    TABLE.write_text(before.partition(UPSTREAM)[0] + UPSTREAM + f"## {title}\n\n{text}")


def main(names: Sequence[str]) -> int:
    """Run all environments, or those named; returns 0 if nothing failed.

    ``--table`` alone writes the table of what ran before.
    """
    if list(names) == ["--table"]:
        write([read(e) for e in ENVIRONMENTS if report_of(e).exists()], [])
        return 0
    chosen = [e for e in ENVIRONMENTS if not names or e.name in names]
    outcomes, missing = [], []
    for environment in chosen:
        sys.stdout.write(f"· {environment.name}: {', '.join(environment.packages)}\n")
        sys.stdout.flush()
        try:
            python = prepare(environment)
        except subprocess.CalledProcessError as error:
            nothing = (f"could not be installed ({error.returncode})",)
            outcomes.append(Outcome(environment, environment.python, "", 0, 0, nothing, "", ()))
            continue
        if python is None:
            missing.append(environment)
            continue
        outcomes.append(run(environment, python))
        shown = [read(e) for e in ENVIRONMENTS if report_of(e).exists()]
        write(shown, missing)
    for outcome in outcomes:
        sys.stdout.write(
            f"{outcome.environment.name}: {outcome.passed} passed, {outcome.skipped} skipped, "
            f"failed: {'; '.join(outcome.failed) or 'none'}\n"
        )
    return 1 if any(o.failed for o in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

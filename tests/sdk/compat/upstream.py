"""Runs the published tests of LangGraph and AutoGen without autellix and with it, and compares.

    python -m tests.sdk.compat.upstream [NAME …] [tests/FILE …]

The tests are those in the source distribution of the very release that is installed. They run
twice in one environment: as they are, and with ``import autellix`` before the first test, so that
the hooks are in place and every test runs in the process session. What is written to
``docs/compatibility.md`` is how many ended how, and each test that ended otherwise with autellix.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

from .environments import Environment
from .run import HOME, ROOT, prepare, write_section

TITLE: Final = "Their own tests"
TEST_S_MAX: Final = 120
RUN_S_MAX: Final = 900
AGAIN: Final = "-again"
AGAIN_MAX: Final = 3
LATER: Final = """
Ended otherwise in a run with others on two busy cores, one way or the other, and alike when run
again alone; they depend on short sleeps and time-outs:

"""


class Ending(NamedTuple):
    """How a test ended; if it failed, the first line of why."""

    how: str
    why: str


class Suite(NamedTuple):
    """The published tests of one framework."""

    name: str
    distribution: str  # with its version
    packages: tuple[str, ...]  # what its tests need besides
    build: str  # what its source distribution is made with
    options: tuple[str, ...]


SUITES: Final = (
    Suite(
        "langgraph", "langgraph==1.2.24",
        ("httpx", "pytest-mock", "syrupy", "pytest-xdist", "requests", "redis", "pycryptodome",
         "psycopg[binary,pool]", "langgraph-checkpoint-sqlite", "langgraph-checkpoint-postgres",
         "langgraph-prebuilt"),
        "hatchling", ("-p", "no:asyncio"),
    ),
    Suite(
        "autogen-agentchat", "autogen-agentchat==0.7.5",
        ("autogen-ext[openai,mcp]==0.7.5", "mcp<2", "anthropic", "pytest-xdist"), "hatchling",
        ("-o", "asyncio_mode=strict"),
    ),
)  # fmt: skip


def fetch(suite: Suite, python: Path) -> Path:
    """Return the folder with the tests of the release, taken from its source distribution."""
    home = HOME / f"upstream-{suite.name}-source"
    if not list(home.glob("*/tests")):
        home.mkdir(parents=True, exist_ok=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([*pip, "install", "-qq", suite.build], check=True)
        subprocess.run(
            [*pip, "download", "-qq", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
             "-d", str(home), suite.distribution], check=True,
        )  # fmt: skip
        (archive,) = home.glob("*.tar.gz")
        with tarfile.open(archive) as source:
            tests = [m for m in source if "/tests/" in m.name or m.name.endswith("/pyproject.toml")]
            source.extractall(home, members=tests, filter="data")
    (folder,) = home.glob("*/tests")
    return folder.parent


def run(
    suite: Suite, python: Path, source: Path, files: Sequence[str], *, armed: bool, again: int
) -> None:
    """Run the tests, all or those in ``files``, and leave their report."""
    report = report_of(suite, files, armed=armed, again=again)
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    workers = "0" if again else "2"
    command = [str(python), "-m", "pytest", "-q", "-n", workers, f"--timeout={TEST_S_MAX}",
               f"--junitxml={report}", *(("-p", "autellix") if armed else ()), *suite.options,
               *(files or ["tests"])]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AUTELLIX_", "OPENAI_"))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["OPENAI_API_KEY"] = "none"  # some make a client, and no call
    env["NO_DOCKER"] = "true"  # no PostgreSQL, no Redis
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "sdk"), str(source)))
    with subprocess.Popen(command, cwd=source, env=env, start_new_session=True) as process:
        try:
            process.wait(RUN_S_MAX)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it leaves the report of what has ended


def report_of(suite: Suite, files: Sequence[str], *, armed: bool, again: int) -> Path:
    """Return where a run of these files leaves its report."""
    which = Path(files[0].partition("::")[0]).stem if files else "all"
    kind = f"{'armed' if armed else 'plain'}{f'{AGAIN}{again}' if again else ''}"
    return reports_of(suite) / f"{which}.{kind}.xml"


def reports_of(suite: Suite) -> Path:
    """Return the folder with the reports of a suite."""
    return HOME / f"upstream-{suite.name}-reports"


def read(suite: Suite, *, armed: bool, again: bool = True) -> dict[str, Ending]:
    """Return how each test ended in the latest run with it; perhaps without those run again."""
    ended: dict[str, Ending] = {}
    kind = "armed" if armed else "plain"
    reports = [*reports_of(suite).glob(f"*.{kind}.xml")]
    reports += reports_of(suite).glob(f"*.{kind}{AGAIN}*.xml") if again else []
    for report in sorted(reports, key=lambda path: path.stat().st_mtime):
        fresh = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}".removeprefix(".")
            bad = next((child for child in case if child.tag in ("failure", "error")), None)
            how = "ok" if case.find("skipped") is None else "skipped"
            why = "" if bad is None else str(bad.get("message")).partition("\n")[0]
            fresh[name] = Ending(how if bad is None else "failed", why)
        for test in fresh:
            ended.pop(".".join(test.split(".")[:2]), None)  # its file could not be read, once
        ended |= fresh
    return ended


def file_of(test: str) -> str:
    """Return the file that a test is in: its name is ``tests.FILE.…``."""
    return f"{test.split('.')[1]}.py"


def address_of(test: str) -> str:
    """Return what pytest calls a test."""
    path, _, values = test.partition("[")
    folder, file, *rest = path.split(".")
    return "::".join((f"{folder}/{file}.py", *rest)) + f"[{values}" * bool(values)


def differing(suite: Suite, *, again: bool = True) -> list[str]:
    """Return the tests that ended otherwise with autellix."""
    plain, armed = (read(suite, armed=armed, again=again) for armed in (False, True))
    both = plain.keys() & armed.keys()
    return sorted(test for test in both if plain[test].how != armed[test].how)


def unsettled(suite: Suite) -> list[str]:
    """Return the tests that ended otherwise with autellix, or failed."""
    plain, armed = (read(suite, armed=armed) for armed in (False, True))
    return sorted(
        test
        for test in plain.keys() & armed.keys()
        if {plain[test].how, armed[test].how} not in ({"ok"}, {"skipped"}) and test.count(".") > 1
    )


def run_both(suite: Suite, files: Sequence[str]) -> None:
    """Run a suite without autellix and with it, if its Python is here.

    Many of the tests sleep, and want to be awake in time: what fails, or ends otherwise, is run
    again alone.
    """
    environment = Environment(
        f"upstream-{suite.name}", "3.12", (suite.distribution, *suite.packages), (), ()
    )
    python = prepare(environment)
    if python is None:
        return
    source = fetch(suite, python)
    for armed in (False, True):
        run(suite, python, source, files, armed=armed, again=0)
    for again in range(1, AGAIN_MAX + 1):
        by_file: dict[str, list[str]] = {}
        for test in unsettled(suite):
            by_file.setdefault(file_of(test), []).append(address_of(test))
        for tests in by_file.values():
            for armed in (False, True):
                run(suite, python, source, tests, armed=armed, again=again)


def compare(suite: Suite) -> tuple[list[str], list[str], list[str]]:
    """Return the rows of a suite; what ended otherwise with autellix; what failed both ways."""
    plain, armed = read(suite, armed=False), read(suite, armed=True)
    ran = {file_of(test) for test in plain} & {file_of(test) for test in armed}
    plain, armed = ({t: e for t, e in d.items() if file_of(t) in ran} for d in (plain, armed))
    tests = next(HOME.glob(f"upstream-{suite.name}-source/*/tests"))
    left = sorted({path.name for path in tests.glob("test_*.py")} - ran)
    rows = [
        f"| {suite.distribution} | {len(ran)} of {len(ran) + len(left)} | {what} | "
        + " | ".join(str([e.how for e in d.values()].count(h)) for h in ("ok", "skipped", "failed"))
        + " |"
        for what, d in (("without", plain), ("with `import autellix`", armed))
    ]
    nothing = Ending("not run", "")
    both = [(t, plain.get(t, nothing), armed.get(t, nothing)) for t in sorted({*plain, *armed})]
    differ = [f"* `{t}`: {p.how} without, {a.how} with" for t, p, a in both if p.how != a.how]
    fail = [f"* `{t}`: {p.why[:90]}" for t, p, a in both if p.how == a.how == "failed"]
    return rows, differ, fail + [f"* not run: {', '.join(left)}"] * bool(left)


def write() -> bool:
    """Write what every suite did when it last ran; returns whether nothing ended otherwise."""
    rows: list[str] = []
    differ: list[str] = []
    fail: list[str] = []
    first: list[str] = []
    reports = [path for suite in SUITES for path in reports_of(suite).glob("*.xml")]
    latest = datetime.fromtimestamp(max(path.stat().st_mtime for path in reports), timezone.utc)
    for suite in SUITES:
        if reports_of(suite).exists():
            for whole, part in zip((rows, differ, fail), compare(suite), strict=True):
                whole += part
            alike = set(differing(suite, again=False)) - set(differing(suite))
            first += [f"* `{test}`" for test in sorted(alike)]
    text = (
        "The tests that LangGraph and AutoGen publish with their releases, run by\n"
        "`python -m tests.sdk.compat.upstream [NAME] [tests/FILE …]` without autellix and with\n"
        f"its hooks in place; each file's latest run counts, the last was on {latest:%Y-%m-%d}.\n"
        "What fails both ways lacks a service or a network here, or an older package.\n\n"
        "| tests of | files | autellix | passed | skipped | failed |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\nEnded otherwise with autellix: "
        + ("none.\n" if not differ else "\n\n" + "\n".join(differ) + "\n")
        + (LATER + "\n".join(first) + "\n" if first else "")
        + ("" if not fail else "\nFailed both ways, or not run:\n\n" + "\n".join(fail) + "\n")
    )
    write_section(TITLE, text)
    sys.stdout.write(text)
    return not differ


def main(names: Sequence[str]) -> int:
    """Run all suites, or those named; returns 0 if none of them ends otherwise with autellix.

    ``--table`` alone writes what ran before.
    """
    files = [name for name in names if "/" in name]
    suites = [name for name in names if "/" not in name]
    for suite in SUITES:
        if not suites or suite.name in suites:
            run_both(suite, files)
    return 0 if write() else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Every example once on real vLLM with the bundled model; what was seen is left in out/examples.

python -m pytest tests/examples/test_examples_live.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import ServeProcess, wait_until

from .example_run import EXAMPLES
from .test_notebook import EXECUTE, NOTEBOOK

pytestmark = [pytest.mark.live, pytest.mark.heavy, pytest.mark.timeout(1800)]

OUT = EXAMPLES.parent / "out" / "examples"
AT_ONCE = 3
LIMIT_S = 600
#: Program → the calls of each of its threads, sorted; the graphs of two questions run twice.
SHAPES = {
    "shopping": [3],
    "travel desk": [1, 2],
    "reviews": [1, 1, 1, 1],
    "almanac": [1, 1, 1, 1],
    "day trip": [1, 1, 2],
    "poster": [1, 1, 2],
    "debate": [1, 1, 1, 1, 1],
    "review": [1, 1, 2],
    "notebook": [1, 1, 1, 1, 1],
    "story": [2],
    "tree_search.py": [2] * 10,
}
RUNS = {"shopping": 2, "facts": 2}
BY_THEMSELVES = ("best_of_n.py", "demo.py", "computer_use.py", "web_service.py", "__init__.py")


def environment(server: ServeProcess) -> dict[str, str]:
    """Return where an example, and a command that looks at the server, find it."""
    found = re.search(r"admin site on (\S+), key in (\S+)", server.log.read_text())
    assert found, server.log.read_text()
    key = Path(found[2]).read_text().strip()
    return {
        **os.environ,
        "OPENAI_BASE_URL": server.base_url,
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "smollm2",
        "AUTELLIX_ADMIN_URL": found[1],
        "AUTELLIX_ADMIN_KEY": key,
        "COLUMNS": "100",
    }


def python(name: str, arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run Python to its end, and keep what it printed under a name."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name.replace(' ', '_')}.txt").write_text(done.stdout)
    return done


def tell_a_story(env: dict[str, str]) -> str:
    """Run the web service for one request."""
    service = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "web_service.py")], env={**env, "PORT": "18471"}
    )
    try:

        def ask(path: str) -> str:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:18471{path}", timeout=200) as answer:
                    return answer.read().decode()
            except urllib.error.URLError:
                return ""

        wait_until(lambda: ask("/docs"), LIMIT_S)
        return ask("/story?about=fox")
    finally:
        service.terminate()
        service.wait(20)


def test_best_of_n_on_an_engine_of_its_own():
    """Every rollout gets both its answers."""
    done = python("best_of_n", [str(EXAMPLES / "best_of_n.py")], {**os.environ})
    assert done.returncode == 0, done.stdout
    assert "best of 4: 12 rollouts, 24 calls, 0 failed" in done.stdout


@pytest.fixture
def server(smollm2: Path, tmp_path: Path) -> Iterator[ServeProcess]:
    """A server of its own, which may take long to start: the machine need not be idle."""
    server = ServeProcess(tmp_path / "log", str(smollm2), "--state", ":memory:")
    try:
        server.wait_ready(900)
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def test_every_example_is_the_program_that_it_says(server: ServeProcess):
    """Each ends well, and the server has its program, with its threads and their calls, ended."""
    env = environment(server)
    names = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.name not in BY_THEMSELVES)
    jobs = {name: [str(EXAMPLES / f"{name}.py")] for name in names}
    jobs["notebook"] = ["-c", EXECUTE, str(NOTEBOOK)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {name: pool.submit(python, name, job, env) for name, job in jobs.items()}
        failed = {n: job.result().stdout for n, job in started.items() if job.result().returncode}
    assert failed == {}
    assert len(tell_a_story(env)) > 20
    blind = python("computer_use", [str(EXAMPLES / "computer_use.py")], env)
    assert "is not a multimodal model" in blind.stdout

    def rows() -> list[dict[str, Any]]:
        return server.ask("GET", "/autellix/v1/programs").json["programs"]

    wait_until(lambda: all(row["state"] == "ended" for row in rows()), 30)
    shapes: dict[str, list[list[int]]] = {}
    for row in rows():
        shapes.setdefault(row["name"], []).append(sorted(t["calls"] for t in row["threads"]))
    for name in ("programs", *shapes):
        command = ["programs"] if name == "programs" else ["show", name]
        line = "import sys; from autellix.cli import main; sys.exit(main())"
        assert python(f"seen-{name}", ["-c", line, *command], env).returncode == 0
    assert {name: shapes.get(name) for name in SHAPES} == {
        name: [shape] * RUNS.get(name, 1) for name, shape in SHAPES.items()
    }
    assert [sum(shape) for shape in shapes["facts"]] == [4, 3]  # a fast one may end before the next

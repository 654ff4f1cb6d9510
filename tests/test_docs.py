"""What the documents say exists: commands, make targets, flags, links and files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
OWN_COMMANDS = {"run", "doctor", "version", "help"}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_PATH = re.compile(r"`([\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|md|toml|txt|lock))`")


def text_of(path: Path) -> str:
    """Return a document."""
    return path.read_text(encoding="utf-8")


def commands_in(text: str) -> Iterator[str]:
    """Yield every command line in code: fenced shell blocks line by line, and inline code."""
    for language, block in _FENCE.findall(text):
        if language in ("", "sh", "bash", "console", "shell"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ ").partition("  #")[0]
    for code in _INLINE.findall(_FENCE.sub("", text)):
        yield code.strip()


def words_of(text: str, program: str) -> Iterator[list[str]]:
    """Yield the words of every command line that begins with ``program``."""
    for command in commands_in(text):
        words = command.split()
        if words[:1] and words[0].rpartition("/")[2] == program and len(words) > 1:
            yield words[1:]


def slug(heading: str) -> str:
    """Return the anchor that a forge gives a heading."""
    plain = re.sub(r"[`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def server_commands() -> set[str]:
    """Return the commands that the server adds to ``autellix``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["entry-points"]["autellix.commands"])


def help_of(command: str) -> str:
    """Return what ``autellix COMMAND --help`` prints."""
    code = f"from autellix.cli import main; main([{command!r}, '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def named(path: Path) -> str:
    """Return a document's name, for the test's id."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_autellix_command_exists(document: Path):
    """No document names a command that ``autellix`` does not have."""
    known = OWN_COMMANDS | server_commands()
    bad = [
        " ".join(words)
        for words in words_of(text_of(document), "autellix")
        if words[0].isidentifier() and not words[0].isupper() and words[0] not in known
    ]
    assert not bad, bad


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_make_target_exists(document: Path):
    """No document names a target that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    bad = [
        words[0]
        for words in words_of(text_of(document), "make")
        if not words[0].isupper() and "=" not in words[0] and words[0] not in targets
    ]
    assert not bad, bad


def test_every_phony_target_has_a_rule():
    """The Makefile names no target that it cannot make."""
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert set(phony.split()) <= set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


def test_every_flag_of_serve_exists():
    """What documents give to ``autellix serve`` is in its help; after ``--`` it is vLLM's."""
    text = help_of("serve")
    assert "--policy" in text
    known = set(re.findall(r"--[a-z][\w-]*", text))
    bad = []
    for document in DOCUMENTS:
        for words in words_of(text_of(document), "autellix"):
            if words[0] != "serve":
                continue
            plain = [word.strip("[]") for word in words]
            ours = plain[: plain.index("--")] if "--" in plain else plain
            flags = {word.partition("=")[0] for word in ours if word.startswith("--")}
            bad += [f"{named(document)}: {flag}" for flag in sorted(flags - known)]
    assert not bad, bad


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_resolves(document: Path):
    """A relative link leads to a file, and its anchor to a heading."""
    bad = []
    for target in _LINK.findall(_FENCE.sub("", text_of(document))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists():
            bad.append(target)
        elif anchor and path.suffix == ".md":
            anchors = {slug(heading) for heading in _HEADING.findall(text_of(path))}
            if anchor not in anchors:
                bad.append(target)
    assert not bad, bad


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_every_file_named_exists(name: str):
    """Paths in backticks are files or folders of this checkout; ``*`` may match many."""
    bad = [
        path
        for path in _PATH.findall(text_of(ROOT / name))
        if "/" in path and not path.startswith("models/") and not list(ROOT.glob(path.rstrip("/")))
    ]
    assert not bad, bad


def test_the_rule_table_points_at_code():
    """Each row of the table *rule → file* names a file and a test that exist."""
    table = text_of(ROOT / "ARCHITECTURE.md").partition("## Rules and where they live")[2]
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 12
    for row in rows:
        paths = _PATH.findall(row)
        assert len(paths) >= 2, f"a rule needs a file and a test: {row}"


def test_the_example_in_the_readme_is_short_and_valid():
    """Its first Python block compiles and has at most eight lines."""
    blocks = [code for language, code in _FENCE.findall(text_of(ROOT / "README.md"))
              if language == "python"]  # fmt: skip
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 8
    for block in blocks:
        compile(block, "README.md", "exec")


def test_no_document_names_a_private_place():
    """No path of somebody's machine is in a document."""
    bad = [
        f"{named(document)}: {word}"
        for document in DOCUMENTS
        for word in re.findall(r"/(?:root|home|work|Users)/\S*", text_of(document))
    ]
    assert not bad, bad


def test_every_dependency_has_a_reason():
    """Each package that an extra names stands in the table of dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = text_of(ROOT / "docs" / "dependencies.md")
    names = {
        re.split(r"[\[<>=]", requirement)[0]
        for extra in project["optional-dependencies"].values()
        for requirement in extra
    } - {"autellix"}
    assert not [name for name in sorted(names) if name not in text]


def test_the_example_in_the_readme_runs():
    """Against a recording server its calls are one program of that name, and it prints answers."""
    from autellix.testing import FakeServer

    blocks = [code for language, code in _FENCE.findall(text_of(ROOT / "README.md"))
              if language == "python"]  # fmt: skip
    with FakeServer() as server:
        code = blocks[0].replace("http://127.0.0.1:8000/v1", server.base_url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("What is the capital of") == len(server.calls) == 3
        assert len({call.session for call in server.calls} - {None}) == 1
        assert server.wait_event("PUT").body["name"] == "capitals"

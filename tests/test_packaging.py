"""What a user installs: the wheel holds everything, needs no compiler, and imports nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
MAPPED = {"sdk/autellix": "autellix", "integrations": "autellix/integrations"}
MAPPED |= {"server": "autellix/server"}
NOT_SHIPPED = {"__pycache__", "ruff.toml"}


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build the wheel of this checkout as `pip install .` does, with the packages at hand."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder)]
    command += [f"--config-settings=build-dir={folder / 'build'}", str(ROOT)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake, ninja
    env = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    """Return the paths in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tracked_files() -> list[str]:
    """Return the files of the three packages that git knows."""
    command = ["git", "ls-files", "-z", *MAPPED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [name for name in names if not NOT_SHIPPED & set(Path(name).parts)]


def place_in_wheel(name: str) -> str:
    """Return where a source file lies in the wheel."""
    for source, package in MAPPED.items():
        if name.startswith(f"{source}/"):
            return package + name.removeprefix(source)
    raise AssertionError(name)


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the C++ module."""
    return build_wheel(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without it, by wish."""
    return build_wheel(tmp_path_factory.mktemp("pure"), AUTELLIX_PURE="1")


@pytest.mark.slow
def test_the_wheel_holds_every_source_file(native_wheel: Path, pure_wheel: Path):
    """No module and no data file of the three packages is forgotten, in either wheel."""
    expected = {place_in_wheel(name) for name in tracked_files()}
    assert len(expected) > 20
    for wheel in (native_wheel, pure_wheel):
        missing = sorted(expected - names_in(wheel))
        assert not missing, f"{wheel.name} lacks {missing}"


@pytest.mark.slow
def test_the_native_wheel_has_the_module_and_the_pure_one_fits_everywhere(
    native_wheel: Path, pure_wheel: Path
):
    """One wheel is for this Python and machine, the other for all."""
    is_native = [n for n in names_in(native_wheel) if n.startswith("autellix/server/_swap.cpython")]
    assert len(is_native) == 1
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in names_in(pure_wheel) if name.endswith(".so")]


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path):
    """`pip install .` on a machine whose compiler fails still gives the whole SDK."""
    wheel = build_wheel(tmp_path, CC="/bin/false", CXX="/bin/false", CMAKE_GENERATOR="Ninja")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "autellix/__init__.py" in names_in(wheel)


@pytest.mark.slow
def test_the_wheel_works_alone(pure_wheel: Path):
    """From the wheel, with no other package in reach, the SDK imports and knows its version."""
    code = f"import sys; sys.path.insert(0, {str(pure_wheel)!r}); import autellix; "
    code += "print(autellix.__version__, autellix.__file__)"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version, path = done.stdout.split()
    assert version == project()["version"]
    assert str(pure_wheel) in path


def project() -> dict[str, object]:
    """Return the project's table."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_the_version_is_the_same_everywhere():
    """The package, its metadata, the command and the change log tell one version."""
    from importlib.metadata import version

    import autellix

    wanted = project()["version"]
    assert autellix.__version__ == wanted
    assert version("autellix") == wanted
    assert f"## [{wanted}]" in (ROOT / "CHANGELOG.md").read_text()
    code = "from autellix.cli import main; raise SystemExit(main(['--version']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"autellix {wanted}"


def test_importing_autellix_loads_no_third_party_module():
    """Nothing but the standard library and the SDK is in memory after the import."""
    code = """
import sys
before = set(sys.modules)
import autellix
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names - {"autellix"}))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("AUTELLIX_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout.split() == []


def test_every_public_name_exists():
    """What ``__all__`` promises is there."""
    import autellix

    assert [name for name in autellix.__all__ if not hasattr(autellix, name)] == []


def test_the_lock_holds_what_the_extras_need():
    """Every package that an extra we set up names is locked to one version."""
    locked = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line
    }
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = set()
    for extra in ("openai", "langgraph", "autogen", "gateway", "server-cpu"):
        for requirement in extras[extra]:
            name = requirement.partition(">=")[0].partition("[")[0]
            if name != "autellix":
                wanted.add(name.lower().replace("_", "-"))
    assert wanted <= locked, f"not locked: {sorted(wanted - locked)}"

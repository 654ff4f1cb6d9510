"""The command line. The server's commands are found by entry point; it is never imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

GROUP: Final = "autellix.commands"
USAGE: Final = """\
usage: autellix COMMAND [arguments]

  run [--base-url URL] PROGRAM.py [arguments]   run a program with every call tagged
  doctor [--json]                               check what a call carries, and the server
  doctor --server [MODEL] [settings]            check what a server here needs: serve --check
  --version                                     print the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("--version", "-V", "version"):
        from . import __version__

        print(f"autellix {__version__}")
        return 0
    if command in ("--help", "-h", "help"):
        print(_usage())
        return 0
    if command == "run":
        return _run(arguments)
    if command == "doctor" and "--server" in arguments:
        arguments.remove("--server")
        return _server_command("serve", ["--check", *arguments])
    if command == "doctor":
        from .checkup import main as doctor_main

        return doctor_main(arguments)
    return _server_command(command, arguments)


def _usage() -> str:
    names = sorted(_entry_points())
    more = f"\nof the server, if it is installed: {', '.join(names)}\n" if names else ""
    return USAGE + more


def _entry_points() -> dict[str, object]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def _server_command(name: str, arguments: list[str]) -> int:
    point = _entry_points().get(name)
    if point is None:
        print(f"autellix: no command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    # A server tags no calls: neither here nor in the engines that it starts.
    from .client import uninstall

    armed_before = os.environ.get("AUTELLIX_ENABLED")
    os.environ["AUTELLIX_ENABLED"] = "0"
    uninstall()
    try:
        command = point.load()  # type: ignore[attr-defined]
    except ImportError as error:
        print(
            f"autellix {name} needs the server: pip install 'autellix[server]' ({error})",
            file=sys.stderr,
        )
        return 1
    if getattr(command, "uses_sdk", False):
        from .client import init

        os.environ["AUTELLIX_ENABLED"] = armed_before or "1"
        init(enabled=True)
    result = command(arguments)
    return result if isinstance(result, int) else 0


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["--base-url"] and len(arguments) > 1:
        os.environ["OPENAI_BASE_URL"] = os.environ["AUTELLIX_BASE_URL"] = arguments[1]
        from .client import init

        init(base_url=arguments[1])
        del arguments[:2]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        print(f"autellix run: which program?\n\n{USAGE}", file=sys.stderr)
        return 2
    import runpy

    if arguments[0] == "-m":
        if len(arguments) < 2:
            print("autellix run -m: which module?", file=sys.stderr)
            return 2
        sys.argv = arguments[1:]
        sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    program = arguments[0]
    if not os.path.exists(program):  # noqa: PTH110 - the child's start-up is kept light
        print(f"autellix run: no file {program!r}", file=sys.stderr)
        return 2
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))  # noqa: PTH100, PTH120
    runpy.run_path(program, run_name="__main__")
    return 0

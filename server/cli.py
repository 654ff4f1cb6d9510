"""The server's commands, found by the SDK's ``autellix`` through entry points.

Each takes its arguments and returns an exit status; what it needs is imported when it runs, so that
``autellix --help`` stays fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autellix.errors import ConfigError

_EPILOG = """\
Arguments after -- go to vLLM and win over ours. Every setting may also be given in a TOML file
(--config) or as a variable AUTELLIX_SERVER_<NAME>; flags win over variables, variables over the
file. Exit status: 0 stopped by SIGTERM, 130 by Ctrl-C, 2 wrong settings, 3 every engine failed.
"""


def serve(argv: Sequence[str]) -> int:
    """Run ``autellix serve``: engines, gateway and all, until a signal or the last engine's end."""
    try:
        return _serve(argv)
    except ConfigError as error:
        sys.stderr.write(f"autellix serve: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(argv: Sequence[str]) -> int:
    """Read the settings and run the server."""
    from .config import add_flags, load
    from .serve import run
    from .server_config import ServerConfig

    arguments, vllm_args = _split(argv)
    parser = argparse.ArgumentParser(
        prog="autellix serve",
        usage="autellix serve [MODEL] [settings] [-- vLLM arguments]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", help="a folder, a hub name, or as `autellix model` has")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    parser.add_argument(
        "--check", action="store_true", help="start nothing: say what stands in the way, and why"
    )
    add_flags(parser, ServerConfig)
    options = parser.parse_args(arguments)
    config = load(
        ServerConfig,
        document=_read_toml(options.config) if options.config else {},
        environ=os.environ,
        flags=vars(options),
    )
    if options.check:
        from .checkup import main as check

        return check(config, options.model, vllm_args)
    return run(config, options.model, vllm_args)


def model(argv: Sequence[str]) -> int:
    """Run ``autellix model``."""
    from .model import main

    return main(argv)


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return (our arguments, those after the first ``--``)."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, ()
    index = arguments.index("--")
    return arguments[:index], tuple(arguments[index + 1 :])


def _read_toml(path: Path) -> Mapping[str, Any]:
    """Return a parsed file.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        import tomllib
    except ImportError as error:
        raise ConfigError("config: a TOML file needs Python 3.11") from error
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config: {path}: {error}") from error

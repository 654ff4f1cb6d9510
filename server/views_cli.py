"""``autellix programs``, ``show`` and ``top``: what the dashboard shows, in a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from autellix.errors import ConfigError

from .views_client import AdminClient, add_options, client_of

ROWS_MAX: Final = 10_000
ROWS_SHOWN: Final = 40
PIPE_CELLS: Final = 160


def programs(argv: Sequence[str]) -> int:
    """Run ``autellix programs``: a table of the programs."""
    from .views_text import SORTS

    parser = argparse.ArgumentParser(
        prog="autellix programs", description="list the programs of a running server"
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those with all these words")
    parser.add_argument("--sort", choices=SORTS, default="last", help="what comes first")
    parser.add_argument(
        "--limit", type=int, default=ROWS_SHOWN, help=f"rows (default {ROWS_SHOWN})"
    )
    parser.add_argument("--open", action="store_true", help="only those that are not over")
    _add_common(parser)
    options = parser.parse_args(argv)
    return _run("programs", options, lambda client: _programs(client, options))


def show(argv: Sequence[str]) -> int:
    """Run ``autellix show``: one program with its calls."""
    parser = argparse.ArgumentParser(
        prog="autellix show", description="show one program of a running server with its calls"
    )
    parser.add_argument("program", help="its id or the start of it, its session, or its name")
    _add_common(parser)
    options = parser.parse_args(argv)
    return _run("show", options, lambda client: _show(client, options))


def top(argv: Sequence[str]) -> int:
    """Run ``autellix top``: programs and engines, live."""
    parser = argparse.ArgumentParser(
        prog="autellix top",
        description="watch the programs and engines of a running server; ? shows the keys",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those with all these words")
    _add_common(parser)
    options = parser.parse_args(argv)
    return _run("top", options, lambda client: _top(client, options))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    add_options(parser)


def _run(name: str, options: argparse.Namespace, work: Callable[[AdminClient], int]) -> int:
    try:
        return work(client_of(options))
    except ConfigError as error:
        sys.stderr.write(f"autellix {name}: {error}\n")
        return 2
    except BrokenPipeError:  # of a pager that was closed; an OSError too, so it comes first
        return 0
    except OSError as error:
        sys.stderr.write(
            f"autellix {name}: {options.admin_url} does not answer: {error}; "
            "--admin-url or AUTELLIX_ADMIN_URL says where the admin site is\n"
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _programs(client: AdminClient, options: argparse.Namespace) -> int:
    from . import views_text

    if not 1 <= options.limit <= ROWS_MAX:
        raise ConfigError(f"limit: {options.limit} is not allowed; allowed is 1 to {ROWS_MAX}")
    answer = client.get("/programs")
    words = [word.lower() for word in options.words]
    rows = [row for row in answer["programs"] if views_text.matches(row, words)]
    if options.open:
        rows = [row for row in rows if row["state"] not in ("ended", "expired")]
    key, down = views_text.sort_key(options.sort)
    rows.sort(key=key, reverse=down)
    rows = rows[: options.limit]
    if options.json:
        return _print_json({**answer, "programs": rows})
    _console().print(views_text.programs_table(rows, answer["now_s"], answer["total"]))
    return 0


def _show(client: AdminClient, options: argparse.Namespace) -> int:
    from . import views_text

    known = client.program(options.program)
    if options.json:
        return _print_json(known)
    console = _console()
    console.print(views_text.program_page(known, console.width))
    return 0


def _top(client: AdminClient, options: argparse.Namespace) -> int:
    if options.json:
        return _print_json({**client.get("/programs"), **client.get("/engines")})
    if not sys.stdout.isatty():
        raise ConfigError("this is no terminal; allowed is --json, or `autellix programs`")
    from .top import Top

    client.get("/programs", limit=1)  # a wrong key or address is said before the screen is taken
    return Top(client, options.words).run() or 0


def _console() -> Any:
    """Return where text goes; a pipe has no width, so it gets a wide one."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_CELLS)


def _print_json(document: Any) -> int:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0

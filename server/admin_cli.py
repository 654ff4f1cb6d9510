"""``autellix engines`` and ``autellix policy``: the operator's side of a running server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from autellix import wire
from autellix.errors import ConfigError

ENV_URL: Final = "AUTELLIX_ADMIN_URL"
ENV_KEY: Final = "AUTELLIX_ADMIN_KEY"
_DEFAULT_URL: Final = "http://127.0.0.1:18000"
_TIMEOUT_S: Final = 30.0
_EPILOG: Final = (
    f"The admin site's address is --admin-url or {ENV_URL} (default {_DEFAULT_URL}); its key is in "
    f"the file of --key-file, or {ENV_KEY}. `autellix serve` prints both places when it starts."
)


def engines(argv: Sequence[str]) -> int:
    """Run ``autellix engines``."""
    parser = _parser("autellix engines", "look at, add and remove the engines of a running server")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="name, state and calls of each engine")
    add = actions.add_parser("add", help="start another engine, or take one in by its URL")
    add.add_argument("url", nargs="?", help="http://HOST:PORT; without: one more of the server's")
    add.add_argument("--engine-api-key", help="the key that the engine at the URL asks for")
    remove = actions.add_parser("remove", help="give an engine no new calls, then end it")
    remove.add_argument("engine", help="its name, as the list has it")
    remove.add_argument("--drain-s", type=float, default=30.0, help="time its calls have to end")
    options = parser.parse_args(argv)
    return _report("autellix engines", lambda: _engines(options))


def policy(argv: Sequence[str]) -> int:
    """Run ``autellix policy``."""
    parser = _parser("autellix policy", "show or switch the policy of a running server")
    parser.add_argument("policy", nargs="?", help="the one to switch to")
    parser.add_argument("settings", nargs="*", metavar="NAME=JSON", help="settings of [scheduling]")
    options = parser.parse_args(argv)
    return _report("autellix policy", lambda: _policy(options))


def _engines(options: argparse.Namespace) -> str:
    if options.action == "list":
        views = _ask(options, "GET", "/engines")["engines"]
        return "\n".join(f"{v['engine']:8} {v['state']:10} {v['calls']:6} calls" for v in views)
    if options.action == "add":
        body = {"local": True} if options.url is None else {"url": options.url}
        if options.engine_api_key is not None:
            body["api_key"] = options.engine_api_key
        return f"{_ask(options, 'POST', '/engines', body)['engine']} is starting"
    path = f"/engines/{quote(options.engine, safe='')}?drain_s={options.drain_s}"
    return f"{_ask(options, 'DELETE', path)['engine']} is draining"


def _policy(options: argparse.Namespace) -> str:
    if options.policy is None:
        return json.dumps(_ask(options, "GET", "/policy"), indent=2)
    body: dict[str, Any] = {"policy": options.policy}
    for text in options.settings:
        name, equals, value = text.partition("=")
        try:
            body[name] = json.loads(value)
        except json.JSONDecodeError:
            equals = ""
        if not equals:
            raise ConfigError(f"settings: {text!r} is not allowed; allowed is NAME=JSON")
    return json.dumps(_ask(options, "PUT", "/policy", body), indent=2)


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=text, epilog=_EPILOG)
    parser.add_argument("--admin-url", default=os.environ.get(ENV_URL, _DEFAULT_URL))
    parser.add_argument("--key-file", type=Path, help="holds the admin key")
    return parser


def _report(name: str, work: Any) -> int:
    try:
        sys.stdout.write(work() + "\n")
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    return 0


def _ask(
    options: argparse.Namespace, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Any:
    """Return the admin site's answer.

    Raises:
        ConfigError: it refuses, or there is no key.
        OSError: it is not there.
    """
    if urlsplit(options.admin_url).scheme not in ("http", "https"):
        raise ConfigError(f"admin-url: {options.admin_url!r}; allowed is http:// or https://")
    if options.key_file is not None:
        key = options.key_file.read_text().strip()
    elif not (key := os.environ.get(ENV_KEY, "")):
        raise ConfigError(f"key-file: none is given; allowed is --key-file FILE or {ENV_KEY}")
    request = urllib.request.Request(
        f"{options.admin_url.rstrip('/')}{wire.API_PREFIX}/admin{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = f"{error.code} {text[:200]}"
        raise ConfigError(text) from None

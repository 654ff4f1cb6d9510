"""What a terminal knows of a running server: asked once, or followed live by the dashboard's feed.

The standard library's HTTP client is enough, so nothing of the gateway is imported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from autellix.errors import ConfigError

from .admin_cli import ENV_KEY, ENV_URL

DEFAULT_URL: Final = "http://127.0.0.1:18000"
ANSWER_S: Final = 15.0
STALLED_S: Final = 6.0  # a tick comes each second
LINE_BYTES_MAX: Final = 32 << 20
_NONSENSE: Final = (http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError)
EPILOG: Final = (
    f"The admin site's address is --admin-url or {ENV_URL} (default {DEFAULT_URL}); its key is in "
    f"the file of --key-file, or {ENV_KEY}. `autellix serve` prints both places when it starts."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the admin site is."""
    parser.epilog = EPILOG
    parser.add_argument("--admin-url", default=os.environ.get(ENV_URL, DEFAULT_URL), metavar="URL")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="holds the admin key")


def client_of(options: argparse.Namespace) -> AdminClient:
    """Return the client that the options ask for.

    Raises:
        ConfigError: the address is none, or there is no key.
    """
    if options.key_file is not None:
        try:
            key = options.key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"key-file: {options.key_file}: {error}") from error
    else:
        key = os.environ.get(ENV_KEY, "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"key-file: no key is given; allowed is --key-file FILE or {ENV_KEY}, ASCII"
        )
    return AdminClient(options.admin_url, key)


class AdminClient:
    """Reads the dashboard's data.

    Args:
        url: Of the admin site; a path in it is left out.
        key: An admin key.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"admin-url: {url!r} is not allowed; allowed is http(s)://HOST:PORT")
        self._parts = parts
        self._headers = {"Authorization": f"Bearer {key}"}
        self.url = f"{parts.scheme}://{parts.netloc}"

    def get(self, path: str, **query: object) -> Any:
        """Return what the dashboard says at a path below its own.

        Raises:
            ConfigError: the server refuses; the message is its own.
            OSError: it is not there.
        """
        target = f"{path}?{urlencode(query)}" if query else path
        connection = self._connect(ANSWER_S)
        try:
            return json.loads(self._ask(connection, target).read())
        except _NONSENSE as error:
            raise OSError(f"{self.url} does not speak as expected: {error!r}") from error
        finally:
            connection.close()

    def program(self, name: str) -> Any:
        """Return one program with its calls; see `views.find_program`."""
        return self.get(f"/programs/{quote(name, safe='')}")

    def follow(self) -> Iterator[tuple[str, Any]]:
        """Yield (event, data) of the live feed until it ends.

        Raises:
            ConfigError: the server refuses.
            OSError: it is not there, or says nothing any more.
        """
        connection = self._connect(STALLED_S)
        try:
            response = self._ask(connection, "/live")
            event = ""
            while line := response.readline(LINE_BYTES_MAX):
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    event = value
                elif field == "data":
                    yield event, json.loads(value)
        except _NONSENSE as error:
            raise OSError(f"{self.url} does not speak as expected: {error!r}") from error
        finally:
            connection.close()

    def _connect(self, limit_s: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=limit_s)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=limit_s, context=context)

    def _ask(self, connection: http.client.HTTPConnection, target: str) -> http.client.HTTPResponse:
        connection.request("GET", f"/dashboard{target}", headers=self._headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        text = response.read(4096).decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = f"{response.status} {text[:200]}"
        raise ConfigError(text)


class LiveTable:
    """The programs as the feed tells of them.

    Attributes:
        rows: Program → its fields by name.
        boot: Which start of the server they are of.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.engines: list[dict[str, Any]] = []
        self.sample: list[Any] = [0.0, 0, 0, 0, []]
        self.fairness: dict[str, Any] = {}
        self.about: dict[str, Any] = {}
        self.boot = ""
        self.now_s = 0.0
        self.is_filled = False
        self._columns: list[str] = []
        self._stale: set[str] = set()

    def take(self, event: str, data: Any) -> None:
        """Take one message of the feed; an event of a newer server is passed over."""
        if event == "hello":
            self._greet(data)
        elif event == "rows":
            self._take_rows(data)
        elif event == "filled":
            self.is_filled = True
            self.fairness = data["fairness"]
            for program_id in self._stale:
                self.rows.pop(program_id, None)
            self._stale.clear()
        elif event == "tick":
            self.now_s, self.engines, self.sample = data["now_s"], data["engines"], data["sample"]
            self.fairness = data.get("fairness", self.fairness)
            self._take_rows(data.get("rows", ()))
            for program_id in data.get("gone", ()):
                self.rows.pop(program_id, None)

    def _greet(self, hello: Mapping[str, Any]) -> None:
        self._columns = hello["columns"]
        if hello["boot"] != self.boot:
            self.rows.clear()
        self._stale = set(self.rows)
        self.boot, self.now_s, self.about = hello["boot"], hello["now_s"], dict(hello)
        self.engines, self.is_filled = hello["engines"], False
        if hello["samples"]:
            self.sample = hello["samples"][-1]

    def _take_rows(self, rows: Any) -> None:
        for row in rows:
            fields = dict(zip(self._columns, row, strict=True))
            self.rows[fields["id"]] = fields
            self._stale.discard(fields["id"])

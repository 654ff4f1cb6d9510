"""A client of the gateway in the same process: requests over a private unix socket."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
_EVENT_BYTES_MAX: Final = 64 << 20


class CallError(Exception):
    """A call was not answered, or not to its end.

    Attributes:
        status: The HTTP status; 502 where an answer was cut off.
        code: As in the error body, such as ``engine_died``, ``no_engine`` or ``limit_reached``.
    """

    def __init__(self, message: str, *, status: int, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class GatewayClient:
    """Requests to a gateway on a unix socket; `open` it first, `close` it at the end."""

    def __init__(self, socket: Path, calls_max: int) -> None:
        self._socket = socket
        self._calls_max = calls_max
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make ready."""
        connector = aiohttp.UnixConnector(
            str(self._socket), limit=self._calls_max, keepalive_timeout=30
        )
        self._session = aiohttp.ClientSession(
            "http://gateway", connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def events(
        self, path: str, document: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed answer, in the end without ``[DONE]``.

        Raises:
            CallError: there is no answer, or it is cut off.
        """
        try:
            async with self._asked("POST", path, document, headers) as response:
                async for _, data in _server_sent(response.content, _EVENT_BYTES_MAX):
                    if data == b"[DONE]":
                        return
                    event = orjson.loads(data)
                    if "error" in event:
                        raise _error_of(event, 500)
                    yield event
        except (aiohttp.ClientError, OSError) as error:
            raise _cut_off(error) from error
        raise _cut_off("it ends in the middle")

    async def feed(self, path: str, bytes_max: int) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield (name, data) of an event stream until it ends.

        Raises:
            CallError: there is none, it is cut off, or an event is longer than ``bytes_max``.
        """
        try:
            async with self._asked("GET", path, None, {}) as response:
                async for event in _server_sent(response.content, bytes_max):
                    yield event
        except (aiohttp.ClientError, OSError) as error:
            raise _cut_off(error) from error

    async def whole(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> dict[str, Any]:
        """Return an answer.

        Raises:
            CallError: there is none.
        """
        try:
            async with self._asked(method, path, document, headers) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _cut_off(error) from error
        answer = orjson.loads(body) if body else {}
        assert isinstance(answer, dict)
        return answer

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "open() comes first"
        body = None if document is None else orjson.dumps(document)
        fields = {"content-type": "application/json", **headers}
        async with self._session.request(method, path, data=body, headers=fields) as response:
            if response.status >= 400:
                raise _read_error(await response.read(), response.status)
            yield response


class LocalGateway:
    """A gateway that listens on a private unix socket only."""

    def __init__(self, runner: web.AppRunner, socket: Path) -> None:
        self._runner = runner
        self._socket = socket

    async def start(self, backlog: int) -> None:
        """Listen."""
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._socket), backlog=backlog).start()

    async def stop(self) -> None:
        """End what is under way, and listen no more."""
        await self._runner.cleanup()


async def _server_sent(
    content: aiohttp.StreamReader, bytes_max: int
) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the name and the data of each event that has data."""
    rest = b""
    async for chunk in content.iter_any():
        *events, rest = _EVENT_END.split(rest + chunk)
        if max(map(len, (rest, *events))) > bytes_max:
            raise _cut_off(f"an event is longer than {bytes_max} bytes")
        for event in events:
            lines = event.splitlines()
            names = (line[6:].strip() for line in lines if line.startswith(b"event:"))
            name = next(names, b"").decode("utf-8", "replace")
            if data := b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")):
                yield name, data


def _read_error(body: bytes, status: int) -> CallError:
    try:
        return _error_of(orjson.loads(body), status)
    except orjson.JSONDecodeError:
        return CallError(body.decode("utf-8", "replace")[:500], status=status, code=None)


def _error_of(document: Any, status: int) -> CallError:
    """Return the error in OpenAI's form of it, or in whatever was said."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if not isinstance(error, dict):
        return CallError(str(error)[:500], status=status, code=None)
    code = error.get("code")
    return CallError(
        str(error.get("message", error))[:2000],
        status=status,
        code=code if isinstance(code, str) else error.get("type"),
    )


def _cut_off(why: object) -> CallError:
    return CallError(f"the answer is cut off: {why}", status=502, code="cut_off")

"""Errors as OpenAI's clients understand them: ``{"error": {message, type, param, code}}``.

ApiError
├── BadRequest      400  the request names a field and says what is allowed
├── Unauthorized    401
├── NotFound        404
├── SlowBody        408
├── Superseded      409  a retry of the same call has taken its place
├── TooLarge        413
├── Busy            429  with Retry-After
├── EngineBroken    502  the engine died under the call
└── NoEngine        503  with Retry-After
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import orjson
from aiohttp import web

from autellix import wire

RETRY_AFTER_S = 1


class ApiError(Exception):
    """An error that the client is told."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: int | None = None
    about: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> bytes:
        """Return the error as JSON."""
        return orjson.dumps(
            {
                "error": {
                    "message": str(self),
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def as_http(self, *, close: bool = False) -> bytes:
        """Return the error as the bytes of an answer."""
        body = self.body()
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"{wire.VERSION}: {wire.PROTOCOL_VERSION}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.retry_after_s is not None:
            lines.append(f"Retry-After: {self.retry_after_s}")
        lines += (f"{name}: {value}" for name, value in self.about.items())
        if close:
            lines.append("Connection: close")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def response(self) -> web.Response:
        """Return the error as an answer."""
        headers = {wire.VERSION: str(wire.PROTOCOL_VERSION), **self.about}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return web.Response(
            status=self.status,
            body=self.body(),
            content_type="application/json",
            headers=headers,
        )


class BadRequest(ApiError):
    """The request cannot be meant."""

    status, kind, code = 400, "invalid_request_error", "invalid_request"


class Unauthorized(ApiError):
    """The key is missing or unknown."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class NotFound(ApiError):
    """There is no such thing here."""

    status, kind, code = 404, "invalid_request_error", "not_found"


class SlowBody(ApiError):
    """The request body did not come in time."""

    status, kind, code = 408, "invalid_request_error", "request_timeout"


class Superseded(ApiError):
    """A retry of the same call has taken its place."""

    status, kind, code = 409, "invalid_request_error", "superseded"


class TooLarge(ApiError):
    """The request body is longer than the limit."""

    status, kind, code = 413, "invalid_request_error", "request_too_large"


class Busy(ApiError):
    """A limit is reached; later it may not be."""

    status, kind, code, retry_after_s = 429, "rate_limit_error", "limit_reached", RETRY_AFTER_S


class EngineBroken(ApiError):
    """The engine died under the call before it answered.

    ``may_retry``: not a byte of an answer came, so that another engine may be asked.
    """

    status, code = 502, "engine_died"
    may_retry = False


class NoEngine(ApiError):
    """No engine is ready."""

    status, code, retry_after_s = 503, "no_engine", RETRY_AFTER_S


def too_large(limit_bytes: int) -> TooLarge:
    """Return the error for a body over the limit."""
    return TooLarge(f"body: longer than {limit_bytes} bytes, which is the most allowed")

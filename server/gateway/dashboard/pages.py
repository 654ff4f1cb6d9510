"""The dashboard's routes on the admin site: its files, the way in, and its data.

The files are the same for everybody and open; they hold no data. Everything else wants the admin
key in a header, or the cookie that ``login`` gives for it. Nothing here changes anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from ... import views
from ..admin import AdminRoute, AdminSite
from ..errors import BadRequest, NotFound, Unauthorized
from ..request import read_body
from ..state import Gateway
from ..tasks import keep_running
from .feed import LiveFeed
from .login import COOKIE, LASTS_S, PATH, Login, secret_for
from .programs import CallsOf, ProgramPages, answer_json
from .rows import Rows, TableRows
from .stream import SLOW_S, answer_live

LOGIN_BYTES_MAX: Final = 4096
SLOW_VIEWER_S: Final = SLOW_S
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES: Final = {
    "html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml",
}  # fmt: skip


class Dashboard:
    """See the module.

    Args:
        site: Where it hangs.
        gateway: What it shows.
        calls_of: The calls of a program that are still remembered, oldest first.
        about: What else viewers are told: policy, version.
        rows: The programs of the live feed; None: the gateway's own.
        journal: What the secret of the login lies beside; None: the gateway's journal.
    """

    def __init__(
        self,
        site: AdminSite,
        gateway: Gateway,
        *,
        calls_of: CallsOf = lambda _: (),
        about: Mapping[str, Any],
        rows: Rows | None = None,
        journal: str | None = None,
    ) -> None:
        own = TableRows(gateway.table, gateway.clock) if rows is None else rows
        self.feed = LiveFeed(own, gateway.engine_views, gateway.clock, about)
        self._gateway = gateway
        self._calls_of = calls_of
        beside = gateway.config.state if journal is None else journal
        self.login = Login(site, gateway.clock, secret_for(beside))
        self._files = dict(_read_files())
        site.doors.append(self.login.lets_in)
        site.add(self._routes())
        site.app.cleanup_ctx.append(self._run)
        site.app.on_shutdown.append(self._say_goodbye)

    def _routes(self) -> list[AdminRoute]:
        return [
            AdminRoute("GET", "/", self._to_dashboard, is_open=True),
            AdminRoute("GET", PATH, self._index, is_open=True),
            AdminRoute("GET", f"{PATH}/static/{{name}}", self._file, is_open=True),
            AdminRoute("GET", f"{PATH}/session", self._session, is_open=True),
            AdminRoute("POST", f"{PATH}/login", self._log_in, is_open=True),
            AdminRoute("POST", f"{PATH}/logout", self._log_out, is_open=True),
            AdminRoute("GET", f"{PATH}/live", self._live),
            AdminRoute("GET", f"{PATH}/engines", self._engines),
            *ProgramPages(self._gateway, self._calls_of).routes(),
        ]

    async def _run(self, _app: web.Application) -> AsyncIterator[None]:
        task = keep_running("dashboard", self.feed.run, self._gateway)
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _say_goodbye(self, _app: web.Application) -> None:
        """End the streams: a stop must not wait for those who watch."""
        self.feed.close()

    async def _to_dashboard(self, _request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(PATH)

    async def _index(self, request: web.Request) -> web.Response:
        return self._send(request, "index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._send(request, request.match_info["name"])

    def _send(self, request: web.Request, name: str) -> web.Response:
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"file: {name[:64]!r} is not part of the dashboard")
        body, tag = found
        headers = {**_HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return web.Response(status=304, headers=headers)
        content_type = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)

    async def _session(self, request: web.Request) -> web.Response:
        """Say whether this browser is let in, and whether there is room for a viewer."""
        return answer_json({"signed_in": self.login.lets_in(request), "full": self.feed.is_full})

    async def _log_in(self, request: web.Request) -> web.Response:
        """Give a cookie for an admin key."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise BadRequest("sec-fetch-site: a login from another site is not allowed")
        body = await read_body(request, LOGIN_BYTES_MAX, self._gateway.config.slow_body_s)
        try:
            key = orjson.loads(body)["key"]
        except (ValueError, LookupError, TypeError):
            raise BadRequest('body: not {"key": "..."}', param="key") from None
        cookie = self.login.cookie_for(key) if isinstance(key, str) else None
        if cookie is None:
            self._gateway.count("unauthorized admin")
            raise Unauthorized("key: this is not an admin key of this server")
        answer = web.Response(status=204, headers={"Cache-Control": "no-store"})
        answer.set_cookie(
            COOKIE, cookie, path=PATH, max_age=LASTS_S, httponly=True, samesite="Strict",
            secure=request.secure,
        )  # fmt: skip
        return answer

    async def _log_out(self, _request: web.Request) -> web.Response:
        answer = web.Response(status=204)
        answer.del_cookie(COOKIE, path=PATH)
        return answer

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Stream what changes; see `LiveFeed`."""
        return await answer_live(request, self.feed, SLOW_VIEWER_S)

    async def _engines(self, _request: web.Request) -> web.Response:
        """Return the engines, the queues of the last minutes and the fairness."""
        now_s = self._gateway.clock.now_s()
        rows = [views.engine_row(view) for view in self._gateway.engine_views()]
        rates = {row["engine"]: row.get("steps_per_s") for row in self.feed.engines}
        for row in rows:
            row["steps_per_s"] = rates.get(row["engine"])
        return answer_json({"now_s": now_s, "engines": rows, "samples": list(self.feed.samples)})


def _read_files() -> list[tuple[str, tuple[bytes, str]]]:
    folder = importlib.resources.files(__package__) / "static"
    files = []
    for entry in folder.iterdir():
        if entry.name.rpartition(".")[2] in _TYPES:
            body = entry.read_bytes()
            files.append((entry.name, (body, f'"{hashlib.sha256(body).hexdigest()[:20]}"')))
    return files

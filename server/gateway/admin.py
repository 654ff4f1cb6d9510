"""The admin site: what only the operator may see and do, on an address and with a key of its own.

It listens on loopback unless it is told otherwise, and since loopback is no access control it wants
a key there too: one of ``admin.keys``, or, where none is configured, one made at the start and left
in the server's private folder. Every request is asked for it but those of routes that are open,
which may hold no data: the page that asks for the key, its script and its style.

A part of the server that has something for the operator hands its routes to `AdminSite.add`.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import orjson
from aiohttp import web

from autellix import wire
from autellix.errors import ConfigError

from ..config import setting
from . import sessions
from .errors import Unauthorized
from .explain import Handler, explain_errors
from .keys import Tenant, digest_of, find_tenant, parse_keys, presented_key
from .server import make_runner, server_of
from .state import ADMIN, GATEWAY, Gateway, lower_headers
from .tls import Listening, listen

API: Final = f"{wire.API_PREFIX}/admin"
BODY_BYTES_MAX: Final = 1 << 20
KEY_FILE: Final = "admin-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """Where the admin site is and who may use it."""

    host: str = setting("127.0.0.1", "address of the admin site; not loopback only with TLS")
    port: int | None = setting(
        None,
        "port of the admin site; 0: a free one; none: the server's + 10000, or a free one",
        minimum=0,
        maximum=65535,
    )
    keys: tuple[str, ...] = setting(
        (), "name:sha256 of keys of the admin site; without any, one is made at each start"
    )
    keys_file: str = setting("", "file of such keys, one a line")


class AdminRoute(NamedTuple):
    """One route of the admin site."""

    method: str
    path: str
    handler: Handler
    is_open: bool = False  # asked for no key: nothing but a page that asks for it


def check_admin(config: AdminConfig, *, has_tls: bool) -> None:
    """Refuse an admin site whose key would cross a network in the clear.

    Raises:
        ConfigError: it would.
    """
    if not has_tls and not is_loopback(config.host):
        raise ConfigError(
            f"admin.host: {config.host} is not allowed without TLS, since the admin key would "
            "cross the network in the clear; allowed is a loopback address, or tls_certificate "
            "and tls_key"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AdminSite:
    """The admin site of one gateway: `add` routes, `start` it, `stop` it."""

    def __init__(self, gateway: Gateway, config: AdminConfig, folder: Path) -> None:
        """Prepare the site.

        Args:
            gateway: What its handlers find under ``request.app[GATEWAY]``.
            config: Its settings.
            folder: Private to this user: where a key that is made is left.

        Raises:
            ConfigError: the keys are malformed.
        """
        self.key_file: Path | None = None
        self._admins = parse_keys(config.keys, "admin.keys")
        if not self._admins:
            key = secrets.token_urlsafe(32)
            self.key_file = folder / KEY_FILE
            self.key_file.touch(mode=0o600)
            self.key_file.write_text(key + "\n")
            self._admins = (Tenant("admin", digest_of(key), 0),)
        #: Others who may let a request in, such as the dashboard by its cookie.
        self.doors: list[Callable[[web.Request], bool]] = []
        self._open: set[str] = set()
        middlewares = [explain_errors, self._ask_for_key]
        if gateway.siblings is not None:
            middlewares.append(gateway.siblings.middleware)
        self.app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=middlewares)
        self.app[GATEWAY] = gateway
        self._runner: web.AppRunner | None = None
        self._listening: Listening | None = None
        self.add(
            [
                AdminRoute("GET", f"{API}/status", status),
                AdminRoute("GET", f"{wire.API_PREFIX}/programs", sessions.list_programs),
                AdminRoute("GET", f"{wire.API_PREFIX}/engines", sessions.list_engines),
            ]
        )

    def add(self, routes: Iterable[AdminRoute]) -> None:
        """Take routes in; only before the start."""
        for route in routes:
            made = self.app.router.add_route(route.method, route.path, route.handler)
            if route.is_open and made.resource is not None:
                self._open.add(made.resource.canonical)

    def admin_of(self, key: str | None) -> Tenant | None:
        """Return whose admin key it is."""
        return find_tenant(key, self._admins)

    def admin_named(self, name: str) -> Tenant | None:
        """Return the admin of this name; of several keys of one name the first."""
        return next((tenant for tenant in self._admins if tenant.name == name), None)

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Listen."""
        self._runner = make_runner(self.app)
        await self._runner.setup()
        self._listening = await listen(server_of(self._runner), listener, tls)

    async def stop(self) -> None:
        """Listen no more; requests under way have a few seconds."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _ask_for_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in self._open:
            key = presented_key(lower_headers(request))
            if self.admin_of(key) is None and not any(door(request) for door in self.doors):
                request.app[GATEWAY].count("unauthorized admin")
                raise Unauthorized("authorization: the admin key is missing or wrong")
            request[ADMIN] = True
        return await handler(request)


async def status(request: web.Request) -> web.Response:
    """Say how the gateway is: its counters, its calls, its engines."""
    gateway = request.app[GATEWAY]
    return web.Response(
        body=orjson.dumps(
            {
                "programs": len(gateway.table),
                "calls_in_flight": gateway.table.in_flight,
                "table": gateway.table.counts,
                "gateway": gateway.counts,
                "engines": [dict(view) for view in gateway.engine_views()],
                "keys": [
                    {"tenant": t.name, "calls_in_flight": gateway.flights_by_scope.get(t.name, 0)}
                    for t in gateway.tenants
                ],
            }
        ),
        content_type="application/json",
        headers={wire.VERSION: str(wire.PROTOCOL_VERSION)},
    )

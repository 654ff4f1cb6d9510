"""The operator's routes about engines and the policy: look, add, remove, switch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import orjson
from aiohttp import web

from autellix import wire
from autellix.errors import ConfigError

from .admin import API, BODY_BYTES_MAX, AdminRoute
from .errors import BadRequest, NotFound
from .request import parse_body, read_body

DRAIN_S: Final = 30.0
DRAIN_S_MAX: Final = 86_400.0
_BODY_S: Final = 10.0


class Fleet(Protocol):
    """The engines, as an operator deals with them."""

    def add_local(self) -> str:
        """Start another engine of our own; return its name."""
        ...

    async def add_ray(self) -> str:
        """Have another engine on the Ray cluster; return its name."""
        ...

    def add_url(self, url: str, api_key: str | None = None) -> str:
        """Take in an engine that runs elsewhere; return its name."""
        ...

    def remove(self, engine_id: str, drain_s: float) -> None:
        """Drain an engine, then end it or let go of it."""
        ...

    async def set_policy(self, name: str, settings: Mapping[str, Any]) -> None:
        """Order calls by another policy."""
        ...

    def policy_view(self) -> Mapping[str, Any]:
        """Return the policy."""
        ...

    def engine_views(self) -> Sequence[Mapping[str, Any]]:
        """Return a row for each engine."""
        ...


class FleetAdmin:
    """The handlers; `routes` is what an `AdminSite` takes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[AdminRoute]:
        """Return the routes, all of which ask for the key."""
        return [
            AdminRoute("GET", f"{API}/engines", self._list),
            AdminRoute("POST", f"{API}/engines", self._add),
            AdminRoute("DELETE", f"{API}/engines/{{engine_id}}", self._remove),
            AdminRoute("GET", f"{API}/policy", self._policy),
            AdminRoute("PUT", f"{API}/policy", self._set_policy),
        ]

    async def _list(self, _request: web.Request) -> web.Response:
        return _answer({"engines": [dict(view) for view in self._fleet.engine_views()]})

    async def _add(self, request: web.Request) -> web.Response:
        """Take one of ``local``, ``ray`` and ``url`` with ``api_key``; answer 201 and the name."""
        document = await _read(request, ("local", "ray", "url", "api_key"))
        url, api_key = document.get("url"), document.get("api_key")
        is_local, is_ray = document.get("local") is True, document.get("ray") is True
        if is_local + is_ray + (url is not None) != 1:
            raise BadRequest(
                'body: allowed is either {"local": true} or {"ray": true} or {"url": "http://…"}'
            )
        for name in ("local", "ray"):
            if document.get(name, True) is not True:
                raise BadRequest(
                    f"{name}: {document[name]!r} is not allowed; allowed is true", param=name
                )
        for name, value in (("url", url), ("api_key", api_key)):
            if value is not None and not isinstance(value, str):
                raise BadRequest(f"{name}: {value!r} is not allowed; allowed is text", param=name)
        try:
            if url is not None:
                name = self._fleet.add_url(url, api_key)
            else:
                name = await self._fleet.add_ray() if is_ray else self._fleet.add_local()
        except ConfigError as error:
            raise BadRequest(str(error)) from None
        return _answer({"engine": name}, 201)

    async def _remove(self, request: web.Request) -> web.Response:
        """Begin to drain; answer 202 at once. The engine is listed until it is gone."""
        text = request.query.get("drain_s", str(DRAIN_S))
        try:
            drain_s = float(text)
        except ValueError:
            drain_s = -1.0
        if not 0 <= drain_s <= DRAIN_S_MAX:
            allowed = f"allowed is seconds from 0 to {DRAIN_S_MAX:.0f}"
            raise BadRequest(f"drain_s: {text[:64]!r} is not allowed; {allowed}", param="drain_s")
        engine_id = request.match_info["engine_id"]
        try:
            self._fleet.remove(engine_id, drain_s)
        except KeyError:
            raise NotFound(f"engine: there is none named {engine_id[:64]!r}") from None
        return _answer({"engine": engine_id, "state": "draining", "drain_s": drain_s}, 202)

    async def _policy(self, _request: web.Request) -> web.Response:
        return _answer(self._fleet.policy_view())

    async def _set_policy(self, request: web.Request) -> web.Response:
        """Take ``{"policy": NAME, …settings of [scheduling]}``; engines answer a moment later."""
        document = await _read(request, None)
        name = document.pop("policy", None)
        if not isinstance(name, str):
            raise BadRequest(f"policy: {name!r} is not allowed; allowed is a name", param="policy")
        try:
            await self._fleet.set_policy(name, document)
        except ConfigError as error:
            raise BadRequest(str(error)) from None
        return _answer(self._fleet.policy_view())


async def _read(request: web.Request, known: Sequence[str] | None) -> dict[str, Any]:
    """Return the JSON object in a body, with no other fields than the known ones."""
    document = parse_body(await read_body(request, BODY_BYTES_MAX, _BODY_S))
    for name in document:
        if known is not None and name not in known:
            raise BadRequest(f"{name[:64]}: unknown; allowed are {', '.join(known)}", param=name)
    return document


def _answer(document: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps(document),
        content_type="application/json",
        headers={wire.VERSION: str(wire.PROTOCOL_VERSION)},
    )

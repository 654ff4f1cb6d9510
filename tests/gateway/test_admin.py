"""The admin site: its own address, its own key, and routes that other parts hand to it."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from autellix.errors import ConfigError
from autellix.server.gateway.admin import API, AdminConfig, AdminRoute, AdminSite, check_admin
from autellix.server.gateway.state import GATEWAY
from autellix.server.listeners import bind, bind_admin

from .conftest import Rig, running


@asynccontextmanager
async def admin_of(
    rig: Rig, folder: Path, routes: Iterable[AdminRoute] = (), **settings: object
) -> AsyncIterator[tuple[str, AdminSite]]:
    """Run the admin site of a gateway; yields (its URL, the site)."""
    site = AdminSite(rig.app[GATEWAY], AdminConfig(**settings), folder)  # type: ignore[arg-type]
    site.add(routes)
    listener = bind_admin("127.0.0.1", 0, 0)
    await site.start(listener, None)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", site
    finally:
        await site.stop()


def bearer(key: str) -> Mapping[str, str]:
    """Return the header of a key."""
    return {"authorization": f"Bearer {key}"}


async def test_it_wants_its_own_key(rig: Rig, tmp_path: Path):
    """No key, a client's key and a near miss are 401; what is asked is not done."""
    digest = hashlib.sha256(b"operator").hexdigest()
    async with admin_of(rig, tmp_path, keys=(f"ops:{digest}",)) as (url, site):
        assert site.key_file is None
        for headers in ({}, bearer("client"), bearer("operator "[:-2]), {"x-api-key": "x"}):
            async with rig.client.get(url + f"{API}/status", headers=headers) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["code"] == "invalid_api_key"
        await rig.chat({"X-Autellix-Session": "run-1"})
        for headers in (bearer("operator"), {"x-api-key": "operator"}):
            async with rig.client.get(url + f"{API}/status", headers=headers) as answer:
                assert answer.status == 200
                got = await answer.json()
        assert (got["programs"], got["table"]["calls_begun"]) == (1, 1)
        assert got["gateway"]["unauthorized admin"] == 4
    async with rig.client.get(rig.url + f"{API}/status", headers=bearer("operator")) as answer:
        assert answer.status == 404, "it is not on the clients' address"


async def test_an_admin_sees_everybody(tmp_path: Path):
    """And a client only what is its own, on the very machine of the gateway too."""
    keys = [f"{name}:{hashlib.sha256(name.encode()).hexdigest()}" for name in ("red", "blue")]
    async with running(api_keys=tuple(keys)) as rig, admin_of(rig, tmp_path) as (url, site):
        assert site.key_file is not None
        admin = bearer(site.key_file.read_text().strip())
        for name in ("red", "blue"):
            await rig.chat({**bearer(name), "X-Autellix-Session": "run-1"})
        for base, headers, rows in ((rig.url, bearer("red"), 1), (url, admin, 2)):
            async with rig.client.get(f"{base}/autellix/v1/programs", headers=headers) as answer:
                assert len((await answer.json())["programs"]) == rows
        assert (await rig.chat(dict(admin)))[0] == 401


async def test_without_a_configured_key_one_is_made(rig: Rig, tmp_path: Path):
    """In a file that only this user can read."""
    async with admin_of(rig, tmp_path) as (url, site):
        assert site.key_file is not None
        assert stat.S_IMODE(site.key_file.stat().st_mode) == 0o600
        key = site.key_file.read_text().strip()
        assert len(key) > 40
        async with rig.client.get(url + f"{API}/status", headers=bearer(key)) as answer:
            assert answer.status == 200


async def test_parts_hand_it_their_routes(rig: Rig, tmp_path: Path):
    """A route with data asks for the key; a page that only asks for the key does not."""

    async def data(request: web.Request) -> web.Response:
        return web.json_response(len(request.app[GATEWAY].table))

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="key?")

    routes = [
        AdminRoute("POST", f"{API}/things/{{name}}", data),
        AdminRoute("GET", "/", page, is_open=True),
    ]
    async with admin_of(rig, tmp_path, routes) as (url, site):
        assert site.key_file is not None
        key = bearer(site.key_file.read_text().strip())
        async with rig.client.get(url) as answer:
            assert await answer.text() == "key?"
        async with rig.client.post(f"{url}{API}/things/a") as answer:
            assert answer.status == 401
        async with rig.client.post(f"{url}{API}/things/a", headers=key) as answer:
            assert await answer.json() == 0
        async with rig.client.post(f"{url}/v1/chat/completions", headers=key) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "not_found"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_it_leaves_this_machine_only_with_tls(host: str):
    """The key would cross the network in the clear; the message says so."""
    with pytest.raises(ConfigError, match=r"admin.host: .* not allowed without TLS"):
        check_admin(AdminConfig(host=host), has_tls=False)
    check_admin(AdminConfig(host=host), has_tls=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str):
    """Nobody listens in there who could not read the key anyway."""
    check_admin(AdminConfig(host=host), has_tls=False)


def test_its_port_follows_the_servers():
    """Plus 10000 where that is free; a port that was asked for is had or refused."""
    with bind("127.0.0.1", 0) as free:
        wished = free.getsockname()[1]
    with bind_admin("127.0.0.1", None, wished - 10_000) as first:
        first.listen()
        assert first.getsockname()[1] == wished
        with bind_admin("127.0.0.1", None, wished - 10_000) as second:
            assert second.getsockname()[1] != wished
        with pytest.raises(ConfigError, match=r"admin.port: "):
            bind_admin("127.0.0.1", wished, 0)

"""The admin site's endpoints against their OpenAPI file, with what schemathesis thinks of."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from autellix.errors import ConfigError
from autellix.server.gateway.admin import API, AdminConfig, AdminSite
from autellix.server.gateway.fleet_admin import FleetAdmin
from autellix.server.gateway.state import GATEWAY
from autellix.server.listeners import bind_admin

from .conftest import running

FILE = Path(__file__).parents[2] / "docs" / "openapi-admin.json"
DOCUMENT = json.loads(FILE.read_text())
URL = r"http://[a-z0-9.]{1,40}:[1-9][0-9]{0,3}\Z"
schema = schemathesis.openapi.from_dict(DOCUMENT)


class PaperFleet:
    """Engines on paper: every one can be added, those can be removed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.policy = "plas"

    def add_local(self) -> str:
        """Add one."""
        self.names.append(f"e{len(self.names)}")
        return self.names[-1]

    async def add_ray(self) -> str:
        """Add one."""
        return self.add_local()

    def add_url(self, url: str, api_key: str | None = None) -> str:
        """Add one with an address such as the file allows."""
        if not re.match(URL, url):
            raise ConfigError(f"url: {url!r} is not allowed")
        return self.add_local()

    def remove(self, engine_id: str, drain_s: float) -> None:
        """Remove one."""
        if engine_id not in self.names:
            raise KeyError(engine_id)

    async def set_policy(self, name: str, settings: Mapping[str, Any]) -> None:
        """Take any."""
        self.policy = name

    def policy_view(self) -> Mapping[str, Any]:
        """Return it."""
        return {"policy": self.policy}

    def engine_views(self) -> Sequence[Mapping[str, Any]]:
        """Return their names."""
        return [{"engine": name} for name in self.names]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """An admin site in a thread of its own: its URL and its key."""
    started: list[tuple[str, str]] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with running() as rig:
            made = AdminSite(rig.app[GATEWAY], AdminConfig(), tmp_path_factory.mktemp("admin"))
            made.add(FleetAdmin(PaperFleet()).routes())
            listener = bind_admin("127.0.0.1", 0, 0)
            await made.start(listener, None)
            assert made.key_file is not None
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            started.append((url, made.key_file.read_text().strip()))
            up.set()
            await stop.wait()
            await made.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert up.wait(30)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_answer_is_as_the_file_says(case, site):
    """Status, content type and body, for good and for bad requests, with and without the key."""
    url, key = site
    case.call_and_validate(base_url=url, headers={"Authorization": f"Bearer {key}"})


def test_the_file_lists_every_route_of_the_operator():
    """Those under the admin prefix."""
    told = {
        (method.upper(), path)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if path.startswith(API) and method != "parameters"
    }
    routes = {(r.method, r.path) for r in FleetAdmin(PaperFleet()).routes()}
    assert told == {*routes, ("GET", f"{API}/status")}

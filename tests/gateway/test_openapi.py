"""The gateway's own endpoints against their OpenAPI file, with what schemathesis thinks of."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import allow_header_conformance

from autellix.server.gateway.app import _add_routes

from .conftest import running

FILE = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT = json.loads(FILE.read_text())
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway in a thread of its own, since schemathesis asks synchronously."""
    started: list[str] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with running() as rig:
            started.append(rig.url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert up.wait(30)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_answer_is_as_the_file_says(case, url):
    """Status, content type and body, for good and for bad requests."""
    # a session may be called "heartbeat": that path answers to more methods than the file tells
    skip = [allow_header_conformance] if case.path.endswith("/sessions/heartbeat") else []
    case.call_and_validate(base_url=url, excluded_checks=skip)


def test_the_file_lists_every_endpoint_of_ours():
    """An endpoint that the file does not know is one that nobody tests."""
    from aiohttp import web

    router = web.UrlDispatcher()
    _add_routes(router)
    ours = {
        (route.method.lower(), route.resource.canonical)
        for route in router.routes()
        if route.resource is not None
        and route.method != "HEAD"
        and route.resource.canonical.startswith(("/autellix", "/health", "/live"))
    }
    methods = ("get", "put", "post", "delete")
    told = {(m, path) for path, item in DOCUMENT["paths"].items() for m in item if m in methods}
    assert ours == told

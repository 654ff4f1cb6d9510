"""Web frameworks and loops: streaming responses of Starlette and FastAPI, and uvloop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import autellix
from autellix.testing import FakeServer

from .talk import Talk

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def serve(app: Any) -> Iterator[str]:
    """Run an application on a real socket; yields its URL."""
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # who comes before the server is up waits
        config = uvicorn.Config(app, log_level="error", ws="none", lifespan="off")
        web = uvicorn.Server(config)
        thread = threading.Thread(target=web.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        web.should_exit = True
        thread.join(10)


def application(talk: Talk) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    @autellix.session
    def decorated(name: str):
        for part in range(3):
            talk.ask(f"{name}{part}")
            yield f"{part}"

    @autellix.session
    async def adecorated(name: str):
        for part in range(3):
            await talk.aask(f"{name}{part}")
            yield f"{part}"

    def block(name: str):
        with autellix.session():
            for part in range(3):
                talk.ask(f"{name}{part}")
                yield f"{part}"

    kinds = {"sync": decorated, "async": adecorated, "block": block}

    async def stream(request: Any) -> StreamingResponse:
        make = kinds[request.path_params["kind"]]
        return StreamingResponse(make(request.path_params["name"]))

    return Starlette(routes=[Route("/{kind}/{name}", stream)])


@pytest.fixture
def url(talk: Talk):
    autellix.init(scope="explicit")
    yield from serve(application(talk))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_decorated_generator_behind_a_streaming_response(kind: str, url: str, talk: Talk):
    """Two requests: two sessions, each whole, numbered in order."""
    with httpx2.Client() as client:
        for name in ("a", "b"):
            assert client.get(f"{url}/{kind}/{name}").text == "012"
    by_name = {n: [talk.calls[f"{n}{i}"] for i in range(3)] for n in ("a", "b")}
    sessions = {n: {c.session for c in calls} for n, calls in by_name.items()}
    assert len(sessions["a"]) == len(sessions["b"]) == 1
    assert sessions["a"] != sessions["b"]
    assert None not in sessions["a"]
    assert [c.seq for c in by_name["a"]] == [0, 1, 2]
    assert {c.thread for c in by_name["a"]} == {0}


def test_a_block_in_a_sync_generator_is_the_documented_limit(url: str, talk: Talk):
    """Each step runs in a fresh context: only the first call is tagged."""
    with httpx2.Client() as client:
        assert client.get(f"{url}/block/x").text == "012"
    sessions = [talk.calls[f"x{i}"].session for i in range(3)]
    assert sessions[0] is not None
    assert sessions[1:] == [None, None]


def test_fastapi_endpoints_are_sessions(server: FakeServer, talk: Talk):
    """A decorator on the endpoint, sync and async, as FastAPI reads its signature."""
    fastapi = pytest.importorskip("fastapi")
    app = fastapi.FastAPI()

    @app.get("/sync/{name}")
    @autellix.session
    def sync_agent(name: str) -> str:
        talk.ask(name)
        return name

    @app.get("/async/{name}")
    @autellix.session
    async def async_agent(name: str) -> str:
        await talk.aask(name)
        return name

    for url in serve(app):
        with httpx2.Client() as client:
            assert client.get(f"{url}/sync/s").json() == "s"
            assert client.get(f"{url}/async/a").json() == "a"
    assert len(talk.sessions) == 2
    assert None not in talk.sessions


def test_uvloop(server: FakeServer, talk: Talk):
    """Tasks, executor and joins as in the standard loop."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> str:
        async with autellix.session() as session:
            await talk.aask("plan")
            server.together("a", "b")
            await asyncio.gather(talk.aask("a"), talk.aask("b"))
            await asyncio.get_running_loop().run_in_executor(None, talk.ask, "job")
            await talk.aask("join")
            return session.id

    id = uvloop.run(main())
    assert talk.sessions == {id}
    assert talk.threads["join"] == (0, 1)
    assert talk.threads["plan"] == (0, 0)
    assert {talk.calls[t].parent for t in ("a", "b", "job")} == {(0, 1)}

"""The dashboard's routes: who is let in, what is sent, what the files may hold."""

from __future__ import annotations

import asyncio
import contextlib
import re
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from autellix.server.gateway.admin import API
from autellix.server.gateway.dashboard import login, pages
from autellix.server.gateway.dashboard.login import COOKIE
from tests.gateway.conftest import until

from .scene import KEY, Scene, add_story, showing

BEARER = {"authorization": f"Bearer {KEY}"}
STATIC = Path(__file__).parents[3] / "server" / "gateway" / "dashboard" / "static"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that keeps no cookies by itself."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield session


async def cookie_of(client: aiohttp.ClientSession, url: str) -> str:
    """Sign in; return the cookie."""
    async with client.post(f"{url}/login", json={"key": KEY}) as answer:
        assert answer.status == 204
        return answer.cookies[COOKIE].value


async def status(client: aiohttp.ClientSession, url: str, **headers: str) -> int:
    """Return the status of a request."""
    async with client.get(url, headers=headers) as answer:
        return answer.status


async def test_files_are_open_and_data_is_not(client: aiohttp.ClientSession):
    """The page that asks for the key has no data; each route with data wants the key."""
    scene = Scene()
    scene.fill(5)
    async with showing(scene) as (url, _):
        for path in ("", "/static/main.js", "/static/style.css", "/session"):
            assert await status(client, url + path) == 200, path
        for path in ("/live", "/programs", "/programs/x", "/engines", "/anything"):
            assert await status(client, url + path) == 401, path
            assert await status(client, url + path, authorization="Bearer nonsense") == 401, path
        for path in ("/programs", "/engines"):
            assert await status(client, url + path, **BEARER) == 200, path
        assert await status(client, url + "/static/..%2fpages.py") == 404


async def test_the_cookie_is_no_key_and_opens_the_dashboard_only(client: aiohttp.ClientSession):
    """Scripts cannot read it, other sites cannot send it, and the admin API does not take it."""
    async with showing(Scene()) as (url, _):
        async with client.post(f"{url}/login", json={"key": KEY}) as answer:
            morsel = answer.cookies[COOKIE]
        assert (morsel["httponly"], morsel["samesite"]) == (True, "Strict")
        assert morsel["path"] == "/dashboard"
        assert KEY not in morsel.value
        sent = {"cookie": f"{COOKIE}={morsel.value}"}
        assert await status(client, f"{url}/programs", **sent) == 200
        site = url.removesuffix("/dashboard")
        assert await status(client, f"{site}{API}/status", **sent) == 401
        assert await status(client, f"{site}{API}/status", **BEARER) == 200


async def test_a_forged_or_old_cookie_is_refused(client: aiohttp.ClientSession):
    """Another name, a later end, another seal; and the right one after its end."""
    scene = Scene()
    async with showing(scene) as (url, _):
        good = await cookie_of(client, url)
        name, ends, seal = good.split("|")
        forged = (
            f"root|{ends}|{seal}", f"{name}|{int(ends) + 1}|{seal}", f"{name}|{ends}|{seal[::-1]}",
            f"{name}|{ends}", "", "||", f"{name}|x|{seal}", f"{name}|{ends}|ü",
        )  # fmt: skip
        for value in forged:
            assert await status(client, f"{url}/programs", cookie=f"{COOKIE}={value}") == 401, value
        assert await status(client, f"{url}/programs", cookie=f"{COOKIE}={good}") == 200
        scene.clock.advance(login.LASTS_S + 1)
        assert await status(client, f"{url}/programs", cookie=f"{COOKIE}={good}") == 401


async def test_wrong_keys_are_slowed_down_and_other_sites_refused(client: aiohttp.ClientSession):
    """After some wrong ones even the right one waits a minute."""
    scene = Scene()
    async with showing(scene) as (url, _):
        other = {"sec-fetch-site": "cross-site"}
        async with client.post(f"{url}/login", json={"key": KEY}, headers=other) as answer:
            assert answer.status == 400
        for body in (b"", b"[]", b"{}", b'{"key": 1}'):
            async with client.post(f"{url}/login", data=body) as answer:
                assert answer.status in (400, 401), body
        for _ in range(login.FAILURES_MAX):
            async with client.post(f"{url}/login", json={"key": "wrong"}) as answer:
                assert answer.status == 401
        async with client.post(f"{url}/login", json={"key": KEY}) as answer:
            assert answer.status == 429
        scene.clock.advance(login.FAILURES_S + 1)
        await cookie_of(client, url)


async def test_a_key_that_comes_in_pieces_is_read_whole():
    """TCP cuts where it likes; one that never ends is not read for ever."""
    async with showing(Scene()) as (url, _):
        host, _, port = url.removeprefix("http://").removesuffix("/dashboard").partition(":")
        for body, expected in ((b'{"key": "%s"}' % KEY.encode(), b"204"), (b"x" * 9000, b"413")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /dashboard/login HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            for piece in (body[:7], body[7:]):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0.05)
            writer.write(b"0\r\n\r\n")
            async with asyncio.timeout(10):
                assert (await reader.readline()).split()[1] == expected
            writer.close()


async def test_a_restart_asks_nobody_again_where_there_is_a_journal(
    client: aiohttp.ClientSession, tmp_path: Path
):
    """The secret lies beside it, for this user only; without a journal each start has its own."""
    state = str(tmp_path / "journal.db")
    for journal, expected in ((state, 200), ("", 401)):
        async with showing(Scene(state=journal)) as (url, _):
            cookie = await cookie_of(client, url)
        async with showing(Scene(state=journal)) as (url, _):
            sent = {"cookie": f"{COOKIE}={cookie}"}
            assert await status(client, f"{url}/programs", **sent) == expected
    assert stat.S_IMODE(Path(f"{state}.dashboard").stat().st_mode) == 0o600


async def test_pages_allow_no_foreign_and_no_inline_code(client: aiohttp.ClientSession):
    """The policy is strict, and the files keep to it."""
    async with showing(Scene()) as (url, _), client.get(url) as answer:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        page = await answer.text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]* src=)", page)
    for path in STATIC.iterdir():
        text = path.read_text()
        hosts = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org", "http://HOST"}
        assert not hosts, f"{path.name} names {hosts}"
        if path.suffix == ".js":
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
            ), path.name


async def test_files_are_sent_once(client: aiohttp.ClientSession):
    """A browser that has a file is told that it has not changed."""
    async with showing(Scene()) as (url, _):
        async with client.get(f"{url}/static/style.css") as answer:
            tag = answer.headers["etag"]
        assert await status(client, f"{url}/static/style.css", **{"if-none-match": tag}) == 304


async def test_a_program_is_found_by_what_people_know_of_it(client: aiohttp.ClientSession):
    """Id, start of the id, session or name; with its calls."""
    scene = Scene()
    scene.fill(30)
    story = add_story(scene)
    async with showing(scene) as (url, _):
        for wanted in (story, story[:8], "story", "research_agent"):
            async with client.get(f"{url}/programs/{wanted}", headers=BEARER) as answer:
                got = await answer.json()
            assert got["row"]["id"] == story, wanted
        assert len(got["calls"]) == got["row"]["calls"] == 9
        states = {one["state"] for call in got["calls"] for one in call["intervals"]}
        assert {"queued", "running", "preempted", "swapped", "engine"} <= states
        assert await status(client, f"{url}/programs/nobody", **BEARER) == 404
        assert await status(client, f"{url}/programs?limit=0", **BEARER) == 400
        async with client.get(f"{url}/programs?limit=3", headers=BEARER) as answer:
            got = await answer.json()
        assert (len(got["programs"]), got["total"]) == (3, 31)


async def test_a_stop_does_not_wait_for_viewers(client: aiohttp.ClientSession):
    """Their streams end."""
    async with showing(Scene()) as (url, dashboard):
        answer = await client.get(f"{url}/live", headers=BEARER)
        assert answer.content_type == "text/event-stream"
        async with asyncio.timeout(5):
            while b"filled" not in await answer.content.readline():
                pass
        assert dashboard.feed.viewers == 1
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 4
    answer.close()


async def test_a_viewer_that_never_reads_is_dropped(monkeypatch):
    """A message has so long; then the connection and the handler are gone, and are counted."""
    monkeypatch.setattr(pages, "SLOW_VIEWER_S", 0.2)
    scene = Scene()
    async with showing(scene) as (url, dashboard):
        dashboard.feed._about["more"] = "x" * (16 << 20)  # more than any kernel holds
        host, _, port = url.removeprefix("http://").removesuffix("/dashboard").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.transport.pause_reading()
        writer.write(
            b"GET /dashboard/live HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n"
            % KEY.encode()
        )
        await until(lambda: dashboard.feed.viewers == 1)
        await until(lambda: scene.gateway.counts.get("viewer too slow") == 1)
        await until(lambda: dashboard.feed.viewers == 0)
        writer.transport.resume_reading()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                assert len(await reader.read()) < 16 << 20  # cut off
        writer.close()


async def test_a_mistake_in_the_feed_does_not_end_it(client: aiohttp.ClientSession):
    """It is logged and counted, the viewers are let go, and the next ones are served."""
    scene = Scene()
    async with showing(scene) as (url, dashboard):
        answer = await client.get(f"{url}/live", headers=BEARER)
        look = dashboard.feed._engine_views
        dashboard.feed._engine_views = lambda: 1 / 0
        async with asyncio.timeout(10):
            await answer.content.read()  # to its end
        dashboard.feed._engine_views = look
        assert scene.gateway.counts["task dashboard restarted"] >= 1
        again = await client.get(f"{url}/live", headers=BEARER)
        async with asyncio.timeout(10):
            while b"tick" not in await again.content.readline():
                pass
        answer.close()
        again.close()

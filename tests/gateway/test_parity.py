"""Every relayed endpoint: the request's bytes reach the engine, the answer's bytes the client."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from autellix.server.gateway.app import CALL_ROUTES, PLAIN_ROUTES

from .conftest import Rig

JSON = {"content-type": "application/json"}


def raw_engine(rig: Rig, answer: bytes, *, status: int = 200, stream: bool = False) -> None:
    """Make the engine answer with these bytes, in pieces if streamed."""

    async def raw(request: web.Request, body: Any) -> web.StreamResponse:
        headers = {"x-of-the-engine": "kept", "content-type": "text/event-stream" if stream else
                   "application/json"}  # fmt: skip
        if not stream:
            return web.Response(status=status, body=answer, headers=headers)
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        chance = random.Random(3)
        at = 0
        while at < len(answer):
            size = chance.choice((1, 2, 7, 500, 70_000))
            await response.write(answer[at : at + size])
            at += size
        return response

    rig.engine._answer = raw  # type: ignore[method-assign]


def odd_json(stream: bool = False) -> bytes:
    """Return an answer whose bytes a re-encoding would change."""
    text = '{ "b": 1.0,"a":\t[1e2, "\\u00e9é", -0],  "a": null}'
    if not stream:
        return text.encode()
    call = '{"index":0,"function":{"arguments":"{\\"x\\""}}'
    tool = f'{{"choices":[{{"delta":{{"tool_calls":[{call}]}}}}]}}'
    return f"data: {text}\n\ndata: {tool}\r\n\r\n: ping\n\nevent: x\ndata: [DONE]\n\n".encode() * 50


def image_body(stream: bool) -> bytes:
    """Return a call with a picture of half a megabyte and spaces that a re-encoding would drop."""
    picture = base64.b64encode(random.Random(1).randbytes(500_000)).decode()
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}]
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": content}]}
    return json.dumps(body, indent=1).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALL_ROUTES)
async def test_a_call_is_byte_for_byte(rig: Rig, path: str, stream: bool):
    """Both ways, whatever is in it: pictures, odd numbers, doubled keys, events in pieces."""
    answer = odd_json(stream)
    raw_engine(rig, answer, stream=stream)
    body = image_body(stream)
    async with rig.client.post(rig.url + path, data=body, headers=JSON) as response:
        assert response.status == 200
        assert await response.read() == answer
        assert response.headers["x-of-the-engine"] == "kept"
        assert response.headers["X-Autellix-Engine"] == "e0"
    seen = rig.engine.seen[-1]
    if path == "/v1/responses":  # its call id travels in the body, see docs/wire.md
        sent = json.loads(seen.raw)
        assert sent.pop("request_id").startswith("resp_ax1-")
        assert sent == json.loads(body)
    else:
        assert seen.raw == body
    await rig.settled()


async def test_an_error_of_the_engine_is_its_own(rig: Rig):
    """Status and bytes."""
    raw_engine(rig, odd_json(), status=422)
    async with rig.client.post(f"{rig.url}/v1/messages", data=b"{}", headers=JSON) as response:
        assert response.status == 422
        assert await response.read() == odd_json()


async def test_a_form_with_audio_is_byte_for_byte(rig: Rig):
    """A body that is no JSON is not looked into."""
    raw_engine(rig, odd_json())
    audio = random.Random(2).randbytes(300_000)
    form = aiohttp.FormData()
    form.add_field("model", "m")
    form.add_field("file", audio, filename="a.wav", content_type="audio/wav")
    url = f"{rig.url}/v1/audio/transcriptions"
    async with rig.client.post(url, data=form, headers={"X-Session-ID": "s"}) as response:
        assert await response.read() == odd_json()
        assert response.headers["X-Autellix-Family"] == "vllm"
    assert audio in rig.engine.seen[-1].raw
    assert rig.engine.seen[-1].headers["content-type"].startswith("multipart/form-data; boundary=")


@pytest.mark.parametrize(("method", "path"), PLAIN_ROUTES)
async def test_what_is_no_call_is_byte_for_byte(rig: Rig, method: str, path: str):
    """Tokens and models, and no call is begun in the table."""
    raw_engine(rig, odd_json())
    body = image_body(stream=False) if method == "POST" else None
    url = rig.url + path.replace("{model:.+}", "org/name") + "?x=%20y"
    async with rig.client.request(method, url, data=body, headers=JSON) as response:
        assert await response.read() == odd_json()
    assert rig.engine.seen[-1].raw == (body or b"")
    assert rig.engine.seen[-1].path.endswith("?x=%20y")
    assert rig.table.counts["calls_begun"] == 0


@pytest.mark.parametrize("cache_salt", [None, "tenant-7"])
async def test_a_cache_salt_is_the_clients_and_no_session(rig: Rig, cache_salt: str | None):
    """One field isolates, another routes; neither is made from the other."""
    fields = {"cache_salt": cache_salt} if cache_salt else {}
    _, headers, _ = await rig.chat({"X-Autellix-Session": "run-1"}, **fields)
    assert rig.engine.seen[-1].body.get("cache_salt") == cache_salt
    assert headers["X-Autellix-Family"] == "autellix"

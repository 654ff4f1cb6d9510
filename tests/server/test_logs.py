"""The log: one line an event, text or JSON, and nothing of what clients and models say."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autellix.server import logs
from autellix.server.logs import Form
from tests.gateway.conftest import running

SECRET = "planted-secret-5f1c"


@contextmanager
def captured(form: Form, level: str = "debug") -> Iterator[io.StringIO]:
    """Send the log to memory, and put everything back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("autellix")
    before = (root.handlers[:], root.level, ours.level, logging.getLogger(logs.CALLS).level)
    stream = io.StringIO()
    logs.set_up(level, form, calls=True, stream=stream)
    try:
        yield stream
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])
        logging.getLogger(logs.CALLS).setLevel(before[3])


def test_json_is_one_object_a_line():
    """Time, level, the event without its figures, the message with them, and fields."""
    with captured("json") as stream:
        log = logging.getLogger("autellix.pool")
        log.info("engine %s is\nready", "e0", extra=logs.fields(starts=1, wait_s=None))
        log.error("no figures")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == "engine %s is\nready"
    assert (first["message"], first["starts"]) == ("engine e0 is\nready", 1)
    assert (second["level"], second["event"]) == ("error", "no figures")
    assert first["time"].endswith("Z")


def test_text_is_one_line_too():
    """A message of several lines stays one event."""
    with captured("text") as stream:
        log = logging.getLogger("autellix.pool")
        log.info("ended:\nline 1\nline 2", extra=logs.fields(engine="e0", took_s=0.5, why="a b"))
    assert stream.getvalue().count("\n") == 1
    assert 'ended: | line 1 | line 2 engine=e0 took_s=0.500 why="a b"' in stream.getvalue()


def test_the_level_is_ours_and_others_are_heard_from_warnings_on():
    """``--log-level`` says how much we say; libraries stay quiet."""
    with captured("text", "warning") as stream:
        logging.getLogger("autellix").info("quiet")
        logging.getLogger("aiohttp.access").info("quiet")
        logging.getLogger("autellix").warning("loud")
        logging.getLogger("aiohttp.server").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert stream.getvalue().count("loud") == 2


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_exception_is_shown_without_what_it_may_quote(form: Form):
    """Type and way; the text only of errors that speak of the machine."""
    with captured(form) as stream:
        for error in (KeyError(SECRET), ConnectionRefusedError(111, "refused")):
            try:
                raise error
            except (KeyError, OSError):
                logging.getLogger("autellix").exception("a mistake")
        logging.getLogger("asyncio").error("never retrieved\nfuture: <%r>", KeyError(SECRET))
    said = stream.getvalue()
    assert SECRET not in said
    assert "KeyError" in said
    assert "refused" in said
    assert "test_logs.py" in said
    assert said.count("\n") == 3


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_line_holds_what_clients_and_models_say(form: Form):
    """A secret in prompt, key, names and answer is in no line, whatever goes wrong."""
    headers = {
        "authorization": f"Bearer {SECRET}", "x-autellix-session": SECRET,
        "x-autellix-node": SECRET, "x-autellix-call": SECRET, "x-autellix-seq": SECRET,
    }  # fmt: skip
    message = {"role": "user", "content": SECRET}
    with captured(form) as stream:
        async with running(2) as rig:
            for engine in rig.engines:
                engine.chunk_text = SECRET
            place = rig.gateway.place
            await rig.chat(headers, messages=[message], user=SECRET)
            await rig.chat(headers, model="unknown", messages=[message])
            rig.engines[0].die_at = rig.engines[1].die_at = -1
            await rig.chat(headers, messages=[message])

            def broken(call, ready):
                raise KeyError(call.content)

            rig.gateway.place = broken
            status, _, _ = await rig.chat(headers, messages=[message])
            assert status == 500
            rig.gateway.place = place
            url = f"{rig.url}/v1/chat/completions"
            async with rig.client.post(url, data=SECRET, headers=headers) as answer:
                assert answer.status == 400
            async with rig.client.get(f"{rig.url}/{SECRET}?key={SECRET}") as answer:
                assert answer.status == 404
            session = f"{rig.url}/autellix/v1/sessions/{SECRET}"
            async with rig.client.put(session, json={"name": SECRET + "\x00"}) as answer:
                assert answer.status == 400
            _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(f"{SECRET} {SECRET}\r\n\r\n".encode())
            await writer.drain()
            writer.close()
            await rig.settled()
    said = stream.getvalue()
    assert SECRET not in said
    assert "KeyError" in said
    assert len([line for line in said.splitlines() if "call over" in line]) == 4
    if form == "json":
        lines = [json.loads(line) for line in said.splitlines()]
        calls = [line for line in lines if line["event"] == "call over"]
        assert [line["outcome"] for line in calls] == ["ok", "refused", "failed", "failed"]
        assert calls[0]["engine"] in ("e0", "e1")
        assert {line["level"] for line in lines} <= {"debug", "info", "warning", "error"}

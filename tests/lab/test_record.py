"""Recording: counts and times become a sound trace, and no text gets into it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autellix.server.lab import cli, record, trace, trace_command
from autellix.server.lab import recorder as lab_recorder
from autellix.server.lab.recorder import Recorder, counts_in, save, unnoted

ROWS = [
    {"program": "a", "thread": "0", "start_s": 10.0, "end_s": 11.0, "prompt_tokens": 100,
     "output_tokens": 5, "hit_tokens": 0},
    {"program": "a", "thread": "0", "start_s": 13.5, "end_s": 14.0, "prompt_tokens": 120,
     "output_tokens": 6, "hit_tokens": 96},
    {"program": "a", "thread": "1", "start_s": 13.6, "end_s": 15.0, "prompt_tokens": 50,
     "output_tokens": 7, "hit_tokens": 0},
    {"program": "a", "thread": "2", "start_s": 16.0, "end_s": 17.0, "prompt_tokens": 60,
     "output_tokens": 8, "hit_tokens": 0},
    {"program": "b", "thread": "0", "start_s": 12.0, "end_s": 12.5, "prompt_tokens": 9,
     "output_tokens": 1, "hit_tokens": 0},
]  # fmt: skip


def test_rows_become_programs_with_their_order_and_waits(tmp_path: Path, capsys):
    """A serial call waits for its thread, a joining one for all threads."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "t.jsonl.xz"
    rows.write_text("\n".join(record.to_row(row) for row in ROWS))
    assert cli.trace(["import", str(rows), "--out", str(out)]) == 0
    assert "2 programs, 5 calls" in capsys.readouterr().out
    first, second = trace.load(str(out))
    assert [call.parents for call in first.calls] == [(), (0,), (0,), (1, 2)]
    assert [call.tool_s for call in first.calls] == [0.0, 2.5, 2.6, 1.0]
    assert first.calls[1].prefix_tokens == 96
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.0)


def test_a_bad_row_is_named(tmp_path: Path, capsys):
    """File, line and reason; status 2."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(record.to_row(ROWS[0]) + "\n{}\n")
    assert cli.trace(["import", str(rows), "--out", str(tmp_path / "t.jsonl")]) == 2
    assert "rows.jsonl:2: no call" in capsys.readouterr().err


ANTHROPIC = b"""event: message_start
data: {"message":{"usage":{"input_tokens":10,"cache_read_input_tokens":32,"output_tokens":1}}}

event: message_delta
data: {"delta":{},"usage":{"input_tokens":null,"output_tokens":9}}

"""


@pytest.mark.parametrize(
    ("ends", "counts"),
    [
        (b'{"choices":[{"text":"\\"usage\\": {"}],"usage":{"prompt_tokens":7}}', (7, 1, 0)),
        (b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens":8,"x":{}}}\n\ndata: [DONE]',
         (8, 1, 0)),
        (b'{"usage":{"input_tokens":40,"input_tokens_details":{"cached_tokens":32},'
         b'"output_tokens":3}}', (40, 3, 32)),
        (ANTHROPIC, (42, 9, 32)),
        (b'data: {"choices":[]}', None),
    ],
)  # fmt: skip
def test_counts_are_found_in_any_answer(ends: bytes, counts: tuple[int, int, int] | None):
    """Streamed or whole, of any of the APIs, and whatever the text says."""
    assert counts_in(ends) == counts


async def test_counts_at_the_beginning_of_a_long_answer_are_kept():
    """The prompt's stand in the first event, the output's in the last, megabytes later."""
    start, end = ANTHROPIC.split(b"event: message_delta")
    relay, got = await relayed([{"text": (start + b"x" * 300_000 + end).decode()}], "/v1/messages")
    assert len(got[0] or b"") > 300_000
    assert [row[4:] for row in relay.rows] == [(42, 9, 32)]


async def test_a_call_that_was_refused_is_said_and_not_missed(monkeypatch: pytest.MonkeyPatch):
    """By the server, or by the relay for its size: it did not run, so nothing is missing."""
    monkeypatch.setattr(lab_recorder, "BODY_BYTES_MAX", 1000)
    relay, got = await relayed([WITH_USAGE, {"status": 429}, {"text": "x" * 2000}])
    assert got[1] == b"no"
    assert len(relay.rows) == 1
    assert not relay.skipped
    assert unnoted(relay) == "1 call refused: status 413\n1 call refused: status 429\n"


async def test_the_relay_notes_counts_and_no_text(tmp_path: Path):
    """Answers pass unchanged; the trace holds the counts of both calls and none of the words."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response(
            {
                "choices": [{"text": "SECRET " + body["prompt"]}],
                "usage": {"prompt_tokens": 40, "completion_tokens": 3},
            }
        )

    upstream_application = web.Application()
    upstream_application.router.add_post("/v1/completions", answer)
    async with TestServer(upstream_application) as upstream:
        recorder = Recorder(str(upstream.make_url("")))
        async with TestServer(recorder.application()) as relay, aiohttp.ClientSession() as client:
            for _ in range(2):
                async with client.post(
                    relay.make_url("/v1/completions"),
                    json={"prompt": "PRIVATE"},
                    headers={"X-Autellix-Session": "s1"},
                ) as response:
                    assert (await response.json())["choices"][0]["text"] == "SECRET PRIVATE"
    assert save(recorder, tmp_path / "t.jsonl", "react") == 1
    (program,) = trace.load(str(tmp_path / "t.jsonl"))
    assert [(c.prompt_tokens, c.output_tokens) for c in program.calls] == [(40, 3), (40, 3)]
    text = (tmp_path / "t.jsonl").read_text()
    assert not any(word in text for word in ("SECRET", "PRIVATE", "s1"))
    assert json.loads(text)["source"] == "recorded"


CHUNK = b'data: {"choices":[{"text":"word"}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,' \
        b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'  # fmt: skip
DONE = b"data: [DONE]\n\n"


async def streamed(request: web.Request) -> web.StreamResponse:
    """Stream as vLLM does: usage only if asked, cut before the end or compressed if told so."""
    how = await request.json()
    if how.get("status"):
        return web.Response(status=how["status"], text="no")
    if "text" in how:
        return web.Response(text=how["text"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    asked = request.headers.get("Accept-Encoding", "")
    if how.get("compressed") or "gzip" in asked:
        response.headers["Content-Encoding"] = "gzip"
    await response.prepare(request)
    await response.write(CHUNK)
    if how.get("cut"):
        assert request.transport is not None
        request.transport.abort()
        return response
    if how.get("stream_options", {}).get("include_usage"):
        await response.write(USAGE)
    await response.write(DONE)
    return response


async def relayed(bodies: list[dict[str, object]], path: str = "/v1/completions", **settings):
    """Return a recorder through which bodies went one by one, and what the client got."""
    upstream_application = web.Application()
    upstream_application.router.add_route("*", "/{path:.*}", streamed)
    got: list[bytes | None] = []
    async with TestServer(upstream_application) as upstream:
        relay_to = Recorder(str(upstream.make_url("")), **settings)
        async with (
            TestServer(relay_to.application()) as relay,
            aiohttp.ClientSession(auto_decompress=False) as client,
        ):
            for body in bodies:
                try:
                    async with client.post(
                        relay.make_url(path), json=body, headers={"X-Session-ID": "s"}
                    ) as response:
                        got.append(await response.read())
                except aiohttp.ClientError:
                    got.append(None)
    return relay_to, got


WITH_USAGE: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}


async def test_a_stream_with_usage_is_noted_and_passes_unchanged():
    """Counts and hits are the server's, the bytes are the server's, nothing is skipped."""
    relay, got = await relayed([WITH_USAGE])
    assert got == [CHUNK + USAGE + DONE]
    (row,) = relay.rows
    assert (row.program, row.prompt_tokens, row.output_tokens, row.hit_tokens) == ("s", 40, 3, 32)
    assert unnoted(relay) == ""


@pytest.mark.parametrize(
    ("body", "answer", "said"),
    [
        ({"stream": True}, CHUNK + DONE, "no usage in the answer; a stream needs .*include_usage"),
        ({"status": 203}, b"no", "status 203"),
        (WITH_USAGE | {"cut": True}, None, "cut before its end"),
        (WITH_USAGE | {"compressed": True}, CHUNK + USAGE + DONE, "compressed"),
    ],
)
async def test_a_call_that_is_not_noted_is_said(
    body: dict[str, object], answer: bytes | None, said: str
):
    """The reason stands in one line, the client gets what the server gave, the others are noted."""
    relay, got = await relayed([WITH_USAGE, body, WITH_USAGE])
    assert got == [CHUNK + USAGE + DONE, answer, CHUNK + USAGE + DONE]
    assert len(relay.rows) == 2
    assert re.fullmatch(f"1 call without counts: {said}\n", unnoted(relay))


async def test_only_calls_are_missed():
    """What is no LLM call needs no counts."""
    relay, _ = await relayed([{}], path="/tokenize")
    assert (relay.rows, unnoted(relay)) == ([], "")


async def test_calls_past_the_bound_are_said():
    """A full recorder goes on relaying and counts what it leaves out."""
    relay, _ = await relayed([WITH_USAGE] * 3, rows_max=1)
    assert len(relay.rows) == 1
    assert unnoted(relay) == "2 calls without counts: more than 1 calls\n"


async def test_a_server_that_cannot_be_reached_is_said():
    """The client gets 502, and the call is counted."""
    relay_to = Recorder("http://127.0.0.1:1")
    async with (
        TestServer(relay_to.application()) as relay,
        aiohttp.ClientSession() as client,
        client.post(relay.make_url("/v1/completions"), json={}) as response,
    ):
        assert response.status == 502
    assert unnoted(relay_to) == "1 call without counts: the server could not be reached\n"


@pytest.mark.parametrize("missed", [0, 2])
def test_the_command_ends_with_what_is_missing(tmp_path: Path, capsys, monkeypatch, missed: int):
    """Status 1 and a line for it if calls have no counts, else 0 and nothing."""

    async def serve(recorder: Recorder, *_: object) -> None:
        recorder.rows = [record.Row(**ROWS[0])]
        if missed:
            recorder.skipped[lab_recorder.CUT] += missed

    monkeypatch.setattr(trace_command, "serve", serve)
    out = tmp_path / "t.jsonl"
    argv = ["record", "--upstream", "http://x", "--out", str(out)]
    assert cli.trace(argv) == (1 if missed else 0)
    said = capsys.readouterr().out
    assert said.startswith("1 programs, 1 calls\n")
    assert ("2 calls without counts: cut before its end\n" in said) == bool(missed)
    assert len(trace.load(str(out))) == 1


def test_a_trace_that_could_not_be_written_is_refused_before_recording(tmp_path: Path, capsys):
    """Hours of calls are not lost at the end for a folder that is not there."""
    out = tmp_path / "none" / "t.jsonl"
    assert cli.trace(["record", "--upstream", "http://x", "--out", str(out)]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert cli.trace(["import", str(tmp_path / "no-rows"), "--out", str(tmp_path / "t")]) == 2
    assert "no-rows:1: cannot be read" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(tmp_path: Path, capsys):
    """One line and status 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = ["record", "--upstream", "http://x", "--out", str(tmp_path / "t"), "--port", port]
        assert cli.trace(argv) == 2
    assert f"--port {port}: " in capsys.readouterr().err

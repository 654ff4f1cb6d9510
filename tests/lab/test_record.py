"""Recording: counts and times become a sound trace, and no text gets into it."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autellix.server.lab import cli, record, trace
from autellix.server.lab.recorder import Recorder, save, usage_in

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


@pytest.mark.parametrize(
    ("tail", "prompt"),
    [
        (b'{"choices":[{"text":"\\"usage\\": {"}],"usage":{"prompt_tokens":7}}', 7),
        (b'data: {"usage":null}\n\ndata: {"usage":{"prompt_tokens":8,"x":{}}}\n\ndata: [DONE]', 8),
        (b'data: {"choices":[]}', None),
    ],
)
def test_usage_is_found_at_the_end_of_any_answer(tail: bytes, prompt: int | None):
    """Streamed or whole, and whatever the text says."""
    usage = usage_in(tail)
    assert (usage and usage["prompt_tokens"]) == prompt


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

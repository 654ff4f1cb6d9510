"""The bench command against two servers: arms in turn, losses, sessions, order and waits."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autellix.server.lab import bench_command, trace
from autellix.testing import autellix_server

__all__ = ["autellix_server"]

PROMPT = 20
ANSWER_S = 0.02  # of the fake model; long enough for a call that does not wait to be seen


class Asked(NamedTuple):
    """One call as a server saw it; its number of tokens says which one of the trace it is."""

    arm: str
    tokens: int
    session: str | None
    came_s: float
    answered_s: float


class BenchServer:
    """A vLLM that notes when calls came and when their answers were about to go out.

    Args:
        arm: Its name.
        seen: Where it notes calls, together with the other servers.
        lose: Calls that it answers with an error, by their number of tokens.
    """

    def __init__(self, arm: str, seen: list[Asked], lose: tuple[int, ...] = ()) -> None:
        self._arm = arm
        self._seen = seen
        self._lose = lose

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one completion as a stream with usage, after a moment."""
        came_s = time.monotonic()
        body = await request.json()
        tokens = body["max_tokens"]
        await asyncio.sleep(ANSWER_S)
        session = request.headers.get("X-Autellix-Session")
        self._seen.append(Asked(self._arm, tokens, session, came_s, time.monotonic()))
        if tokens in self._lose:
            return web.json_response({"error": {"message": "no"}}, status=500)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        usage["total_tokens"] = sum(usage.values())
        base = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
        choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": [7] * tokens}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in ({**base, "choices": [choice]}, {**base, "choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def serving(*servers: BenchServer) -> Iterator[list[str]]:
    """Run servers in a thread of their own, as the bench has its own loop; yield their URLs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def done(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    started = []
    try:
        for server in servers:
            application = web.Application()
            application.router.add_post("/v1/completions", server.complete)
            started.append(TestServer(application))
            done(started[-1].start_server())
        yield [str(server.make_url("/v1")) for server in started]
    finally:
        for server in started:
            done(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def a_program(name: str, *tokens: int, tool_s: float | None = None) -> trace.Program:
    """Return a program whose calls follow each other, with these numbers of tokens."""
    calls = [
        trace.Call(
            id=place,
            parents=(place - 1,) if place else (),
            prompt_tokens=PROMPT,
            output_tokens=count,
            cached_prefix_of=None,
            prefix_tokens=0,
            tool_s=tool_s if place else None,
            interrupt=None,
            role=None,
            thread=None,
        )
        for place, count in enumerate(tokens)
    ]
    return trace.Program(name, "test", "chat", None, None, {}, tuple(calls))


def bench(
    folder: Path, programs: list[trace.Program], servers: list[BenchServer], *more: str
) -> tuple[int, list[dict]]:
    """Run the command with all programs at nearly once; return its status and its results."""
    path, out = folder / "t.jsonl", folder / "out.json"
    trace.write(programs, path)
    with serving(*servers) as urls:
        named = [f"--url={arm}={url}" for arm, url in zip("AB", urls, strict=False)]
        status = bench_command.main([
            "--trace", str(path), *named, "--rate", "1000", "--programs", str(len(programs)),
            "--profile", "a100-80g-llama-3.1-8b", "--json", str(out), *more,
        ])  # fmt: skip
    return status, json.loads(out.read_text())["results"]


TWO = [a_program("a", 3, 4, 5), a_program("b", 6, 7, 8)]


@pytest.mark.usefixtures("autellix_server")
def test_two_servers_take_turns_and_programs_keep_their_order(tmp_path: Path):
    """A B B A; one session a program and no other's; no child before its parent's answer."""
    seen: list[Asked] = []
    servers = [BenchServer("A", seen), BenchServer("B", seen)]
    status, results = bench(tmp_path, TWO, servers, "--rounds", "2")
    assert status == 0
    assert [(r["arm"], r["seed"]) for r in results] == [("A", 0), ("B", 0), ("B", 1), ("A", 1)]
    assert [call.arm for call in seen] == ["A"] * 6 + ["B"] * 12 + ["A"] * 6
    for start in range(0, len(seen), 6):
        run = {call.tokens: call for call in seen[start : start + 6]}
        sessions = [{run[tokens].session for tokens in own} for own in ((3, 4, 5), (6, 7, 8))]
        assert [len(own) for own in sessions] == [1, 1]
        assert None not in sessions[0] | sessions[1]
        assert sessions[0] != sessions[1]
        for parent, child in ((3, 4), (4, 5), (6, 7), (7, 8)):
            assert run[parent].answered_s <= run[child].came_s
    assert all(r["programs"] == 2 and r["unfinished"] == 0 for r in results)


@pytest.mark.usefixtures("autellix_server")
def test_a_server_that_loses_calls_gives_no_result(tmp_path: Path, capsys):
    """Status 1, how many, and which; the rest of a program is not sent after a loss."""
    seen: list[Asked] = []
    servers = [BenchServer("A", seen), BenchServer("B", seen, lose=(4, 8))]
    status, results = bench(tmp_path, TWO, servers)
    assert status == 1
    printed = capsys.readouterr().err
    assert "autellix bench: 2 calls were lost: no result" in printed
    assert printed.count("lost: program ") == 2
    assert [len(r["lost_calls"]) for r in results] == [0, 2]
    assert [r["unfinished"] for r in results] == [0, 2]
    assert sorted(call.tokens for call in seen if call.arm == "B") == [3, 4, 6, 7, 8]


@pytest.mark.usefixtures("autellix_server")
def test_tools_take_their_scaled_time(tmp_path: Path):
    """A wait of 0.2 s at half its length is 0.1 s between two calls, at least."""
    seen: list[Asked] = []
    one = [a_program("a", 3, 4, tool_s=0.2)]
    status, (result,) = bench(tmp_path, one, [BenchServer("A", seen)], "--wait-scale", "0.5")
    assert status == 0
    first, second = seen
    assert second.came_s - first.answered_s >= 0.1
    assert result["tool_s_mean"] == 0.1
    assert result["waits"]["scale"] == 0.5


@pytest.mark.usefixtures("autellix_server")
def test_time_to_the_first_token_is_not_called_waiting(tmp_path: Path):
    """From outside nobody sees a call wait, so no figure has that name."""
    _, (result,) = bench(tmp_path, TWO, [BenchServer("A", [])])
    for some in (result, *(s for s in result["by_size"] if s["programs"])):
        assert "wait_share" not in some
        assert 0.5 < some["first_token_share"] <= 1.0, "the fake's first token is nearly its last"

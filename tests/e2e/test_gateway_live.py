"""The gateway before a real vLLM: the engine's own bytes, and calls that leave it at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import (
    JSON,
    Reply,
    ServeProcess,
    UnixConnection,
    exchange,
    serving,
    wait_until,
)

pytestmark = [pytest.mark.live, pytest.mark.heavy, pytest.mark.timeout(420)]

LEAVE_S = 1.0
SAY = [{"role": "user", "content": "Say yes."}]
MODEL: dict[str, Any] = {"model": "tiny", "temperature": 0, "seed": 1}
TOOL = {"type": "function", "function": {"name": "go", "strict": True, "parameters": {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
    "additionalProperties": False}}}  # fmt: skip
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
IMAGE = [{"role": "user", "content": [PICTURE]}]

#: name → (method, path, body)
REQUESTS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "chat": ("POST", "/v1/chat/completions", {"messages": SAY, "max_tokens": 5}),
    "chat, logprobs": ("POST", "/v1/chat/completions",
                       {"messages": SAY, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    "chat, tool": ("POST", "/v1/chat/completions",
                   {"messages": SAY, "max_tokens": 40, "tools": [TOOL],
                    "tool_choice": {"type": "function", "function": {"name": "go"}}}),
    "chat, schema": ("POST", "/v1/chat/completions",
                     {"messages": SAY, "max_tokens": 40, "response_format": SCHEMA}),
    "chat, image": ("POST", "/v1/chat/completions", {"messages": IMAGE}),
    "completions": ("POST", "/v1/completions", {"prompt": ["a b", "c"], "max_tokens": 4}),
    "responses": ("POST", "/v1/responses", {"input": "Say yes.", "max_output_tokens": 4}),
    "messages": ("POST", "/v1/messages", {"messages": SAY, "max_tokens": 4}),
    "count": ("POST", "/v1/messages/count_tokens", {"messages": SAY}),
    "embeddings": ("POST", "/v1/embeddings", {"input": "a b"}),
    "tokenize": ("POST", "/tokenize", {"prompt": "a b c"}),
    "tokenize, chat": ("POST", "/tokenize", {"messages": SAY}),
    "detokenize": ("POST", "/detokenize", {"tokens": [5, 6]}),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/tiny", None),
    "version": ("GET", "/version", None),
    "unknown model": ("POST", "/v1/chat/completions", {"messages": SAY, "model": "none"}),
    "wrong value": ("POST", "/v1/chat/completions", {"messages": SAY, "temperature": "hot"}),
}  # fmt: skip
STREAMED = ("chat", "chat, tool", "chat, schema", "completions", "responses", "messages")
IDS = re.compile(rb"(?:(?:chatcmpl|cmpl|resp|msg|rs|fc|call|chatcmpl-tool|modelperm)[-_])[\w-]+")
DATES = re.compile(
    rb'("(?:created|created_at|completed_at|started_at|timestamp)":\s*)[0-9.]+|'
    rb'("id":\s*")[0-9a-f]{32}(")'
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory) -> Iterator[ServeProcess]:
    """One engine with one slot, whose calls are soon of a lower level."""
    log = tmp_path_factory.mktemp("serve") / "log"
    settings = "--pool-drain-s 2 --scheduling-level-bounds-s 0.05"
    with serving(log, str(tiny_model), *settings.split(), "--", "--max-num-seqs", "1") as running:
        yield running


def direct(server: ServeProcess, method: str, path: str, body: Any) -> Reply:
    """Ask the engine itself, as only the gateway may: by its socket, with its key."""
    pid = server.pid_of("api server")
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    uds = words[words.index(b"--uds") + 1].decode()
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    key = next(v for v in environ if v.startswith(b"VLLM_API_KEY=")).split(b"=", 1)[1].decode()
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Authorization": f"Bearer {key}", **(JSON if body is not None else {})}
    return exchange(UnixConnection(uds, 60), method, path, data, headers)


def plain(body: bytes) -> bytes:
    """Return an answer without its ids and dates."""
    return DATES.sub(rb"\1\2X\3", IDS.sub(b"ID", body))


def said(body: bytes) -> tuple[str, list[str]]:
    """Return what a stream says, put together, and the kinds of its events."""
    texts: list[str] = []
    kinds: dict[str, None] = {}

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for name, item in value.items():
                if isinstance(item, str) and name in ("text", "content", "arguments", "delta"):
                    texts.append(item)
                walk(item)

    for event in body.decode().replace("\r\n", "\n").split("\n\n"):
        data = event.partition("data: ")[2]
        kinds[event.partition("data: ")[0]] = None
        if data.startswith("{"):
            walk(json.loads(data))
    return "".join(texts), [*kinds, str(b"[DONE]" in body)]


@pytest.mark.parametrize(
    ("name", "stream"),
    [(name, False) for name in REQUESTS] + [(name, True) for name in STREAMED],
)
def test_the_bytes_are_the_engines(server: ServeProcess, name: str, stream: bool):
    """Through the gateway as directly, but for ids and dates; errors too."""
    method, path, fields = REQUESTS[name]
    body = None if fields is None else {**MODEL, **fields, **({"stream": True} if stream else {})}
    if path in ("/tokenize", "/detokenize", "/v1/embeddings") or "messages/count" in path:
        body = {"model": "tiny", **(fields or {})}
    ours, engines = server.ask(method, path, body), direct(server, method, path, body)
    assert ours.status == engines.status
    if stream:  # how many tokens are in one event depends on the moment
        assert said(ours.body) == said(engines.body)
    else:
        assert plain(ours.body) == plain(engines.body)
    assert ours.headers.get("content-type") == engines.headers.get("content-type")
    if name not in ("embeddings", "model", "chat, image", "unknown model", "wrong value"):
        assert ours.status == 200, ours.body[:300]


@contextlib.contextmanager
def begun(
    server: ServeProcess, session: str, prompt: str, *, stream: bool, max_tokens: int = 1500
) -> Iterator[http.client.HTTPConnection]:
    """Begin a long call and yield its connection, with nothing read of it."""
    body = {**MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True,
            "stream": stream}  # fmt: skip
    with contextlib.closing(server.connection()) as connection:
        headers = {**JSON, "X-Autellix-Session": session}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield connection


def requests_in(server: ServeProcess) -> tuple[float, float]:
    """Return how many requests the engine runs and holds waiting."""
    metrics = server.engine_metrics()
    return metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]


def leaves(server: ServeProcess, connection: http.client.HTTPConnection, left: float) -> None:
    """Hang up, and fail unless the engine, asked within a second, has only so many requests.

    When it was asked counts, not when it answered: on a busy machine an answer may take as long.
    """
    assert connection.sock is not None
    connection.sock.close()
    began_s = asked_s = time.monotonic()
    while sum(requests_in(server)) != left:
        time.sleep(0.02)
        asked_s = time.monotonic()
        assert asked_s - began_s < LEAVE_S, f"{requests_in(server)} are left, not {left:.0f}"


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_left_while_preempted_is_gone(server: ServeProcess, stream: bool):
    """It has no slot, waits to come back, and leaves the engine all the same."""
    preemptions = server.engine_metrics()["vllm:num_preemptions_total"]
    with begun(server, f"old-{stream}", "a", stream=stream) as old:
        wait_until(lambda: requests_in(server) == (1, 0), 20, every_s=0.02)
        time.sleep(0.5)  # attained service, so that it is of a lower level
        with begun(server, f"young-{stream}", "b", stream=True) as young:
            wait_until(
                lambda: server.engine_metrics()["vllm:num_preemptions_total"] > preemptions, 20,
                every_s=0.02,
            )  # fmt: skip
            assert requests_in(server) == (1, 1)
            leaves(server, old, 1)
            leaves(server, young, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_left_while_it_waits_or_is_in_prefill_is_gone(server, stream: bool):
    """Before its first token: of two long prompts one is computed, the other waits."""
    prompt = "word " * 1200
    with (
        begun(server, f"p-{stream}", prompt + "x", stream=stream, max_tokens=500) as first,
        begun(server, f"q-{stream}", prompt + "y", stream=stream, max_tokens=500) as second,
    ):
        wait_until(lambda: sum(requests_in(server)) == 2, 20, every_s=0.02)
        leaves(server, second, 1)
        leaves(server, first, 0)
    assert server.ask("GET", "/autellix/v1/programs").json["calls_in_flight"] == 0

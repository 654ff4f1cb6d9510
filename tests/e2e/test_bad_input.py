"""Bad input is answered as OpenAI's clients expect, or served untagged, and the server goes on."""

from __future__ import annotations

import concurrent.futures
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from autellix import wire
from tests.serve_process import JSON, Reply, ServeProcess, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def server(smollm2_server: ServeProcess) -> Iterator[ServeProcess]:
    """The server, checked after each test: a good call is answered, and nothing is held."""
    yield smollm2_server
    assert smollm2_server.ask("POST", CHAT, chat()).status == 200
    assert known(smollm2_server)["calls_in_flight"] == 0
    assert smollm2_server.health() == 200


def chat(**changes: Any) -> dict[str, Any]:
    """Return the body of a small good call."""
    messages = [{"role": "user", "content": "Say yes."}]
    return {"model": "smollm2", "messages": messages, "max_tokens": 2, "temperature": 0, **changes}


def known(server: ServeProcess) -> dict[str, Any]:
    """Return what the server knows."""
    return server.ask("GET", "/autellix/v1/programs").json


def row_of(server: ServeProcess, session: str) -> dict[str, Any] | None:
    """Return one session's row."""
    rows = known(server)["programs"]
    return next((row for row in rows if row["session"] == session), None)


def settled_row(server: ServeProcess, session: str) -> dict[str, Any]:
    """Return one session's row once its engine has told of each of its calls.

    A report comes after the answer: until then a call's cost is its wall time.
    """
    row = row_of(server, session)
    assert row is not None
    path = f"/autellix/v1/calls?program={row['program_id']}"

    def is_told() -> bool:
        return all(call["reported"] for call in server.ask("GET", path).json["calls"])

    wait_until(is_told, 30, what=lambda: f"for the reports of {session}")
    row = row_of(server, session)
    assert row is not None
    return row


def assert_error(reply: Reply, status: int) -> None:
    """Check the form that OpenAI's clients parse."""
    assert reply.status == status, reply.body[:500]
    error = reply.json["error"]
    assert error["message"]
    assert {"type", "param", "code"} <= error.keys()


def test_an_unknown_model(server: ServeProcess):
    """404, as OpenAI has it."""
    assert_error(server.ask("POST", CHAT, chat(model="no-such-model")), 404)


def test_a_prompt_longer_than_the_model(server: ServeProcess):
    """400, and the engine did not try."""
    messages = [{"role": "user", "content": "word " * 9000}]
    assert_error(server.ask("POST", CHAT, chat(messages=messages)), 400)


@pytest.mark.parametrize("body", [b"{", b"", b"[1, 2]", b"\xff\xfe", b'{"model": NaN}', b"null"])
def test_a_body_that_is_no_json_object(server: ServeProcess, body: bytes):
    """400 for each."""
    assert_error(server.ask("POST", CHAT, body), 400)


def test_a_body_of_50_mb(server: ServeProcess):
    """413; the body is not kept."""
    try:
        reply = server.ask("POST", CHAT, b" " * (50 << 20))
    except (BrokenPipeError, ConnectionResetError):
        return  # refused before it was all sent, which is as clear as it gets for a sender
    assert_error(reply, 413)


@pytest.mark.parametrize(
    "garbage", ["a b", "\xff\xfe", "-1", "9" * 4000, '{"a": 1}', "0:0:0", "../../etc", "", "1e9"]
)
def test_garbage_in_every_header(server: ServeProcess, garbage: str):
    """Each malformed header is ignored: the call is served."""
    headers = dict.fromkeys(wire.REQUEST_HEADERS, garbage)
    assert server.ask("POST", CHAT, chat(), headers).status == 200
    assert row_of(server, garbage) is None or wire.is_valid_id(garbage)


def test_headers_of_ours_that_go_to_vllm_are_not_the_clients(server: ServeProcess):
    """A priority, request id or rank of the client's own does no harm."""
    headers = {
        "X-Vllm-Priority": "-99999999999999999999999",
        "X-Request-Id": "ax1-00000000-0-0-0",
        "X-data-parallel-rank": "7",
        "Authorization": "Bearer wrong",
    }
    assert server.ask("POST", CHAT, chat(), headers).status == 200


def test_a_body_that_claims_another_session(server: ServeProcess):
    """The victim's program gets no call and no service by it."""
    victim, attacker = (f"{role}-{secrets.token_hex(4)}" for role in ("victim", "attacker"))
    assert server.ask("POST", CHAT, chat(), {wire.SESSION: victim}).status == 200
    before = settled_row(server, victim)
    claims = chat(
        session_id=victim,
        priority=-9,
        request_id="mine",
        kv_transfer_params={"do_remote_prefill": True},
        vllm_xargs={"session_id": victim},
    )
    headers = {wire.SESSION: attacker}  # under the same key, so that only the rule protects
    assert server.ask("POST", CHAT, claims, headers).status == 200
    assert settled_row(server, attacker)["calls"] == 1
    after = settled_row(server, victim)
    assert (after["calls"], after["service_s"]) == (before["calls"], before["service_s"])


def test_two_calls_with_one_id_one_after_the_other(server: ServeProcess):
    """Both are answered, and both are counted as what they are."""
    headers = {wire.SESSION: "twice", wire.CALL: "call-1"}
    statuses = [server.ask("POST", CHAT, chat(), headers).status for _ in range(2)]
    assert statuses == [200, 200]
    assert (row_of(server, "twice") or {}).get("calls_in_flight") == 0


def test_two_calls_with_one_id_at_the_same_time(server: ServeProcess):
    """A retry takes the first one's place: one answer at least, and nothing hangs."""
    headers = {wire.SESSION: "at-once", wire.CALL: "call-1"}
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        futures = [
            both.submit(server.ask, "POST", CHAT, chat(max_tokens=40), headers) for _ in range(2)
        ]
        statuses = sorted(future.result(timeout=60).status for future in futures)
    assert statuses[0] == 200
    assert statuses[1] in (200, 409)


def test_a_route_that_would_stop_the_engine(server: ServeProcess):
    """Controls of vLLM's own are nobody's business."""
    for path in ("/reset_prefix_cache", "/sleep", "/v1/load_lora_adapter", "/metrics", "/invoke"):
        assert server.ask("POST", path, {}, JSON).status in (404, 405), path

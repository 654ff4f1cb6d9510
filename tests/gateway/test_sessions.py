"""The lifecycle endpoints, keys and limits."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json

import pytest

from autellix.errors import ConfigError
from autellix.server.gateway.keys import parse_keys, read_keys
from autellix.server.process_table import program_id_of

from .conftest import Rig, running, until

API = "/autellix/v1"


async def ask(rig: Rig, method: str, path: str, body: object = None, key: str | None = None):
    """Ask a lifecycle endpoint; returns (status, JSON or None)."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with rig.client.request(method, rig.url + API + path, json=body, headers=headers) as got:
        return got.status, await got.json() if got.content_type == "application/json" else None


async def test_a_session_from_start_to_end(rig: Rig):
    """Open, call, look, beat, end; each twice is no harm."""
    for _ in range(2):
        status, answer = await ask(rig, "PUT", "/sessions/run-1", {"name": "planner", "pid": 7})
        assert status == 200
        assert answer["lease_s"] == 60.0
    await rig.chat({"X-Autellix-Session": "run-1", "X-Autellix-Thread": "0"})
    status, row = await ask(rig, "GET", "/sessions/run-1")
    assert (status, row["name"], row["calls"], row["state"]) == (200, "planner", 1, "tool_wait")
    assert row["service_s"] > 0
    status, answer = await ask(rig, "POST", "/sessions/heartbeat", {"ids": ["run-1", "other"]})
    assert (status, answer) == (200, {"lease_s": 60.0, "unknown": ["other"]})
    for _ in range(2):
        assert await ask(rig, "DELETE", "/sessions/run-1", {"reason": "ok"}) == (204, None)
    assert (await ask(rig, "GET", "/sessions/run-1"))[1]["state"] == "ended"
    assert await ask(rig, "DELETE", "/sessions/unknown") == (204, None)
    await until(lambda: program_id_of("", "run-1") in rig.forgotten)


async def test_a_process_with_all_its_sessions_open_renews_them_at_once(rig: Rig):
    """As many as an SDK keeps open, each with the longest id there may be."""
    ids = [f"{n:0128d}" for n in range(10_000)]
    await ask(rig, "PUT", f"/sessions/{ids[7]}", {})
    body = io.BytesIO(json.dumps({"ids": ids}).encode())
    async with rig.client.post(f"{rig.url}{API}/sessions/heartbeat", data=body) as got:
        assert got.status == 200
        assert (await got.json())["unknown"] == ids[:7] + ids[8:]


async def test_an_end_with_calls_in_flight_drains(rig: Rig):
    """The call goes on; then the session is over."""
    rig.engine.stall_at = 0
    call = asyncio.create_task(rig.chat({"X-Autellix-Session": "run-1"}))
    await rig.engine.arrived.wait()
    await ask(rig, "DELETE", "/sessions/run-1")
    assert (await ask(rig, "GET", "/sessions/run-1"))[1]["state"] == "draining"
    rig.engine.go.set()
    assert (await call)[0] == 200
    await rig.settled()
    assert (await ask(rig, "GET", "/sessions/run-1"))[1]["state"] == "ended"


async def test_the_server_chooses_an_id_when_asked(rig: Rig):
    """A UUID of version 7, as hex."""
    status, answer = await ask(rig, "POST", "/sessions", {})
    assert status == 201
    assert len(answer["id"]) == 32
    assert answer["id"][12] == "7"
    assert (await ask(rig, "GET", f"/sessions/{answer['id']}"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("PUT", "/sessions/run-1", {"name": ""}, "name"),
        ("PUT", "/sessions/run-1", {"name": 7}, "name"),
        ("PUT", "/sessions/run-1", {"metadata": {"x": "y" * 3000}}, "metadata"),
        ("PUT", "/sessions/run-1", {"parent": "a b"}, "parent"),
        ("PUT", "/sessions/run-1", {"pid": True}, "pid"),
        ("PUT", "/sessions/run-1", {"framework": "a\nb"}, "framework"),
        ("PUT", "/sessions/run-1", {"ttl_s": 0}, "ttl_s"),
        ("POST", "/sessions/run-1/tools", {"event": "now"}, "event"),
        ("POST", "/sessions/run-1/tools", {"event": "end", "tool": 7}, "tool"),
        ("POST", "/sessions/run-1/tools", {"event": "end", "tool": "t", "id": ""}, "id"),
        ("PUT", "/sessions/no%20blank", {}, "session"),
        ("DELETE", "/sessions/run-1", {"reason": "bored"}, "reason"),
        ("POST", "/sessions/heartbeat", {"ids": "run-1"}, "ids"),
        ("POST", "/sessions/heartbeat", {}, "ids"),
        ("POST", "/sessions/heartbeat", {"ids": ["run-1", 7]}, "ids"),
        ("POST", "/sessions/heartbeat", {"ids": ["no blank"]}, "ids"),
        ("POST", "/sessions/heartbeat", {"ids": ["x"] * 10_001}, "ids"),
    ],
)
async def test_a_wrong_field_is_named(rig: Rig, method: str, path: str, body: object, field: str):
    """The error says field, value and what is allowed."""
    status, answer = await ask(rig, method, path, body)
    assert status == 400
    assert answer["error"]["param"] == field
    assert answer["error"]["message"].startswith(f"{field}: ")
    assert "is not allowed; allowed is" in answer["error"]["message"]


async def test_a_running_tool_is_seen_and_a_wished_lease_is_kept(rig: Rig):
    """The SDK's hints: a program with a running tool waits for it."""
    status, answer = await ask(rig, "PUT", "/sessions/run-1", {"ttl_s": 5})
    assert (status, answer["lease_s"]) == (200, 5)
    program = rig.table.get(program_id_of("", "run-1"))
    assert program is not None
    assert program.lease_until_s - program.arrival_s < 6
    hint = {"event": "start", "tool": "search", "id": "t-1", "thread": 0}
    assert (await ask(rig, "POST", "/sessions/run-1/tools", hint))[0] == 204
    row = (await ask(rig, "GET", "/sessions/run-1"))[1]
    assert (row["state"], row["tools_running"], row["tools"]) == ("tool_wait", ["search"], 1)
    for _ in range(2):
        end = {**hint, "event": "end", "ok": True, "duration_s": 0.1}
        assert (await ask(rig, "POST", "/sessions/run-1/tools", end))[0] == 204
    assert (await ask(rig, "GET", "/sessions/run-1"))[1]["state"] == "idle"
    assert (await ask(rig, "POST", "/sessions/other/tools", hint))[0] == 404


async def test_the_engines_are_told_what_a_program_waits_for(rig: Rig):
    """Each tool that begins, and the end of the last one; nothing twice."""
    await ask(rig, "PUT", "/sessions/run-1", {})
    program_id = program_id_of("", "run-1")
    told: list[tuple[str, str | None]] = []
    rig.gateway.tool_noted = lambda *what: told.append(what)
    for event, tool in (
        ("start", "search"),
        ("start", "build"),
        ("end", "search"),
        ("end", "build"),
    ):
        hint = {"event": event, "tool": tool, "id": f"t-{tool}", "thread": 0}
        for _ in range(2):
            assert (await ask(rig, "POST", "/sessions/run-1/tools", hint))[0] == 204
    assert told == [(program_id, "search"), (program_id, "build"), (program_id, None)]


async def test_the_info_and_the_programs(rig: Rig):
    """What the SDK asks first, and what the demo prints."""
    status, info = await ask(rig, "GET", "/info")
    assert (status, info["version"], info["lease_s"]) == (200, 1, 60.0)
    await rig.chat({"X-Autellix-Session": "run-1"})
    await rig.chat()
    _, answer = await ask(rig, "GET", "/programs")
    assert [row["name"] for row in answer["programs"]] == ["run-1", "untagged"]
    assert answer["calls_in_flight"] == 0
    _, answer = await ask(rig, "GET", "/sessions")
    assert [row["session"] for row in answer["sessions"]] == ["run-1"]
    _, answer = await ask(rig, "GET", "/engines")
    assert answer == {"engines": [{"engine_id": "e0"}], "loads": {}}


def entry(tenant: str, key: str, more: str = "") -> str:
    """Return a configured key."""
    return f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}{more}"


async def test_keys_scope_ids_and_are_never_passed_on():
    """Without a key nothing; with another key, another session."""
    async with running(api_keys=(entry("red", "k1"), entry("blue", "k2", ":500"))) as rig:
        status, _, answer = await rig.chat()
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await rig.chat({"authorization": "Bearer nope"}))[0] == 401
        for header in ({"authorization": "Bearer k1"}, {"x-api-key": "k2"}):
            status, _, _ = await rig.chat({**header, "X-Autellix-Session": "run-1"})
            assert status == 200
            assert "x-api-key" not in rig.engine.seen[-1].headers
            assert rig.engine.seen[-1].headers["authorization"] == "Bearer engine-key"
        assert rig.engine.seen[-1].headers["x-vllm-priority"] == "500"
        assert len({p.program_id for p in rig.table.programs()}) == 2
        assert (await ask(rig, "GET", "/sessions"))[0] == 401
        _, answer = await ask(rig, "GET", "/programs", key="k1")
        assert len(answer["programs"]) == 1
        assert (await ask(rig, "GET", "/info"))[0] == 200


async def test_a_key_sees_no_counts_of_other_keys():
    """Of programs and calls it sees its own; the gateway's counters are the admin's."""
    async with running(api_keys=(entry("red", "k1"), entry("blue", "k2"))) as rig:
        red, blue = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        for session in ("a", "b", "c"):
            await rig.chat({**red, "X-Autellix-Session": session})
        await rig.chat({**blue, "X-Autellix-Session": "a"})
        rig.engine.stall_at = 0
        call = asyncio.create_task(rig.chat({**red, "X-Autellix-Session": "a"}))
        await until(lambda: rig.table.in_flight == 1)
        for key, programs, calls in (("k1", 3, 1), ("k2", 1, 0)):
            _, answer = await ask(rig, "GET", "/programs", key=key)
            assert len(answer.pop("programs")) == programs
            assert answer == {"programs_total": programs, "calls_in_flight": calls}
        rig.engine.go.set()
        assert (await call)[0] == 200
    async with running() as rig:  # nobody has a key, so who is on this machine may see all
        await rig.chat()
        _, answer = await ask(rig, "GET", "/programs")
        assert answer["programs_total"] == 1
        assert answer["table"]["calls_begun"] == 1


def test_malformed_keys_are_refused_without_showing_them(tmp_path):
    """A key put where its hash belongs does not end in a log."""
    with pytest.raises(ConfigError) as error:
        parse_keys(["red:plain-secret"])
    assert "secret" not in str(error.value)
    path = tmp_path / "keys"
    path.write_text(f"# keys\n\n{entry('red', 'k')}  # the first\n")
    assert parse_keys(read_keys(path))[0].name == "red"


async def test_limits_are_a_429_with_retry_after():
    """All calls, and those of one key."""
    async with running(calls_max=2, calls_per_key_max=1) as rig:
        rig.engine.stall_at = 0
        first = asyncio.create_task(rig.chat({"authorization": "Bearer a"}))
        await rig.engine.arrived.wait()
        status, headers, answer = await rig.chat({"authorization": "Bearer a"})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert answer["error"]["type"] == "rate_limit_error"
        rig.engine.arrived.clear()
        second = asyncio.create_task(rig.chat({"authorization": "Bearer b"}))
        await rig.engine.arrived.wait()
        status, _, answer = await rig.chat({"authorization": "Bearer c"})
        assert status == 429
        assert "2 calls are in flight" in answer["error"]["message"]
        rig.engine.go.set()
        assert (await first)[0] == (await second)[0] == 200
        await rig.settled()


async def test_a_stored_response_is_asked_of_its_engine():
    """By its id, under its key; a lost engine is a clear 404."""
    async with running(2) as rig:
        url = f"{rig.url}/v1/responses"
        async with rig.client.post(url, json={"model": "m", "input": "hi"}) as response:
            assert response.status == 200
        owner = next(e for e in rig.engines if e.seen)
        response_id = owner.seen[-1].body["request_id"]
        assert response_id.startswith("resp_ax1-")
        other = next(e for e in rig.engines if e is not owner)
        for path in (f"/{response_id}", f"/{response_id}/cancel"):
            method = "POST" if path.endswith("cancel") else "GET"
            async with rig.client.request(method, url + path) as response:
                assert response.status == 200
        follow = {"model": "m", "input": "and?", "previous_response_id": response_id}
        async with rig.client.post(url, json=follow) as response:
            assert response.status == 200
            assert response.headers["X-Autellix-Family"] == "previous_response_id"
        assert len(owner.seen) == 4
        assert other.seen == []
        headers = {"authorization": "Bearer someone-else"}
        async with rig.client.get(f"{url}/{response_id}", headers=headers) as response:
            assert response.status == 404
        owner.address = owner.address._replace(uds="gone")
        async with rig.client.get(f"{url}/{response_id}") as response:
            assert response.status == 404
            assert "is gone" in (await response.json())["error"]["message"]


async def test_a_full_table_refuses_new_programs_and_says_when_to_come_back():
    """Only when every program has a call in flight; a program that is known is served."""
    async with running(programs_max=1) as rig:
        rig.engine.stall_at = 0
        first = asyncio.create_task(rig.chat({"X-Autellix-Session": "run-1"}))
        await rig.engine.arrived.wait()
        status, headers, answer = await rig.chat({"X-Autellix-Session": "run-2"})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "table is full" in answer["error"]["message"]
        assert (await ask(rig, "PUT", "/sessions/run-2"))[0] == 429
        second = asyncio.create_task(rig.chat({"X-Autellix-Session": "run-1"}))
        await until(lambda: rig.table.in_flight == 2)
        rig.engine.go.set()
        assert (await first)[0] == (await second)[0] == 200
        assert (await rig.chat({"X-Autellix-Session": "run-2"}))[0] == 200
        await rig.settled()


async def test_a_conversation_without_a_name_is_one_program_if_that_is_asked_for():
    """Known by how it begins; off by default, since two runs may begin alike."""
    first = [{"role": "user", "content": "Plan a trip."}]
    turns = (first, [*first, {"role": "assistant", "content": "Where?"}])
    for infer, programs in ((True, 1), (False, 2)):
        async with running(infer_sessions=infer) as rig:
            for messages in turns:
                status, headers, _ = await rig.chat(messages=messages)
                assert status == 200
                assert headers["X-Autellix-Family"] == ("content_opener" if infer else "untagged")
            assert len(rig.table) == programs
            await rig.settled()

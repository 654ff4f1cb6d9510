"""Several gateway processes are one gateway: each program has one owner, whatever it comes by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from autellix.server import views_cli
from autellix.server.admin_cli import ENV_KEY, ENV_URL
from autellix.server.ownership import owner_of_id
from tests.serve_process import wait_until

from .rig import API, CHAT, COUNT, LIMIT_S, Rig, chat, running, session_of, tagged

OWNERS = range(COUNT)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One server for all tests here."""
    with running(tmp_path_factory.mktemp("gateways")) as made:
        assert len(made.pids()) == COUNT
        yield made


def test_a_program_stays_with_its_owner(rig: Rig):
    """On whichever connection its calls come, one after the other or on the same one in turn."""
    sessions = [session_of(owner, "stay") for owner in OWNERS]
    connections = [rig.connection() for _ in range(6)]
    before = rig.counts().get("connections moved", 0)
    for connection in connections:
        for session in (*sessions, *sessions):
            status, body = connection.ask(session)
            assert status == 200
            assert json.loads(body)["path"] == CHAT
    for connection in connections:
        connection.close()
    for owner, session in enumerate(sessions):
        assert rig.sessions_at(owner)[session] == 4 * len(connections) // COUNT
        assert session not in rig.sessions_at(1 - owner)
        assert rig.row(session)["calls"] == 4 * len(connections) // COUNT
    moved = rig.counts().get("connections moved", 0) - before
    assert moved <= len(connections), "it moves at first; then one of several programs stays"


def test_a_connection_that_keeps_to_another_program_moves(rig: Rig):
    """It may be of several programs, so its first calls are forwarded; a stream moves at once."""
    connection = rig.connection()
    mine, other = session_of(0, "keeps"), session_of(1, "keeps")
    assert connection.ask(mine)[0] == 200
    before = rig.counts()
    for _ in range(5):
        assert connection.ask(other)[0] == 200
    after = rig.counts()
    assert after["connections moved"] - before.get("connections moved", 0) == 1
    assert after["forwarded"] - before.get("forwarded", 0) == 2
    assert connection.ask(mine, stream=True)[0] == 200
    assert connection.ask(other, stream=True)[0] == 200
    assert rig.counts()["connections moved"] - after["connections moved"] == 2
    connection.close()
    assert (rig.sessions_at(0)[mine], rig.sessions_at(1)[other]) == (2, 6)


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
def test_bodies_of_any_size_move(rig: Rig, size: int):
    """Also those that have not come to an end when the connection moves."""
    for owner in OWNERS:
        session = session_of(owner, f"size{size}")
        text = "y" * size
        for _ in range(4):  # connections begin at either process
            assert rig.call(session, prompt=text).status == 200
            assert rig.engine.seen[-1].body["prompt"] == text
        assert rig.sessions_at(owner)[session] == 4


def test_streams_come_whole(rig: Rig):
    """Byte for byte what the engine has sent, moved or forwarded."""
    for owner in OWNERS:
        session = session_of(owner, "stream")
        answers = set()
        for fields in ({}, {}, {"session_id": session}, {"session_id": session}):
            headers = {} if fields else tagged(session)
            reply = rig.server.ask("POST", CHAT, chat(stream=True, **fields), headers)
            assert reply.status == 200
            assert reply.headers["x-autellix-program"]
            answers.add(reply.body)
        assert len(answers) == 1
        assert answers.pop().count(b"data: ") == rig.engine.chunks + 1
        assert rig.sessions_at(owner)[session] == 4


def test_what_is_no_plain_call_reaches_the_owner(rig: Rig):
    """By a body's name, by another route, in chunks: each counts at the owner, and is one call."""
    for owner in OWNERS:
        session = session_of(owner, "odd")
        for _ in range(3):
            assert rig.call(session, "/v1/embeddings").status == 200
            body = chat(session_id=session)
            assert rig.server.ask("POST", CHAT, body).status == 200
            connection = rig.server.connection(LIMIT_S)
            text = json.dumps(chat()).encode()
            connection.request("POST", CHAT, iter([text[:9], text[9:]]),
                               {"content-type": "application/json", **tagged(session)},
                               encode_chunked=True)  # fmt: skip
            assert connection.getresponse().status == 200
            connection.close()
        assert rig.sessions_at(owner)[session] == 9
        assert session not in rig.sessions_at(1 - owner)


def test_a_head_of_anothers_session_ends_with_its_head(rig: Rig):
    """Its answer says how long a body would be, and there is none."""
    for owner in OWNERS:
        session = session_of(owner, "headless")
        assert rig.call(session).status == 200
        for _ in range(4):  # at any process
            connection = rig.server.connection(LIMIT_S)
            for _ in range(2):
                connection.request("HEAD", f"{API}/sessions/{session}")
                response = connection.getresponse()
                assert (response.status, response.read()) == (200, b"")
                assert int(response.headers["content-length"]) > 0
            connection.close()


@pytest.mark.parametrize("way", ["header", "body"])
def test_a_client_that_hangs_up_cancels_its_call_at_the_owner(rig: Rig, way: str):
    """The engine's call ends, and the owner counts none in flight."""
    for owner in OWNERS:
        session = session_of(owner, f"abort-{way}")
        for turn in range(3):
            cancelled = rig.engine.cancelled
            rig.stall()
            connection = rig.connection()
            if way == "header":
                connection.begin(session, stream=True)
            else:
                connection.begin(None, stream=True, session_id=session)
            wait_until(lambda: in_flight(rig, session) == (turn + 1, 1), LIMIT_S)  # noqa: B023
            connection.close()
            wait_until(lambda: in_flight(rig, session) == (turn + 1, 0), LIMIT_S)  # noqa: B023
            wait_until(lambda: rig.engine.cancelled > cancelled, LIMIT_S)  # noqa: B023
            rig.go_on()
        assert session in rig.sessions_at(owner)


def in_flight(rig: Rig, session: str) -> tuple[int, int]:
    """Return a session's calls, and those in flight; of one that is not known none."""
    reply = rig.server.ask("GET", f"{API}/sessions/{session}")
    row = reply.json if reply.status == 200 else {"calls": 0, "calls_in_flight": 0}
    return row["calls"], row["calls_in_flight"]


def test_sessions_are_opened_joined_and_ended(rig: Rig):
    """The lifecycle does not show how many processes there are."""
    ask = rig.server.ask
    for owner in OWNERS:
        session = session_of(owner, "life")
        url = f"{API}/sessions/{session}"
        for _ in range(3):
            assert ask("PUT", url, {"name": "planner"}).json["id"] == session
        assert rig.call(session).status == 200
        hint = {"event": "start", "tool": "search", "id": "t1"}
        assert ask("POST", f"{url}/tools", hint).status == 204
        row = rig.row(session)
        assert (row["name"], row["calls"], row["state"]) == ("planner", 1, "tool_wait")
        assert ask("POST", f"{url}/heartbeat", {}).json["unknown"] == []
        assert ask("DELETE", url).status == 204
        assert rig.row(session)["state"] == "ended"
        assert list(rig.sessions_at(owner)).count(session) == 1
    made = {ask("POST", f"{API}/sessions", {}).json["id"] for _ in range(6)}
    assert all(rig.row(session)["calls"] == 0 for session in made)
    assert ask("GET", f"{API}/sessions/nobody").status == 404
    assert ask("PUT", f"{API}/sessions/life-0", {"ttl_s": "x"}).status == 400


def test_a_heartbeat_is_for_sessions_of_all_processes(rig: Rig):
    """Those that nobody knows are named; what is no list is refused as ever."""
    sessions = [session_of(owner, "beat") for owner in OWNERS]
    for session in sessions:
        assert rig.call(session).status == 200
    url = f"{API}/sessions/heartbeat"
    for _ in range(4):
        reply = rig.server.ask("POST", url, {"ids": [*sessions, "who-1", "who-2"]})
        assert reply.json["unknown"] == ["who-1", "who-2"]
    for wrong in ("beat", [*sessions, "no blank"], [7]):
        refused = rig.server.ask("POST", url, {"ids": wrong})
        assert refused.status == 400
        assert refused.json["error"]["param"] == "ids"
    many = [f"{'x' * 100}-{n}" for n in range(5_000)]
    assert rig.server.ask("POST", url, {"ids": many}).json["unknown"] == many


@pytest.mark.parametrize("key", [b"plain", "clé".encode(), b"cl\xe9", b"cl\xff\xfe", b"cl"])
def test_all_processes_know_whose_a_request_is(rig: Rig, key: bytes):
    """By the key's bytes, text or not, and of two that are said by the same one."""
    names = sorted(f"whose-{n}" for n in range(8))
    said = [("Authorization", b"Bearer other"), ("Authorization", b"Bearer " + key)]

    def ask(method: str, path: str, document: object = None) -> Any:
        connection = rig.server.connection(LIMIT_S)
        connection.putrequest(method, f"{API}/sessions{path}")
        for name, value in said:
            connection.putheader(name, value)
        body = json.dumps(document).encode()
        connection.putheader("Content-Length", len(body))
        connection.endheaders(body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        return answer

    for name in names:
        ask("PUT", f"/{name}", {})
    for _ in range(4):  # at any process
        assert ask("POST", "/heartbeat", {"ids": [*names, "else"]})["unknown"] == ["else"]
        assert sorted(row["session"] for row in ask("GET", "", {})["sessions"]) == names


def test_lists_hold_what_all_processes_know(rig: Rig):
    """Programs, calls, engines: asked anywhere, the same."""
    sessions = {session_of(owner, "list") for owner in OWNERS}
    for session in sessions:
        assert rig.call(session).status == 200
    for _ in range(3):
        document = rig.server.ask("GET", f"{API}/programs").json
        assert sessions <= {row["session"] for row in document["programs"]}
        assert document["programs_total"] == len(document["programs"])
        assert document["table"]["calls_begun"] >= 2
        calls = rig.server.ask("GET", f"{API}/calls?limit=3").json["calls"]
        assert len(calls) == 3
        assert calls == sorted(calls, key=lambda row: -row["begun_s"])
        for call in calls:
            owner = owner_of_id(call["program_id"], COUNT)
            assert call["status"] == 200
            assert owner_of_id(call["call"], COUNT) == owner
            told = rig.server.ask("GET", f"{API}/calls/{call['call']}")
            assert told.json["call"] == call["call"]
        engines = rig.server.ask("GET", f"{API}/engines").json["engines"]
        assert [row["engine"] for row in engines] == ["r0"]
    assert rig.server.ask("GET", f"{API}/calls/{'0' * 24}").status == 404


def test_a_stored_response_is_found_from_any_process(rig: Rig):
    """It is asked for by its id, gone on with by another program, and by one without a name."""
    for owner in OWNERS:
        session, other = session_of(owner, "stored"), session_of(1 - owner, "goes-on")
        assert rig.call(session, "/v1/responses").status == 200
        response = rig.engine.seen[-1].body["request_id"]
        for _ in range(3):
            assert rig.server.ask("GET", f"/v1/responses/{response}").status == 200
            on = {"model": "m", "input": "more", "previous_response_id": response}
            assert rig.server.ask("POST", "/v1/responses", on, tagged(other)).status == 200
            assert rig.server.ask("POST", "/v1/responses", on).status == 200
        assert rig.row(session)["calls"] == 4, "a call without a name is the stored one's program's"
        assert rig.sessions_at(1 - owner)[other] == 3
    assert rig.server.ask("GET", "/v1/responses/resp_nobody").status == 404


def test_the_admin_site_knows_all_processes(rig: Rig):
    """Its lists are everybody's; its metrics have a label that says whose each is."""
    for owner in OWNERS:
        assert rig.call(session_of(owner, "admin")).status == 200
    text = rig.admin("/metrics").body.decode()
    for name in ("0", "1", "pool"):
        assert f'autellix_calls_begun_total{{gateway="{name}"}}' in text
    assert 'autellix_engine_state{gateway="pool",engine="r0",state="ready"} 1' in text
    assert 'autellix_engine_state{gateway="0"' not in text
    status = rig.admin(f"{API}/admin/status").json
    assert status["programs"] == rig.admin(f"{API}/programs").json["programs_total"] > 1
    assert status["calls_in_flight"] == 0
    call = rig.admin(f"{API}/calls").json["calls"][0]["call"]
    assert rig.admin(f"{API}/calls/{call}").json["call"] == call


def test_programs_are_shown_in_a_terminal(rig: Rig, capsys, monkeypatch: pytest.MonkeyPatch):
    """All of them in one list, the newest first, and each with its calls."""
    sessions = [session_of(owner, "shown") for owner in (0, 1)]
    for session in sessions:
        assert rig.call(session).status == 200
    found = re.search(r"admin site on (\S+),", rig.log())
    assert found is not None
    monkeypatch.setenv(ENV_URL, found[1])
    monkeypatch.setenv(ENV_KEY, (rig.folder / "admin-key").read_text().strip())
    assert views_cli.programs(["--json", "--limit", "100"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in document["programs"]]
    assert set(sessions) <= set(names)
    assert document["total"] == rig.admin(f"{API}/programs").json["programs_total"]
    newest = rig.admin("/dashboard/programs?limit=2").json["programs"]
    assert [row["name"] for row in newest] == sessions[::-1]
    for session in sessions:
        assert views_cli.show([session, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["program"]["session"], len(shown["calls"])) == (session, 1)
    assert views_cli.show(["nobody"]) == 2
    assert "is not in the table" in capsys.readouterr().err


def test_what_siblings_ask_is_nobody_elses(rig: Rig):
    """Neither their routes nor their word for an admin work from outside."""
    for _ in range(4):
        assert rig.server.ask("GET", f"{API}/internal/metrics").status == 404
        assert rig.server.ask("GET", f"{API}/internal/homes/x").status == 404
        assert rig.server.ask("GET", f"{API}/admin/status").status == 404
        assert rig.server.ask("GET", "/dashboard/programs").status == 404


def test_more_than_one_request_at_a_time_on_a_connection(rig: Rig):
    """Requests that are sent ahead are answered in their order, whoever owns them."""
    sessions = [session_of(owner, "ahead") for owner in (0, 1, 1, 0, 1, 0)]
    connection = rig.connection()
    connection.http.connect()
    body = json.dumps(chat()).encode()
    connection.http.sock.sendall(
        b"".join(
            b"POST %s HTTP/1.1\r\nhost: x\r\nx-autellix-session: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (CHAT.encode(), session.encode(), len(body), body)
            for session in sessions
        )
    )
    reader = connection.http.sock.makefile("rb")
    for _ in sessions:
        assert reader.readline().startswith(b"HTTP/1.1 200")
        length = 0
        while (line := reader.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        assert len(reader.read(length)) == length > 0
    connection.close()
    for owner in OWNERS:
        assert rig.sessions_at(owner)[session_of(owner, "ahead")] == 3

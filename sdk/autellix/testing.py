"""For tests of agents: a server that speaks the OpenAI API and records what each call carried.

As a pytest plugin (``pytest_plugins = ["autellix.testing"]``) it gives the fixture
``autellix_server``. Without pytest: ``with FakeServer() as server``. It listens on loopback only.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, NamedTuple

from . import wire

RECORDS_MAX: Final = 100_000
BODY_BYTES_MAX: Final = 64 * 1024 * 1024


class RecordedCall(NamedTuple):
    """One call of a model, as it arrived."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]  # lower-case names
    order: int  # of arrival

    @property
    def session(self) -> str | None:
        """The session that it carried."""
        return self.headers.get(wire.SESSION.lower())

    @property
    def thread(self) -> int | None:
        """The logical thread that it carried."""
        return wire.parse_number(self.headers.get(wire.THREAD.lower(), ""))

    @property
    def seq(self) -> int | None:
        """Its number in its thread."""
        return wire.parse_number(self.headers.get(wire.SEQ.lower(), ""))

    @property
    def parent(self) -> wire.ParentCall | None:
        """The point where its thread was forked."""
        return self.parents[0] if self.parents else None

    @property
    def parents(self) -> tuple[wire.ParentCall, ...]:
        """That point, and those of the other threads that its thread comes after."""
        return wire.parse_parents(self.headers.get(wire.PARENT.lower(), ""))

    @property
    def call(self) -> str | None:
        """The id that all attempts of it share."""
        return self.headers.get(wire.CALL.lower())

    @property
    def node(self) -> str | None:
        """Its label."""
        return self.headers.get(wire.NODE.lower())

    @property
    def source(self) -> str | None:
        """How the session was found: ctx, process, single or late."""
        client = self.headers.get(wire.CLIENT.lower(), "")
        return client.partition("src=")[2] or None

    @property
    def text(self) -> str:
        """The last thing that was said to the model."""
        messages = self.body.get("messages") or [{}]
        said = messages[-1].get("content") if isinstance(messages, list) else None
        if isinstance(said, list):
            said = "".join(part.get("text", "") for part in said)
        return str(said or self.body.get("prompt") or self.body.get("input") or "")


class SessionEvent(NamedTuple):
    """One session message, as it arrived."""

    method: str
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def session(self) -> str:
        """The session that it is about."""
        return (
            self.path.partition("?")[0].removeprefix(f"{wire.API_PREFIX}/sessions/").split("/")[0]
        )


class FakeServer:
    """An OpenAI-compatible server with canned answers, on a port of its own.

    Args:
        sessions: Whether it knows sessions, as an autellix server does, or answers 404.
        lease_s: The lease it grants.
    """

    def __init__(self, *, sessions: bool = True, lease_s: float = 60.0) -> None:
        self.sessions = sessions
        self.lease_s = lease_s
        self.calls: deque[RecordedCall] = deque(maxlen=RECORDS_MAX)
        self.events: deque[SessionEvent] = deque(maxlen=RECORDS_MAX)
        #: Arrivals of calls and the ends of their answers, in order: what a server sees of a DAG.
        self.history: deque[tuple[str, RecordedCall]] = deque(maxlen=2 * RECORDS_MAX)
        self.unknown: set[str] = set()  # sessions it pretends to have forgotten
        self.status_next: deque[int] = deque()  # answered instead, one per request
        self.session_status: int | None = None  # answered to every session message
        self.tool_calls_next: deque[list[tuple[str, dict[str, Any]]]] = deque()
        self.answers: dict[str, Any] = {}  # text → what is answered to it
        self.gates: dict[str, threading.Event] = {}  # text → answered only once it is set
        self._together: dict[str, frozenset[str]] = {}
        self._arrived = threading.Condition()
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.fake = self
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="fake-openai", daemon=True
        )

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"{self.url}/v1"

    def start(self) -> FakeServer:
        """Begin to listen."""
        from .threads import start_plain

        start_plain(self._thread)
        return self

    def stop(self) -> None:
        """End the server and its threads."""
        for gate in self.gates.values():
            gate.set()
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join(5)
        self._http.server_close()

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def clear(self) -> None:
        """Forget what arrived."""
        self.calls.clear()
        self.events.clear()
        self.history.clear()

    def wait_for(self, *, calls: int = 0, events: int = 0, timeout_s: float = 5.0) -> None:
        """Return once that many calls and session messages have arrived.

        Raises:
            TimeoutError: They have not.
        """
        with self._arrived:
            done = self._arrived.wait_for(
                lambda: len(self.calls) >= calls and len(self.events) >= events, timeout_s
            )
        if not done:
            raise TimeoutError(f"{len(self.calls)} calls, {len(self.events)} events arrived")

    def wait_event(self, method: str, session: str = "", timeout_s: float = 5.0) -> SessionEvent:
        """Return the first session message of this kind, once it has arrived.

        Raises:
            TimeoutError: It has not.
        """

        def first() -> SessionEvent | None:
            return next((e for e in self.events if e.method == method and session in e.path), None)

        with self._arrived:
            found = self._arrived.wait_for(first, timeout_s)
        if found is None:
            raise TimeoutError(f"no {method} for {session or 'any session'}: {list(self.events)}")
        return found

    def together(self, *texts: str) -> None:
        """Answer none of these calls before all of them have arrived; for tests of concurrency."""
        self._together.update(dict.fromkeys(texts, frozenset(texts)))

    def wait_for_others(self, text: str, timeout_s: float = 10.0) -> None:
        """Return once the calls that go together with this one are there; the handler does this."""
        group = self._together.get(text)
        if group is None:
            return
        with self._arrived:
            self._arrived.wait_for(lambda: group <= {c.text for c in self.calls}, timeout_s)

    def note_call(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> RecordedCall:
        """Record a call; the handler does this."""
        with self._arrived:
            call = RecordedCall(path, body, headers, len(self.calls))
            self.calls.append(call)
            self.history.append(("begin", call))
            self._arrived.notify_all()
        return call

    def note_answer(self, call: RecordedCall) -> None:
        """Record that the last of an answer is about to be sent; the handler does this."""
        with self._arrived:
            self.history.append(("end", call))

    def note_event(self, event: SessionEvent) -> None:
        """Record a session message; the handler does this."""
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()


class _Server(ThreadingHTTPServer):
    fake: FakeServer
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer what a client asks about the server."""
        if self.path.startswith(wire.API_PREFIX):
            self._session_message()
        else:
            self._json(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})

    def do_PUT(self) -> None:
        """Open a session."""
        self._session_message()

    def do_DELETE(self) -> None:
        """End a session."""
        self._session_message()

    def do_POST(self) -> None:
        """Answer a call, or a session message."""
        if self.path.startswith(wire.API_PREFIX):
            self._session_message()
            return
        fake, body = self.server.fake, self._body()
        call = RecordedCall(self.path, body, {}, 0)
        if wire.is_call_target(self.path.encode()):
            headers = {k.lower(): v for k, v in self.headers.items()}
            call = fake.note_call(self.path, body, headers)
        fake.wait_for_others(call.text)
        gate = fake.gates.get(call.text)
        if gate is not None:
            gate.wait(30)
        status = fake.status_next.popleft() if fake.status_next else 200
        if status != 200:
            self._json(status, {"error": {"message": "as told", "type": "fake", "code": status}})
            return
        from .canned import answer_to

        answer = fake.answers.get(call.text, f"echo: {call.text}")
        tools = fake.tool_calls_next.popleft() if _takes_tools(fake, body) else []
        reply = answer_to(self.path, body, str(answer), tools)
        fake.note_answer(call)
        if isinstance(reply, list):
            self._stream(reply)
        else:
            self._json(200, reply)

    def _session_message(self) -> None:
        fake = self.server.fake
        headers = {k.lower(): v for k, v in self.headers.items()}
        body = self._body()
        fake.note_event(SessionEvent(self.command, self.path, body, headers))
        if fake.session_status is not None or not fake.sessions:
            self._json(fake.session_status or 404, {"error": {"message": "no sessions"}})
        elif self.command == "DELETE":
            self.send_response(204)
            self.end_headers()
        elif self.path.endswith("/heartbeat"):
            unknown = [id for id in body.get("ids", ()) if id in fake.unknown]
            fake.unknown.difference_update(unknown)
            self._json(200, {"lease_s": fake.lease_s, "unknown": unknown})
        elif self.path.endswith("/info"):
            self._json(200, {"version": 1, "lease_s": fake.lease_s})
        else:
            self._json(200, {"lease_s": fake.lease_s})

    def _body(self) -> dict[str, Any]:
        length = min(int(self.headers.get("content-length") or 0), BODY_BYTES_MAX)
        try:
            body = json.loads(self.rfile.read(length)) if length else {}
        except ValueError:
            body = {}
        return body if isinstance(body, dict) else {}

    def _json(self, status: int, reply: Any) -> None:
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header(wire.VERSION, str(wire.PROTOCOL_VERSION))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: list[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            data = chunk.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def _takes_tools(fake: FakeServer, body: dict[str, Any]) -> bool:
    return bool(fake.tool_calls_next and body.get("tools"))


if "pytest" in sys.modules:
    import pytest

    @pytest.fixture
    def autellix_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
        """A fake server that the OpenAI client finds by itself; the SDK is fresh for the test."""
        from . import client, runtime
        from .arming import arm
        from .config import from_environment
        from .context import scope_var

        for name in [n for n in os.environ if n.startswith("AUTELLIX_")]:
            monkeypatch.delenv(name)
        with FakeServer() as server:
            monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
            monkeypatch.setenv("OPENAI_API_KEY", "sk-fake")
            client.uninstall()
            runtime.set_runtime(runtime.Runtime(from_environment()))
            before = scope_var.get()
            scope_var.set(None)
            arm()
            try:
                yield server
            finally:
                client.shutdown(1.0)
                scope_var.set(before)
                client.uninstall()
                runtime.set_runtime(runtime.Runtime(from_environment()))
                arm()

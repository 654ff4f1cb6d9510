"""Fuzzing what reads strangers' bytes: the front, the identity resolver, the upstream connection.

What the front takes as a call is compared with what llhttp reads in the same bytes: two readers
that differ are how requests are smuggled.

Inputs are made from well-formed ones by cutting, doubling, swapping and flipping, from a seed that
is printed, so that a failure can be had again. tests/gateway/test_upstream.py runs the same checks
on fewer inputs.

    python -m benchmarks.fuzz_gateway --inputs 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from typing import Any

import httptools

from autellix import wire
from autellix.server.gateway import front as front_module
from autellix.server.gateway.config import GatewayConfig
from autellix.server.gateway.front import ROUTES, Front
from autellix.server.gateway.keys import ANYBODY, Tenant
from autellix.server.gateway.passage import Passage
from autellix.server.gateway.upstream import Broken, Event, Upstream
from autellix.server.identity import FAMILIES, clean_body, resolve
from autellix.server.types import EngineAddress

OURS = b"X-Autellix-Version: 1\r\n"
CALL = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Autellix-Session: s\r\n"
    b"Content-Length: 14\r\nConnection: keep-alive\r\n\r\n" + b'{"model": "m"}'
)
CALLS = (
    CALL,
    CALL * 2,
    CALL.replace(b"chat/", b""),
    CALL + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n",
    CALL.replace(b"Connection: keep-alive", b"Transfer-Encoding: chunked"),
)
SEEDS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nhello, world",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\nRetry-After: 1\r\n"
    b"Content-Length: 2\r\nConnection: close\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'10\r\ndata: {"n": 1}\n\n\r\n0\r\n\r\n',
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
)
NAMES = [name.lower() for name in wire.REQUEST_HEADERS] + [
    name
    for family in FAMILIES
    if family.source == "headers"
    for name in (*family.session, *family.thread)
] + ["x-vllm-priority", "x-dynamo-request-priority", "x-stainless-retry-count"]  # fmt: skip
VALUES = ("run-1", "0", "0:3", "-1", "", "x" * 300, "é", "\udcff", "a b", "9" * 40, "\x00", "½")
FIELDS = ("session_id", "priority", "vllm_xargs", "nvext", "program_id", "prompt_cache_key")


class Sink:
    """A client's transport, or an engine's, that keeps what it is given."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closing = False

    def write(self, data: bytes) -> None:
        """Keep."""
        self.written += data

    def is_closing(self) -> bool:
        """Return whether it is closed."""
        return self.closing

    def abort(self) -> None:
        """Close."""
        self.closing = True

    def get_write_buffer_size(self) -> int:
        """Return that it is empty."""
        return 0


def mutate(chance: random.Random, data: bytes) -> bytes:
    """Return a spoiled copy."""
    for _ in range(chance.randrange(4)):
        at, to = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
        match chance.randrange(5):
            case 0:
                data = data[:at] + data[to:]
            case 1:
                data = data[:to] + data[at:to] + data[to:]
            case 2:
                data = data[:at] + chance.randbytes(chance.randrange(6)) + data[at:]
            case 3:
                data = data[:at] + chance.choice((b"\r\n", b"\n", b"\r\n\r\n", b"\0")) + data[to:]
            case _:
                data = data + chance.choice(SEEDS)[: chance.randrange(40)]
    return data


async def fuzz_upstream(chance: random.Random) -> None:
    """Feed one spoiled answer in random pieces."""
    upstream = Upstream(EngineAddress("x", "", 0))
    engine, client = Sink(), Sink()
    as_any: Any = engine
    upstream.connection_made(as_any)
    to_client: Any = client
    upstream.send(b"", to_client, OURS, dechunk=chance.random() < 0.2)
    data = mutate(chance, chance.choice(SEEDS))
    while data and not engine.closing:
        size = chance.randrange(1, len(data) + 1)
        upstream.data_received(data[:size])
        data = data[size:]
    upstream.connection_lost(None)
    broken = None
    try:
        assert await upstream.wait() is Event.DONE
    except Broken as error:
        broken = error
    head_sent = broken is None or broken.head_sent
    assert head_sent == client.written.startswith(b"HTTP/1."), "the client has seen another head"
    assert client.written.count(OURS) <= 1, "two heads"


class Listener:
    """What a front needs of its server; notes what is handed over."""

    def __init__(self) -> None:
        self.fronts: set[Front] = set()
        self.routes = {f"POST {path} HTTP/1.1".encode(): path for path in ROUTES}
        self.gateway: Any = self
        self.config = GatewayConfig()
        self.handed = b""
        self.transport: Any = None

    def authenticate(self, _: object) -> tuple[Tenant, str]:
        """Let everybody in."""
        return ANYBODY, ""

    def make_connection(self) -> Any:
        """Return itself as the protocol that goes on."""
        return self

    def connection_made(self, _: object) -> None:
        """Nothing to do."""

    def data_received(self, data: bytes) -> None:
        """Keep what comes after the last call of the front."""
        self.handed += data

    def connection_opened(self) -> bool:
        """There is room."""
        return True

    def connection_closed(self) -> None:
        """Nothing to do."""


class Client(Sink):
    """A client's transport that can be handed over."""

    def set_protocol(self, _: object) -> None:
        """Nothing to do."""

    def set_write_buffer_limits(self, **_: int) -> None:
        """Nothing to do."""

    def get_extra_info(self, _: str) -> None:
        """It has no socket."""

    def pause_reading(self) -> None:
        """Nothing to do."""

    resume_reading = pause_reading
    close = Sink.abort


class Reference:
    """The requests that llhttp reads."""

    def __init__(self, data: bytes) -> None:
        self.read: list[tuple[bytes, dict[str, str], bytes]] = []
        self._parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._url, self._headers, self._body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        """Keep."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep."""
        text = value.strip(b" \t").decode("utf-8", "surrogateescape")
        self._headers[name.decode("latin-1").lower()] = text

    def on_body(self, body: bytes) -> None:
        """Keep."""
        self._body += body

    def on_message_complete(self) -> None:
        """Keep the request."""
        self.read.append((self._url, self._headers, self._body))


async def fuzz_front(chance: random.Random) -> None:
    """Feed spoiled calls in random pieces; what is taken is what llhttp takes."""
    taken: list[tuple[bytes, dict[str, str], bytes]] = []

    async def relayed(request: Any, _tenant: object, _scope: str, body: bytes) -> Passage:
        taken.append((request.target.encode(), request.headers, body))
        return Passage(200, keep_alive=True)

    front_module.relay = relayed
    listener: Any = Listener()
    front, client = Front(listener, asyncio.get_running_loop()), Client()
    as_any: Any = client
    front.connection_made(as_any)
    whole = left = mutate(chance, chance.choice(CALLS))
    while left and not client.closing:
        size = chance.randrange(1, len(left) + 1)
        if listener.handed:
            listener.data_received(left[:size])
        else:
            front.data_received(left[:size])
        left = left[size:]
        while front.call is not None:
            await front.call
    front.connection_lost(None)
    wanted = Reference(whole).read
    assert taken == wanted[: len(taken)], "llhttp reads something else"
    if listener.handed:
        assert whole.endswith(listener.handed), "what is handed over is not what came"


def fuzz_identity(chance: random.Random) -> None:
    """Resolve one random set of headers and fields."""
    headers = {
        chance.choice(NAMES): chance.choice(VALUES)
        if chance.random() < 0.8
        else "".join(chr(chance.randrange(1, 0x3000)) for _ in range(chance.randrange(9)))
        for _ in range(chance.randrange(6))
    }
    body: dict[str, Any] = {}
    for _ in range(chance.randrange(4)):
        value: Any = chance.choice((None, True, 10**30, -5, 1.5, [], *VALUES))
        for _ in range(chance.randrange(3)):
            value = {chance.choice(("session_id", "agent_context", "agent_hints")): value}
        body[chance.choice(FIELDS)] = value
    identity = resolve(headers, body, "")
    session = identity.arrival.session
    assert session is None or 0 < len(session.encode()) <= 256, "a session out of bounds"
    assert identity.handicap_ms >= 0, "a client got ahead"
    clean_body(body)
    assert "session_id" not in body, "an engine field is left"


async def run(inputs: int, seed: int) -> None:
    """Run that many inputs, a third of each kind."""
    start_s = said_s = time.monotonic()
    for number in range(inputs):
        chance = random.Random(seed * 1_000_003 + number)
        try:
            if number % 3 == 0:
                fuzz_identity(chance)
            elif number % 3 == 1:
                await fuzz_upstream(chance)
            else:
                await fuzz_front(chance)
        except Exception:
            print(f"input {number} of seed {seed} fails")
            raise
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            print(f"{number} inputs, {said_s - start_s:.0f} s", flush=True)
    print(f"{inputs} inputs of seed {seed}, no failure, {time.monotonic() - start_s:.0f} s")


def main() -> int:
    """Fuzz; an exception is a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(run(options.inputs, options.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

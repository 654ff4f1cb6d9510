"""The relay: one call from the client's request to the last byte of the engine's answer.

Every call passes `_fly`: it is begun in the table, counted against the limits, and, however it
goes, ended there once. A client that hangs up cancels the handler (see `app.make_runner`), which
closes the engine's connection, which cancels the call in the engine; it makes no difference whether
the answer is streamed or whether a byte of it has been sent.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from autellix import wire

from .. import call_tag, types
from ..identity import Identity, clean_body, resolve
from ..process_table import TableFull
from ..program import Call
from .errors import ApiError, Busy, EngineBroken, NoEngine, NotFound, Superseded
from .keys import Tenant
from .request import build_request, parse_body, prompt_tokens_of, read_body
from .responses import ResponseHome
from .state import GATEWAY, Flight, Gateway, lower_headers
from .upstream import Broken, ClientGone, Event, Upstream

_OURS: Final = (
    f"{wire.VERSION}: {wire.PROTOCOL_VERSION}\r\n{wire.LEASE}: %d\r\n"
    "X-Autellix-Program: %s\r\nX-Autellix-Family: %s\r\nX-Autellix-Engine: %s\r\n"
)


class Asked(NamedTuple):
    """What a client asks for, read and checked."""

    tenant: Tenant
    identity: Identity
    document: dict[str, Any]  # empty if the body is a form
    body: bytes
    edited: bool  # whether ``document`` differs from ``body``


class Passed(web.StreamResponse):
    """An answer whose bytes have already gone to the client's transport."""

    def __init__(self, status: int, *, keep_alive: bool) -> None:
        super().__init__(status=status or 502)
        self._passed_keep_alive = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the client's connection goes on."""
        return self._passed_keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Send nothing: it is sent."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Send nothing: it is sent."""


async def relay_call(request: web.Request) -> web.StreamResponse:
    """Relay a call of a model."""
    gateway = request.app[GATEWAY]
    config = gateway.config
    headers = lower_headers(request)
    tenant, scope = gateway.authenticate(headers)
    body = await read_body(request, config.body_bytes_max, config.slow_body_s)
    form = headers.get("content-type", "").startswith("multipart/")
    document: dict[str, Any] = {} if form else parse_body(body)
    identity = resolve(headers, document, scope)
    identity = _rooted(gateway, identity, document, scope)
    for name in identity.malformed:
        gateway.count(f"malformed {name}")
    edited = clean_body(document)
    return await _fly(gateway, request, Asked(tenant, identity, document, body, edited))


async def relay_plain(request: web.Request) -> web.StreamResponse:
    """Relay a request that is no call: models, tokenizing."""
    gateway = request.app[GATEWAY]
    gateway.authenticate(lower_headers(request))
    body = await read_body(request, gateway.config.body_bytes_max, gateway.config.slow_body_s)
    tried: set[str] = set()
    while True:
        engine = next((e for e in gateway.ready() if e.engine_id not in tried), None)
        if engine is None:
            raise _no_engine(gateway, tried)
        tried.add(engine.engine_id)
        upstream = await _connect(gateway, engine)
        if upstream is None:
            continue
        payload = build_request(request, engine, body, ())
        return await _pass(gateway, request, engine, upstream, payload, _version_head(gateway))


async def relay_stored(request: web.Request) -> web.StreamResponse:
    """Relay a request about a stored response to the engine that holds it."""
    gateway = request.app[GATEWAY]
    _, scope = gateway.authenticate(lower_headers(request))
    response_id = request.match_info["response_id"]
    body = await read_body(request, gateway.config.body_bytes_max, gateway.config.slow_body_s)
    engine = _holder(gateway, response_id, scope)
    upstream = await _connect(gateway, engine)
    if upstream is None:
        raise EngineBroken(f"engine {engine.engine_id} does not accept connections")
    payload = build_request(request, engine, body, ())
    return await _pass(gateway, request, engine, upstream, payload, _version_head(gateway))


async def _fly(gateway: Gateway, request: web.Request, asked: Asked) -> web.StreamResponse:
    scope = asked.identity.arrival.scope
    _admit(gateway, scope)
    try:
        call, earlier = gateway.table.begin_call(
            asked.identity.arrival, secrets.token_hex(12), gateway.clock.now_s()
        )
    except TableFull as error:
        gateway.count("refused table")
        raise Busy(f"the process table is full: {error}") from None
    flight = gateway.flights[call.call_id] = Flight(scope)
    gateway.flights_by_scope[scope] = gateway.flights_by_scope.get(scope, 0) + 1
    if earlier is not None:
        _supersede(gateway, earlier)
    completed = False
    try:
        response = await _try_engines(gateway, request, asked, call, flight)
        completed = response.status < 400
        return response
    finally:
        gateway.table.end_call(call, gateway.clock.now_s(), completed=completed)
        del gateway.flights[call.call_id]
        left = gateway.flights_by_scope[scope] - 1
        if left:
            gateway.flights_by_scope[scope] = left
        else:
            del gateway.flights_by_scope[scope]


async def _try_engines(
    gateway: Gateway, request: web.Request, asked: Asked, call: Call, flight: Flight
) -> web.StreamResponse:
    """Send the call to an engine; to another only if the first one took no byte of it."""
    document, program = asked.document, call.program
    tag = _tag_of(call)
    body = asked.body
    stored = request.path == "/v1/responses"
    if stored:  # vLLM takes no other id for these, see docs/wire.md
        document["request_id"] = f"resp_{tag}"
    previous = document.get("previous_response_id") if stored else None
    if asked.edited or stored:
        body = orjson.dumps(document)
    info = _info_of(gateway, request, document, body, call)
    ours = _orders(gateway, asked, call, tag)
    tried: set[str] = set()
    while True:
        ready = [e for e in _candidates(gateway, previous, call) if e.engine_id not in tried]
        if not ready:
            raise _no_engine(gateway, tried)
        engine = gateway.place(info, ready)
        tried.add(engine.engine_id)
        gateway.table.dispatch(call, engine.engine_id)
        upstream = await _connect(gateway, engine)
        if flight.superseded:
            if upstream is not None:
                upstream.abort()
            raise Superseded("call: a retry of it has taken its place")
        if upstream is None:
            continue
        flight.upstream = upstream
        if stored:
            gateway.homes.put(
                f"resp_{tag}",
                ResponseHome(engine.engine_id, engine.address, program.scope, program.session),
            )
        payload = build_request(request, engine, body, ours)
        head = _call_head(gateway, asked.identity, call, engine)
        try:
            return await _pass(gateway, request, engine, upstream, payload, head)
        except EngineBroken:
            if flight.superseded:
                raise Superseded("call: a retry of it has taken its place") from None
            raise


def _tag_of(call: Call) -> str:
    program = call.program
    return call_tag.format_call(
        call_tag.CallTag(
            call.call_id,
            min(call.key.thread, 999_999_999),
            int(program.wait_s * 1000),
            # of a program older than this machine's clock, from the journal, it is below nought
            max(0, int(program.arrival_s * 1000)),
        )
    )


def _info_of(
    gateway: Gateway, request: web.Request, document: dict[str, Any], body: bytes, call: Call
) -> types.CallInfo:
    model = document.get("model")
    return types.CallInfo(
        call_id=call.call_id,
        program_id=call.program.program_id,
        thread=call.key.thread,
        path=request.path,
        model=model if isinstance(model, str) else None,
        prompt_bytes=len(body),
        prompt_tokens=prompt_tokens_of(document),
        home=call.program.home,
        loads=gateway.table.loads(),
    )


def _candidates(gateway: Gateway, previous: object, call: Call) -> list[types.Engine]:
    """Return the engines that may get a call; only one does if it goes on a stored response."""
    if isinstance(previous, str):
        return [_holder(gateway, previous, call.program.scope)]
    return gateway.ready()


async def _pass(
    gateway: Gateway,
    request: web.Request,
    engine: types.Engine,
    upstream: Upstream,
    payload: bytes,
    head: bytes,
) -> web.StreamResponse:
    """Send a request and pass its answer to the client; the connection is given back."""
    sink = request.transport
    if sink is None:
        upstream.abort()
        raise ConnectionResetError("the client has gone")
    keep_alive = request.keep_alive and request.version >= (1, 1)
    if not keep_alive:
        head += b"Connection: close\r\n"
    try:
        upstream.send(payload, sink, head, dechunk=request.version < (1, 1))
        while await upstream.wait() is Event.CLIENT_FULL:
            async with asyncio.timeout(gateway.config.slow_client_s):
                await request.writer.drain()
            upstream.go_on()
    except Broken as error:
        gateway.engines.note_failure(engine.engine_id)
        gateway.count("engine died")
        if not error.head_sent:
            raise EngineBroken(f"engine {engine.engine_id} died under the call: {error}") from None
        sink.abort()  # no second status line: the client must see that the answer is cut off
        return Passed(502, keep_alive=False)
    except ClientGone:
        return Passed(499, keep_alive=False)
    except TimeoutError:
        gateway.count("client too slow")
        sink.abort()
        return Passed(499, keep_alive=False)
    finally:
        gateway.connections.release(upstream)
    return Passed(upstream.status, keep_alive=keep_alive)


async def _connect(gateway: Gateway, engine: types.Engine) -> Upstream | None:
    """Return a connection, or None if the engine takes none; nothing was sent then."""
    try:
        return await gateway.connections.acquire(engine.address)
    except (OSError, TimeoutError):
        gateway.count("engine refused")
        gateway.engines.note_failure(engine.engine_id)
        return None


def _admit(gateway: Gateway, scope: str) -> None:
    config = gateway.config
    if len(gateway.flights) >= config.calls_max:
        gateway.count("refused calls")
        raise Busy(f"{config.calls_max} calls are in flight, which is the most this server takes")
    if gateway.flights_by_scope.get(scope, 0) >= config.calls_per_key_max:
        gateway.count("refused key")
        raise Busy(f"{config.calls_per_key_max} calls of this API key are in flight, its limit")


def _supersede(gateway: Gateway, earlier: Call) -> None:
    flight = gateway.flights.get(earlier.call_id)
    if flight is not None:
        flight.superseded = True
        if flight.upstream is not None:
            flight.upstream.break_off("superseded by a retry")


def _orders(
    gateway: Gateway, asked: Asked, call: Call, tag: str
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that only the gateway may set."""
    priority = 0
    if gateway.config.policy != "fcfs":
        service_ms = int(call.program.account.service_s * 1000)
        priority = service_ms + asked.identity.handicap_ms + asked.tenant.handicap_ms
    session = call_tag.seal_program(call.program.program_id, gateway.key)
    return (
        (b"x-session-id", session.encode()),
        (b"x-vllm-priority", b"%d" % min(priority, call_tag.PRIORITY_MAX)),
        (b"x-request-id", tag.encode()),
    )


def _rooted(gateway: Gateway, identity: Identity, document: dict[str, Any], scope: str) -> Identity:
    """Return an untagged call that goes on a stored response as a call of that one's session."""
    previous = document.get("previous_response_id")
    if identity.family is not None or not isinstance(previous, str):
        return identity
    home = gateway.homes.get(previous, scope)
    if home is None:
        return identity
    # vLLM gives each turn a new id; the session is named after the first of the chain
    session = home.program_session or f"response:{previous}"
    return identity._replace(
        family="previous_response_id", arrival=identity.arrival._replace(session=session)
    )


def _holder(gateway: Gateway, response_id: str, scope: str) -> types.Engine:
    home = gateway.homes.get(response_id, scope)
    if home is not None:
        for engine in gateway.ready():
            if engine.engine_id == home.engine_id and engine.address == home.address:
                return engine
    raise NotFound(
        f"response_id: {response_id[:128]!r} is not held by any engine; it was never made with "
        "this key, or its engine is gone",
        param="response_id",
    )


def _no_engine(gateway: Gateway, tried: set[str]) -> ApiError:
    if tried:
        return EngineBroken(f"no engine accepts connections; tried {', '.join(sorted(tried))}")
    states = ", ".join(f"{e.engine_id} is {e.state.value}" for e in gateway.engines.all())
    gateway.count("no engine")
    return NoEngine(f"no engine is ready: {states or 'there is none'}")


def _version_head(gateway: Gateway) -> bytes:
    return (
        f"{wire.VERSION}: {wire.PROTOCOL_VERSION}\r\n{wire.LEASE}: {gateway.config.lease_s:.0f}\r\n"
    ).encode()


def _call_head(gateway: Gateway, identity: Identity, call: Call, engine: types.Engine) -> bytes:
    head = _OURS % (
        gateway.config.lease_s,
        call.program.program_id,
        identity.family or "untagged",
        engine.engine_id,
    )
    if identity.malformed:
        head += f"X-Autellix-Ignored: {', '.join(identity.malformed)}\r\n"
    return head.encode()

"""The relay: one call from the client's request to the last byte of the engine's answer.

Every call passes `_fly`: it is begun in the table, counted against the limits, and, however it
goes, ended there once. A client that hangs up cancels the handler (see `app.make_runner`), which
closes the engine's connection, which cancels the call in the engine; it makes no difference whether
the answer is streamed or whether a byte of it has been sent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from aiohttp import web

from autellix import wire

from .. import call_tag, types
from ..call_log import CallRecord
from ..identity import OPENER, Identity, clean_body, resolve
from ..process_table import TableFull
from ..program import Call
from ..receipts import ASK_LOWER, CALL_ID
from ..tracing import Tracer
from .book import Receipt
from .errors import ApiError, Busy, EngineBroken, NoEngine, NotFound, Superseded
from .keys import Tenant
from .models import answer_merged
from .passage import Passage, Passed
from .request import (
    ClientRequest,
    Line,
    build_request,
    encode_body,
    parse_body,
    prompt_tokens_of,
    read_body,
)  # fmt: skip
from .responses import ResponseHome
from .state import Flight, Gateway
from .upstream import Broken, ClientGone, Event, Upstream

_TRACE: Final = "traceparent"
_OURS: Final = (
    f"{wire.VERSION}: {wire.PROTOCOL_VERSION}\r\n{wire.LEASE}: %d\r\n"
    "X-Autellix-Program: %s\r\nX-Autellix-Family: %s\r\nX-Autellix-Engine: %s\r\n"
    f"{CALL_ID}: %s\r\n"
)


class Asked(NamedTuple):
    """What a client asks for, read and checked."""

    tenant: Tenant
    identity: Identity
    document: dict[str, Any]  # empty if the body is a form
    body: bytes
    edited: bool  # whether ``document`` differs from ``body``
    wishes: str | None = None  # what the client says of its receipt


async def relay_call(request: web.Request) -> web.StreamResponse:
    """Relay a call of a model that aiohttp has read."""
    client = ClientRequest.of_web(request)
    tenant, scope = client.gateway.authenticate(client.headers)
    config = client.gateway.config
    body = await read_body(request, config.body_bytes_max, config.slow_body_s)
    return Passed(await relay(client, tenant, scope, body))


async def relay(client: ClientRequest, tenant: Tenant, scope: str, body: bytes) -> Passage:
    """Relay a call of a model.

    Args:
        client: The request.
        tenant: Whose it is.
        scope: Of its ids.
        body: All of it, decompressed.

    Raises:
        ApiError: what the client is told instead; not a byte was sent to it.
    """
    gateway = client.gateway
    form = client.headers.get("content-type", "").startswith("multipart/")
    document: dict[str, Any] = {} if form else parse_body(body)
    identity = resolve(client.headers, document, scope, infer=gateway.config.infer_sessions)
    identity = _rooted(gateway, identity, document, scope)
    if (siblings := gateway.siblings) is not None:
        if (owner := siblings.owner_of(identity, document)) is not None:
            return await siblings.forward(client, owner, body)
        if isinstance(previous := document.get("previous_response_id"), str):
            await siblings.find_home(gateway, previous, scope)
    for name in identity.malformed:
        gateway.count(f"malformed {name}")
    edited = clean_body(document)
    asked = Asked(tenant, identity, document, body, edited, client.headers.get(ASK_LOWER))
    return await _fly(gateway, client, asked)


async def relay_plain(request: web.Request) -> web.StreamResponse:
    """Relay a request that is no call: models, tokenizing."""
    client = ClientRequest.of_web(request)
    gateway = client.gateway
    gateway.authenticate(client.headers)
    body = await read_body(request, gateway.config.body_bytes_max, gateway.config.slow_body_s)
    if request.path == "/v1/models" and gateway.models.is_mixed:
        return answer_merged(gateway.models)
    model = _model_asked(request, body) if gateway.models.is_mixed else None
    tried: set[str] = set()
    while True:
        engine = next((e for e in gateway.ready(model) if e.engine_id not in tried), None)
        if engine is None:
            raise _no_engine(gateway, tried)
        tried.add(engine.engine_id)
        upstream = await _connect(gateway, engine)
        if upstream is None:
            continue
        payload = build_request(client, engine, body, ())
        head = _version_head(gateway)
        return Passed(await pass_answer(gateway, client, engine, upstream, payload, head))


def _model_asked(request: web.Request, body: bytes) -> object:
    """Return the model that a request which is no call is about."""
    if "model" in request.match_info:
        return request.match_info["model"]
    return parse_body(body).get("model") if body else None


async def relay_stored(request: web.Request) -> web.StreamResponse:
    """Relay a request about a stored response to the engine that holds it."""
    client = ClientRequest.of_web(request)
    gateway = client.gateway
    _, scope = gateway.authenticate(client.headers)
    response_id = request.match_info["response_id"]
    body = await read_body(request, gateway.config.body_bytes_max, gateway.config.slow_body_s)
    engine = _holder(gateway, response_id, scope)
    upstream = await _connect(gateway, engine)
    if upstream is None:
        raise EngineBroken(f"engine {engine.engine_id} does not accept connections")
    payload = build_request(client, engine, body, ())
    head = _version_head(gateway)
    return Passed(await pass_answer(gateway, client, engine, upstream, payload, head))


async def _fly(gateway: Gateway, request: ClientRequest, asked: Asked) -> Passage:
    scope = asked.identity.arrival.scope
    _admit(gateway, scope)
    try:
        call, earlier = gateway.table.begin_call(
            asked.identity.arrival, gateway.new_call_id(), gateway.clock.now_s()
        )
    except TableFull as error:
        gateway.count("refused table")
        raise Busy(f"the process table is full: {error}") from None
    flight = gateway.flights[call.call_id] = Flight(scope)
    gateway.flights_by_scope[scope] = gateway.flights_by_scope.get(scope, 0) + 1
    if earlier is not None:
        _supersede(gateway, earlier)
    if gateway.book is not None:
        flight.record = gateway.book.begin(
            call, asked.identity, request.path, asked.document, len(asked.body)
        )
        if gateway.book.tracer is not None:
            _trace(gateway.book.tracer, flight.record, request)
    completed = False
    status = 500  # unless we learn otherwise, it is a mistake of ours
    try:
        response = await _try_engines(gateway, request, asked, call, flight)
        status = response.status
        completed = status < 400
        return response
    except ApiError as error:
        status = error.status
        error.about = {"X-Autellix-Program": call.program.program_id, CALL_ID: call.call_id}
        raise
    except (asyncio.CancelledError, ConnectionError):
        status = 499  # the client has hung up
        raise
    finally:
        gateway.table.end_call(call, gateway.clock.now_s(), completed=completed)
        gateway.call_over(call.call_id)
        del gateway.flights[call.call_id]
        left = gateway.flights_by_scope[scope] - 1
        if left:
            gateway.flights_by_scope[scope] = left
        else:
            del gateway.flights_by_scope[scope]
        if gateway.book is not None and flight.record is not None:
            gateway.book.end(call, flight.record, flight.upstream, status)


async def _try_engines(
    gateway: Gateway, request: ClientRequest, asked: Asked, call: Call, flight: Flight
) -> Passage:
    """Send the call to an engine that takes it; once more elsewhere if that one dies silently.

    An engine that refuses the connection has seen nothing of the call, so any number of those are
    tried. One that died before its first byte may have worked on it: that is forgiven once, as a
    call that kills engines must not kill them all, and never for a background response, of which
    nobody knows how far it came.
    """
    document, program = asked.document, call.program
    attained = program.attained()
    tag = _tag_of(call, asked.tenant, attained.wait_s)
    body = asked.body
    stored = request.path == "/v1/responses"
    if stored:  # vLLM takes no other id for these, see docs/wire.md
        document["request_id"] = f"resp_{tag}"
    previous = document.get("previous_response_id") if stored else None
    if asked.edited or stored:
        body = encode_body(document)
    info = _info_of(gateway, request, document, body, call)
    ours = _orders(gateway, asked, call, tag, attained.service_s)
    tried: set[str] = set()
    died: EngineBroken | None = None
    while True:
        asked_s = gateway.clock.now_s()
        engine = _choose(gateway, info, previous, program.scope, tried, died)
        if gateway.book is not None and flight.record is not None:
            gateway.book.sent(flight.record, engine, info, tried, previous, asked_s)
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
        receipt = _receipt_of(gateway, asked, flight)
        try:
            return await pass_answer(gateway, request, engine, upstream, payload, head, receipt)
        except EngineBroken as error:
            if flight.superseded:
                raise Superseded("call: a retry of it has taken its place") from None
            if died is not None or not error.may_retry or (stored and document.get("background")):
                raise
            died = error
            gateway.count("retried elsewhere")


def _trace(tracer: Tracer, record: CallRecord, request: ClientRequest) -> None:
    """Give the engine the call's span as its context, in place of the client's."""
    context = tracer.begin(record, request.headers.get(_TRACE)).header
    line = Line(_TRACE, context, f"{_TRACE}: {context}\r\n".encode())
    request.lines = [*(kept for kept in request.lines if kept.name != _TRACE), line]


def _receipt_of(gateway: Gateway, asked: Asked, flight: Flight) -> Receipt | None:
    if gateway.book is None or flight.record is None:
        return None
    return gateway.book.receipt(flight.record, asked.wishes)


def _tag_of(call: Call, tenant: Tenant, wait_s: float) -> str:
    """Return what an engine is told of a call; a key with a handicap only lowers."""
    program, weight, deadline_s = call.program, call.program.weight, call.program.deadline_s
    if tenant.handicap_ms:
        weight, deadline_s = min(1.0, weight or 1.0), None
    return call_tag.format_call(
        call_tag.CallTag(
            call.call_id,
            min(call.key.thread, 999_999_999),
            int(wait_s * 1000),
            # of a program older than this machine's clock, from the journal, it is below nought
            max(0, int(program.arrival_s * 1000)),
            weight or 1.0,
            None if deadline_s is None else max(0, int(deadline_s * 1000)),
            program.kind,
            program.account.accounting == "atlas",
        )
    )


def _info_of(
    gateway: Gateway, request: ClientRequest, document: dict[str, Any], body: bytes, call: Call
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
        content=body,
    )


def _choose(
    gateway: Gateway,
    info: types.CallInfo,
    previous: object,
    scope: str,
    tried: set[str],
    died: EngineBroken | None,
) -> types.Engine:
    """Return the engine that gets a call next; only one may if it goes on a stored response."""
    ready = gateway.ready(info.model)
    if isinstance(previous, str) and died is not None:
        ready = []
    elif isinstance(previous, str):
        ready = [_holder(gateway, previous, scope)]
    ready = [engine for engine in ready if engine.engine_id not in tried]
    if not ready:
        raise died or _no_engine(gateway, tried)
    return gateway.place(info, ready)


async def pass_answer(
    gateway: Gateway,
    request: ClientRequest,
    engine: types.Engine,
    upstream: Upstream,
    payload: bytes,
    head: bytes,
    receipt: Receipt | None = None,
    who: str = "engine",  # as it is counted if it dies
) -> Passage:
    """Send a request and pass its answer to the client; the connection is given back."""
    sink = request.transport
    if not request.keep_alive:
        head += b"Connection: close\r\n"
    try:
        _send(request, upstream, payload, sink, head, receipt)
        while (event := await upstream.wait()) is not Event.DONE:
            if event is Event.HEAD_HELD:
                assert receipt is not None, "nobody else has heads held"
                await receipt.wait()
                upstream.release_head()
                continue
            async with asyncio.timeout(gateway.config.slow_client_s):
                await request.drain()
            upstream.go_on()
        if receipt is not None and upstream.is_open_ended:
            await receipt.wait()
            upstream.finish(receipt.comment())
    except Broken as error:
        gateway.engines.note_failure(engine.engine_id)
        gateway.count(f"{who} died")
        if not error.head_sent:
            broken = EngineBroken(f"engine {engine.engine_id} died under the call: {error}")
            broken.may_retry = error.by_engine
            raise broken from None
        sink.abort()  # no second status line: the client must see that the answer is cut off
        return Passage(502, keep_alive=False)
    except ClientGone:
        return Passage(499, keep_alive=False)
    except TimeoutError:
        gateway.count("client too slow")
        sink.abort()
        return Passage(499, keep_alive=False)
    finally:
        gateway.connections.release(upstream)
    return Passage(upstream.status, request.keep_alive and not upstream.ends_by_close)


def _send(
    request: ClientRequest,
    upstream: Upstream,
    payload: bytes,
    sink: asyncio.Transport,
    head: bytes,
    receipt: Receipt | None,
) -> None:
    """Send a request, and have the answer passed as the client wants its receipt."""
    if receipt is None:
        bodiless = request.method == "HEAD"
        upstream.send(payload, sink, head, dechunk=request.old, bodiless=bodiless)
        return
    full = receipt.is_full and not request.old
    streamed = receipt.record.streamed
    upstream.send(
        payload,
        sink,
        head,
        late_head=receipt.head,
        dechunk=request.old,
        hold_head=full and not streamed,
        append=full and streamed,
    )


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
    gateway: Gateway, asked: Asked, call: Call, tag: str, service_s: float
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that only the gateway may set."""
    priority = 0
    if gateway.config.policy != "fcfs":
        priority = int(service_s * 1000) + asked.identity.handicap_ms + asked.tenant.handicap_ms
    session = call_tag.seal_program(call.program.program_id, gateway.key)
    return (
        (b"x-session-id", session.encode()),
        (b"x-vllm-priority", b"%d" % min(priority, call_tag.PRIORITY_MAX)),
        (b"x-request-id", tag.encode()),
    )


def _rooted(gateway: Gateway, identity: Identity, document: dict[str, Any], scope: str) -> Identity:
    """Return an untagged call that goes on a stored response as a call of that one's session."""
    previous = document.get("previous_response_id")
    if identity.family not in (None, OPENER) or not isinstance(previous, str):
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
            if engine.address == home.address:
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
        call.call_id,
    )
    if identity.malformed:
        head += f"X-Autellix-Ignored: {', '.join(identity.malformed)}\r\n"
    return head.encode()

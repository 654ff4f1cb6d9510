"""Several gateway processes that are one gateway to a client.

Theory of operation. Each program is owned by one process, which follows from its id (see
`server.ownership`): its row in the table, its placement and its service are there and nowhere else.
A call whose head names a program of another process goes there with its connection (see `moving`),
unless that carries several programs' calls in turn. Any other request that is another's, since its
body says so, or since aiohttp has read it, is forwarded: to the owner's unix socket in the server's
private folder, where a process serves what the public socket serves. The answer is passed as an
engine's is, so a client that hangs up cancels the call there. A request that comes by the private
socket is never forwarded again.

What is about everybody's programs is asked of all processes and put together. The server's own
process, which owns the pool and the admin site, is one more of these: it owns no program.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from autellix import wire

from .. import metrics, types
from ..identity import OPENER, Identity
from ..ownership import RANGE, owned_digits, owner_of_id, owner_of_response, owner_of_session
from ..types import EngineAddress
from . import admin, calls, sessions
from .client import CallError, GatewayClient
from .dashboard import login, programs
from .dashboard.stream import ProcessFeed
from .errors import EngineBroken, NotFound
from .explain import Handler
from .gathering import gathered
from .keys import presented_key
from .moving import Mover
from .passage import Passage, Passed
from .relay import pass_answer
from .request import ClientRequest, parse_body, read_body
from .responses import ResponseHome
from .state import ADMIN, ASKER_KEY, GATEWAY, Gateway, lower_headers

_log = logging.getLogger(__name__)

INTERNAL: Final = f"{wire.API_PREFIX}/internal"
LIVE: Final = f"{INTERNAL}/live"  # what a process's programs do; see `dashboard.stream`
ASK_S: Final = 10.0  # a process that takes longer is left out
METRICS_S: Final = 4.0  # a scraper gives up by itself, mostly after 10 s, and has nothing then
ASKED_AT_ONCE: Final = 64
GATEWAY_LABEL: Final = "gateway"
POOL_LABEL: Final = "pool"  # the server's own process
_RESPONSE: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z")
_HOP: Final = "x-autellix-hop"  # by the private socket only: what a sibling says of the asker
_HOP_KEY: Final = "x-autellix-hop-key"  # likewise: the asker's key, as `_credentials` writes it
_SESSION: Final = wire.SESSION.lower()
_HEARTBEAT: Final = f"{wire.API_PREFIX}/sessions/heartbeat"
_PROGRAMS: Final = f"{login.PATH}/programs"
_PROGRAM: Final = f"{login.PATH}/programs/{{program_id}}"
#: Asked of everybody.
GATHERED: Final = frozenset(
    f"{wire.API_PREFIX}/{name}"
    for name in ("programs", "sessions", "calls", "engines", "admin/status")
) | {_PROGRAMS}
#: Lists of which as many rows come as are asked for.
_LIMITED: Final = {
    f"{wire.API_PREFIX}/calls": ("calls", calls.ROWS_MAX),
    _PROGRAMS: ("programs", programs.ROWS_MAX),
}
#: Not forwarded: hop by hop, or no longer so.
_DROPPED: Final = frozenset(
    (
        "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "content-encoding", "expect", _HOP, _HOP_KEY,
    )
)  # fmt: skip


class GatewayBroken(EngineBroken):
    """The process that owns the program died under the call."""

    code = "gateway_died"


class Sibling(NamedTuple):
    """Another process, as `relay.pass_answer` sees what it gets an answer from."""

    engine_id: str
    address: EngineAddress
    api_key: str | None = None
    state: types.EngineState = types.EngineState.READY


def private_path(folder: str, index: int) -> str:
    """Return where a process serves its siblings."""
    return f"{folder}/g{index}"


class Siblings:
    """What one process knows of the others; `open` it first, `close` it at the end.

    Args:
        folder: Where their sockets are.
        count: How many own programs.
        index: Which of them this is; None: the server's own process, which is none.
    """

    def __init__(self, folder: str, count: int, index: int | None) -> None:
        self.index = index
        self.count = count
        self.mover = Mover(folder)
        self._all = [
            Sibling(f"gateway {n}", EngineAddress(private_path(folder, n), "", 0))
            for n in range(count)
        ]
        self._clients = [
            GatewayClient(Path(private_path(folder, n)), ASKED_AT_ONCE) for n in range(count)
        ]
        #: What this process says for `metrics`; set by who has it.
        self.metrics_text: Callable[[], str] = str

    async def open(self) -> None:
        """Make ready."""
        for client in self._clients:
            await client.open()

    async def close(self) -> None:
        """Close every connection."""
        self.mover.close()
        for client in self._clients:
            await client.close()

    def add_routes(self, app: web.Application) -> None:
        """Add what only siblings may ask."""
        router = app.router
        router.add_get(f"{admin.API}/status", admin.status)
        router.add_get(_PROGRAMS, _list_programs)
        router.add_get(_PROGRAM, _show_program)
        router.add_get(f"{INTERNAL}/metrics", self._metrics)
        router.add_get(f"{INTERNAL}/homes/{{home}}", self._home)
        if self.index is not None:
            ProcessFeed(app[GATEWAY]).hang(app, LIVE)

    # whose is it

    def new_call_id(self) -> str:
        """Return an id for a call of this process."""
        assert self.index is not None, "the server's own process makes no call"
        chance = secrets.randbelow(RANGE // self.count)
        return secrets.token_hex(10) + owned_digits(self.index, self.count, chance)

    def owns(self, scope: str, session: str) -> bool:
        """Return whether a session is this process's."""
        return owner_of_session(scope, session, self.count) == self.index

    def owner_by_headers(self, headers: Mapping[str, str], scope: str) -> int | None:
        """Return whose a call is that says so in our own header; None: ours, or it does not say."""
        session = headers.get(_SESSION)
        if session is None or not wire.is_valid_id(session):
            return None
        return self._other(owner_of_session(scope, session, self.count))

    def owner_of(self, identity: Identity, document: Mapping[str, Any]) -> int | None:
        """Return whose a call is; None: ours, as is one that says nothing."""
        arrival = identity.arrival
        if identity.family in (None, OPENER):
            previous = document.get("previous_response_id")
            if isinstance(previous, str):
                return self._other(owner_of_response(previous, self.count))
        if arrival.session is None:
            return None
        return self._other(owner_of_session(arrival.scope, arrival.session, self.count))

    def _other(self, owner: int | None) -> int | None:
        return None if owner == self.index else owner

    # forwarding

    async def forward(
        self, client: ClientRequest, owner: int, body: bytes, *, is_admin: bool = False
    ) -> Passage:
        """Let another process answer a request, and pass what it says.

        Args:
            client: The request.
            owner: The process.
            body: All of it, decompressed.
            is_admin: Whether the client may see what is everybody's.

        Raises:
            GatewayBroken: it died before it answered.
        """
        gateway, sibling = client.gateway, self._all[owner]
        gateway.count("forwarded")
        try:
            upstream = await gateway.connections.acquire(sibling.address)
        except (OSError, TimeoutError):
            raise GatewayBroken(f"{sibling.engine_id} does not accept connections") from None
        try:
            payload = _as_forwarded(client, body, is_admin=is_admin)
            return await pass_answer(
                gateway, client, sibling, upstream, payload, b"", who="gateway"
            )
        except EngineBroken:
            raise GatewayBroken(f"{sibling.engine_id} died under the call") from None

    async def find_home(self, gateway: Gateway, response_id: str, scope: str) -> None:
        """Learn from its owner where a stored response is, if it is not known here."""
        owner = self._other(owner_of_response(response_id, self.count))
        if (
            owner is None
            or not _RESPONSE.match(response_id)
            or gateway.homes.get(response_id, scope) is not None
        ):
            return
        answer = await self._ask(owner, "GET", f"{INTERNAL}/homes/{response_id}", None, {})
        if answer is not None and answer.get("scope") == scope:
            home = ResponseHome(
                answer["engine_id"], EngineAddress(*answer["address"]), scope, answer["session"]
            )
            gateway.homes.put(response_id, home, is_news=False)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer what is another's or everybody's; the rest is the handler's."""
        resource = request.match_info.route.resource
        where = resource.canonical if resource is not None else ""
        if is_from_sibling(request):
            if _HOP in request.headers:
                request[ADMIN] = True
            if (key := request.headers.get(_HOP_KEY)) is not None:
                request[ASKER_KEY] = key.encode("latin-1").decode("utf-8", "surrogateescape")
            return await handler(request)
        if self.index is not None and where.startswith((INTERNAL, admin.API, login.PATH)):
            raise NotFound(f"{request.method} {request.path[:256]}: Not Found")
        if where in GATHERED and request.method == "GET":
            return await self._gather(request, handler)
        if where == "/metrics":
            return await self._all_metrics(request, handler)
        if where == _PROGRAM:
            return await self._find(request, handler)
        if where == _HEARTBEAT:
            return await self._heartbeat(request)
        owner = self._owner_by_path(request)
        if owner is None:
            return await handler(request)
        client = ClientRequest.of_web(request)
        config = client.gateway.config
        body = await read_body(request, config.body_bytes_max, config.slow_body_s)
        is_admin = client.gateway.is_admin(request)
        return Passed(await self.forward(client, owner, body, is_admin=is_admin))

    def _owner_by_path(self, request: web.Request) -> int | None:
        """Return whose a session, a call or a stored response is; None: ours, or the handler's."""
        found = request.match_info
        if "session" in found and wire.is_valid_id(found["session"]):
            _, scope = request.app[GATEWAY].authenticate(lower_headers(request))
            return self._other(owner_of_session(scope, found["session"], self.count))
        if "call" in found:
            return self._other(owner_of_id(found["call"], self.count))
        if "response_id" in found:
            return self._other(owner_of_response(found["response_id"], self.count))
        return None

    # asking

    async def _ask(
        self,
        index: int,
        method: str,
        path: str,
        document: Any,
        headers: Mapping[str, str],
        limit_s: float | None = None,
    ) -> dict[str, Any] | None:
        """Return what a process says; None: nothing, or no."""
        try:
            async with asyncio.timeout(ASK_S if limit_s is None else limit_s):
                return await self._clients[index].whole(method, path, document, headers)
        except (CallError, TimeoutError) as error:
            _log.debug("gateway %d did not answer %s: %r", index, path, error)
            return None

    async def _ask_others(
        self, path: str, headers: Mapping[str, str], limit_s: float | None = None
    ) -> dict[int, dict[str, Any] | None]:
        others = [n for n in range(self.count) if n != self.index]
        answers = await asyncio.gather(
            *(self._ask(n, "GET", path, None, headers, limit_s) for n in others)
        )
        return dict(zip(others, answers, strict=True))

    async def _gather(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Put together what all processes say."""
        own = await handler(request)
        if not isinstance(own, web.Response) or own.status != 200:
            return own
        headers = _credentials(request)
        if request.app[GATEWAY].is_admin(request):
            headers[_HOP] = "admin"
        answers = await self._ask_others(request.raw_path, headers)
        assert isinstance(own.body, bytes)
        parts = [orjson.loads(own.body), *(a for a in answers.values() if a is not None)]
        document = gathered(parts)
        if (limited := _LIMITED.get(request.path)) is not None:  # each has kept to it
            name, rows_max = limited
            del document[name][int(request.query.get("limit", rows_max)) :]
        if missing := [n for n, answer in answers.items() if answer is None]:
            document["gateways_missing"] = missing
        return _answer(document)

    async def _find(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return what the first says that knows something; if none does the handler says so."""
        answers = await self._ask_others(request.raw_path, {})
        found = next((answer for answer in answers.values() if answer is not None), None)
        return await handler(request) if found is None else _answer(found)

    async def _all_metrics(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Put the metrics of all processes together; a label says whose each one is."""
        own = await handler(request)
        assert isinstance(own, web.Response)
        assert isinstance(own.body, bytes)
        name = POOL_LABEL if self.index is None else str(self.index)
        texts = {name: own.body.decode()}
        answers = await self._ask_others(f"{INTERNAL}/metrics", {}, METRICS_S)
        for index, answer in answers.items():
            if answer is not None:
                texts[str(index)] = answer["text"]
        merged = metrics.merge(texts, GATEWAY_LABEL)
        return web.Response(
            body=merged.encode(), headers={"Content-Type": own.headers["Content-Type"]}
        )

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        """Renew leases at their owners."""
        client = ClientRequest.of_web(request)
        gateway = client.gateway
        _, scope = gateway.authenticate(client.headers)
        limit_bytes = sessions.HEARTBEAT_BYTES_MAX
        body = await read_body(request, limit_bytes, gateway.config.slow_body_s)
        ids = parse_body(body).get("ids") if body else None
        if (
            not isinstance(ids, list)
            or len(ids) > sessions.IDS_MAX
            or not all(isinstance(i, str) and wire.is_valid_id(i) for i in ids)
        ):  # anybody says what is wrong with it
            return Passed(await self.forward(client, self.index or 0, body))
        owned: dict[int, list[str]] = {}
        for session in ids:
            owned.setdefault(owner_of_session(scope, session, self.count), []).append(session)
        path, credentials = request.path, _credentials(request)
        answers = await asyncio.gather(
            *(self._ask(n, "POST", path, {"ids": some}, credentials) for n, some in owned.items())
        )
        unknown = {i for answer in answers if answer is not None for i in answer["unknown"]}
        return _answer(
            {"lease_s": gateway.config.lease_s, "unknown": [i for i in ids if i in unknown]}
        )

    # what siblings ask

    async def _metrics(self, _request: web.Request) -> web.Response:
        return _answer({"text": self.metrics_text()})

    async def _home(self, request: web.Request) -> web.Response:
        found = request.app[GATEWAY].homes.peek(request.match_info["home"])
        if found is None:
            raise NotFound("home: not known here")
        return _answer(
            {
                "engine_id": found.engine_id,
                "address": list(found.address),
                "scope": found.scope,
                "session": found.program_session,
            }
        )


async def _list_programs(request: web.Request) -> web.Response:
    return await programs.ProgramPages.of(request.app[GATEWAY]).list_programs(request)


async def _show_program(request: web.Request) -> web.Response:
    return await programs.ProgramPages.of(request.app[GATEWAY]).show_program(request)


def is_from_sibling(request: web.Request) -> bool:
    """Return whether a request came by the private socket."""
    if request.transport is None:
        return False
    return isinstance(request.transport.get_extra_info("sockname"), str | bytes)


def _as_forwarded(client: ClientRequest, body: bytes, *, is_admin: bool) -> bytes:
    """Return the bytes of a request as the owner is to get it: keys, names and all."""
    parts = [f"{client.method} {client.target} HTTP/1.1\r\nhost: gateway\r\n".encode()]
    parts += [
        f"{line.name}: {line.value}\r\n".encode("utf-8", "surrogateescape")
        for line in client.lines
        if line.name not in _DROPPED
    ]
    if is_admin:
        parts.append(f"{_HOP}: admin\r\n".encode())
    parts += (b"content-length: %d\r\n\r\n" % len(body), body)
    return b"".join(parts)


def _credentials(request: web.Request) -> dict[str, str]:
    """Return what tells another process whose request it is.

    A key may be any bytes, while our client sends text as UTF-8 and drops what is none: so each
    byte goes as a character.
    """
    key = presented_key(lower_headers(request))
    if key is None:
        return {}
    return {_HOP_KEY: key.encode("utf-8", "surrogateescape").decode("latin-1")}


def _answer(document: Mapping[str, Any]) -> web.Response:
    return web.Response(
        body=orjson.dumps(document),
        content_type="application/json",
        headers={wire.VERSION: str(wire.PROTOCOL_VERSION)},
    )

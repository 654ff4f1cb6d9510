"""The lifecycle endpoints of the wire protocol: optional for correctness, idempotent, JSON.

A session is opened by its first call, so a start may be late, lost or never sent. An id is scoped
by API key: the same id under another key is another session.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import orjson
from aiohttp import web

from autellix import wire

from ..process_table import TableFull, program_id_of
from ..program import TTL_S_MAX, Program
from ..wishes import Wishes
from .errors import BadRequest, Busy, NotFound
from .request import parse_body, read_body
from .state import GATEWAY, Gateway, lower_headers

BODY_BYTES_MAX: Final = 64 << 10
METADATA_BYTES_MAX: Final = 2048
NAME_CHARS_MAX: Final = 128
PID_MAX: Final = 4_194_304  # Linux's own limit
IDS_MAX: Final = 10_000  # of a heartbeat; an SDK keeps as many sessions open at most
HEARTBEAT_BYTES_MAX: Final = IDS_MAX * 132 + 1024  # an id has 128 characters at most
ROWS_MAX: Final = 2_000  # of each list, the newest; a row takes some 20 µs to make
_NAME: Final = re.compile(rf"[^\x00-\x1f\x7f-\x9f]{{1,{NAME_CHARS_MAX}}}\Z")
REASONS: Final = ("ok", "error", "cancelled", "atexit")
FEATURES: Final = ("sessions", "heartbeat", "tools", "retry_stable_calls", "inferred_joins")


async def info(request: web.Request) -> web.Response:
    """Say what this server is."""
    gateway = request.app[GATEWAY]
    return _answer(
        {
            "version": wire.PROTOCOL_VERSION,
            "features": list(FEATURES),
            "lease_s": gateway.config.lease_s,
            "policy": gateway.config.policy,
            "accounting": gateway.table.accounting,
        }
    )


async def create_session(request: web.Request) -> web.Response:
    """Open a session whose id the server chooses: a UUID of version 7, as hex."""
    gateway = request.app[GATEWAY]
    _, scope = gateway.authenticate(lower_headers(request))
    session = _uuid7_hex(gateway.clock.unix_s())
    while gateway.siblings is not None and not gateway.siblings.owns(scope, session):
        session = _uuid7_hex(gateway.clock.unix_s())
    return await _open(request, session, status=201)


async def put_session(request: web.Request) -> web.Response:
    """Open a session, or say more of one that is open."""
    return await _open(request, _id_of(request), status=200)


async def delete_session(request: web.Request) -> web.Response:
    """End a session; one that is unknown or has ended already is no error."""
    gateway, scope, document = await _read(request)
    reasons = [document.get("reason", "ok"), *request.query.getall("reason", ())]
    for reason in reasons:
        if reason not in REASONS:
            raise _not_allowed("reason", reason, f"one of {', '.join(REASONS)}")
    program = gateway.table.get(program_id_of(scope, _id_of(request)))
    if program is not None:
        gateway.table.end_program(program, reasons[-1], gateway.clock.now_s())
    return web.Response(status=204, headers=_headers(gateway))


async def get_session(request: web.Request) -> web.Response:
    """Show one session."""
    gateway = request.app[GATEWAY]
    _, scope = gateway.authenticate(lower_headers(request))
    session = _id_of(request)
    program = gateway.table.get(program_id_of(scope, session))
    if program is None:
        raise NotFound(f"session: {session!r} is not known under this key", param="session")
    return _answer(program.view(gateway.clock.now_s()))


async def list_sessions(request: web.Request) -> web.Response:
    """Show the sessions of the key."""
    gateway = request.app[GATEWAY]
    _, scope = gateway.authenticate(lower_headers(request))
    rows = gateway.table.program_views(gateway.clock.now_s(), scope, rows_max=ROWS_MAX)
    return _answer({"sessions": [row for row in rows if row["session"] is not None]})


async def list_programs(request: web.Request) -> web.Response:
    """Show all programs, untagged calls included; an admin those of everybody, and all counts."""
    gateway = request.app[GATEWAY]
    headers = lower_headers(request)
    table, now_s = gateway.table, gateway.clock.now_s()
    if gateway.is_admin(request):
        return _answer(
            {
                "programs": table.program_views(now_s, rows_max=ROWS_MAX),
                "programs_total": len(table),
                "calls_in_flight": table.in_flight,
                "table": table.counts,
                "gateway": gateway.counts,
            }
        )
    _, scope = gateway.authenticate(headers)
    return _answer(
        {
            "programs": table.program_views(now_s, scope, rows_max=ROWS_MAX),
            "programs_total": table.count_of(scope),
            "calls_in_flight": gateway.flights_by_scope.get(scope, 0),
        }
    )


async def list_engines(request: web.Request) -> web.Response:
    """Show the engines, as the pool sees them, with the calls that the gateway has with each."""
    gateway = request.app[GATEWAY]
    headers = lower_headers(request)
    if not gateway.is_admin(request):
        gateway.authenticate(headers)
    return _answer({"engines": [dict(view) for view in gateway.engine_views()],
                    "loads": gateway.table.loads()})  # fmt: skip


async def heartbeat(request: web.Request) -> web.Response:
    """Renew the leases of all sessions of a process; say which are not known."""
    gateway, scope, document = await _read(request, HEARTBEAT_BYTES_MAX)
    ids = document.get("ids")
    if not isinstance(ids, list) or len(ids) > IDS_MAX:
        raise _not_allowed("ids", ids, f"a list of at most {IDS_MAX} session ids")
    for given in ids:
        if not isinstance(given, str) or not wire.is_valid_id(given):
            allowed = "session ids of 1 to 128 characters A-Za-z0-9._:-"
            raise _not_allowed("ids", given, allowed)
    now_s = gateway.clock.now_s()
    unknown = [i for i in ids if not gateway.table.renew(program_id_of(scope, i), now_s)]
    return _answer({"lease_s": gateway.config.lease_s, "unknown": unknown})


async def heartbeat_one(request: web.Request) -> web.Response:
    """Renew the lease of one session."""
    gateway, scope, _ = await _read(request)
    session = _id_of(request)
    known = gateway.table.renew(program_id_of(scope, session), gateway.clock.now_s())
    return _answer({"lease_s": gateway.config.lease_s, "unknown": [] if known else [session]})


async def tool_hint(request: web.Request) -> web.Response:
    """Note that a tool of a session begins or ends: meanwhile the program waits for it."""
    gateway, scope, document = await _read(request)
    session = _id_of(request)
    event, name, tool_id = (document.get(field) for field in ("event", "tool", "id"))
    if event not in ("start", "end"):
        raise _not_allowed("event", event, "start or end")
    if not isinstance(name, str) or not _NAME.match(name):
        raise _not_allowed("tool", name, f"1 to {NAME_CHARS_MAX} characters, none for control")
    if not isinstance(tool_id, str) or not wire.is_valid_id(tool_id):
        raise _not_allowed("id", tool_id, "an id of 1 to 128 characters A-Za-z0-9._:-")
    program = gateway.table.get(program_id_of(scope, session))
    if program is None:
        raise NotFound(f"session: {session!r} is not known under this key", param="session")
    begins = event == "start"
    is_news = program.note_tool(tool_id, name, begins=begins)
    if is_news and (begins or not program.tools):
        gateway.tool_noted(program.program_id, name if begins else None)
    gateway.table.renew(program.program_id, gateway.clock.now_s())
    return web.Response(status=204, headers=_headers(gateway))


async def _open(request: web.Request, session: str, status: int) -> web.Response:
    gateway, scope, document = await _read(request)
    opener = _check_opener(document)
    try:
        program = gateway.table.open_program(scope, session, gateway.clock.now_s(), reopen=True)
    except TableFull as error:
        raise Busy(f"the process table is full: {error}") from None
    _describe(program, opener)
    wishes = Wishes(opener.get("weight"), opener.get("deadline_s"), opener.get("kind"))
    gateway.table.kinds.note(program, wishes, gateway.clock.now_s())
    if program.ttl_s is not None:
        gateway.table.renew(program.program_id, gateway.clock.now_s())
    return _answer(
        {
            "id": session,
            "program_id": program.program_id,
            "lease_s": program.ttl_s or gateway.config.lease_s,
            "state": program.state(gateway.clock.now_s()).value,
        },
        status=status,
    )


def _check_opener(document: dict[str, Any]) -> dict[str, Any]:
    """Return the known fields; unknown ones are ignored, so that a newer SDK may say more.

    Raises:
        BadRequest: a known field has no allowed value.
    """
    for field in ("name", "kind", "framework"):
        value = document.get(field)
        if value is not None and not (isinstance(value, str) and _NAME.match(value)):
            raise _not_allowed(field, value, f"1 to {NAME_CHARS_MAX} characters, none for control")
    for field in ("parent", "conversation"):
        value = document.get(field)
        if value is not None and not (isinstance(value, str) and wire.is_valid_id(value)):
            raise _not_allowed(field, value, "an id of 1 to 128 characters A-Za-z0-9._:-")
    metadata = document.get("metadata")
    if metadata is not None and (
        not isinstance(metadata, dict) or len(orjson.dumps(metadata)) > METADATA_BYTES_MAX
    ):
        raise _not_allowed("metadata", metadata, f"an object of at most {METADATA_BYTES_MAX} bytes")
    pid = document.get("pid")
    # JSON knows one kind of number: 7.0 is 7
    if isinstance(pid, float) and pid.is_integer():
        pid = int(pid)
    if pid is not None and (type(pid) is not int or not 0 <= pid <= PID_MAX):
        raise _not_allowed("pid", pid, f"a whole number up to {PID_MAX}")
    if not _is_number(document.get("ttl_s"), 1, TTL_S_MAX):
        allowed = f"a number of seconds from 1 to {TTL_S_MAX:g}"
        raise _not_allowed("ttl_s", document["ttl_s"], allowed)
    low, high = wire.WEIGHT_MIN, wire.WEIGHT_MAX
    if not _is_number(document.get("weight"), low, high):
        raise _not_allowed("weight", document["weight"], f"a number from {low:g} to {high:g}")
    if not _is_number(document.get("deadline_s"), -wire.DEADLINE_S_MAX, wire.DEADLINE_S_MAX):
        raise _not_allowed(
            "deadline_s", document["deadline_s"],
            f"a number of seconds from now, at most {wire.DEADLINE_S_MAX:.0f} away",
        )  # fmt: skip
    host = document.get("host")
    if host is not None and not (isinstance(host, str) and len(host) <= 255):
        raise _not_allowed("host", host, "a text of at most 255 characters")
    known = ("name", "parent", "conversation", "metadata", "pid", "host", "ttl_s", "framework",
             "weight", "deadline_s", "kind")  # fmt: skip
    return {field: document[field] for field in known if document.get(field) is not None}


def _is_number(value: object, low: float, high: float) -> bool:
    """Return whether it is a number between the two, or absent."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _describe(program: Program, opener: dict[str, Any]) -> None:
    program.name = opener.get("name", program.name)
    program.conversation = opener.get("conversation", program.conversation)
    program.parent_session = opener.get("parent", program.parent_session)
    program.ttl_s = opener.get("ttl_s", program.ttl_s)
    program.opener = {**(program.opener or {}), **opener}


async def _read(
    request: web.Request, bytes_max: int = BODY_BYTES_MAX
) -> tuple[Gateway, str, dict[str, Any]]:
    gateway = request.app[GATEWAY]
    _, scope = gateway.authenticate(lower_headers(request))
    body = await read_body(request, bytes_max, gateway.config.slow_body_s)
    return gateway, scope, parse_body(body) if body else {}


def _id_of(request: web.Request) -> str:
    session = request.match_info["session"]
    if not wire.is_valid_id(session):
        raise _not_allowed("session", session, "an id of 1 to 128 characters A-Za-z0-9._:-")
    return session


def _not_allowed(field: str, value: object, allowed: str) -> BadRequest:
    return BadRequest(f"{field}: {str(value)[:64]!r} is not allowed; allowed is {allowed}",
                      param=field)  # fmt: skip


def _headers(gateway: Gateway) -> dict[str, str]:
    return {
        wire.VERSION: str(wire.PROTOCOL_VERSION),
        wire.LEASE: f"{gateway.config.lease_s:.0f}",
    }


def _answer(document: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=orjson.dumps(document),
        content_type="application/json",
        headers={wire.VERSION: str(wire.PROTOCOL_VERSION)},
    )


def _uuid7_hex(unix_s: float) -> str:
    """Return a UUID of version 7: time first, so that ids sort by age."""
    value = (int(unix_s * 1000) & (2**48 - 1)) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 7 << 76
    return f"{value & ~(3 << 62) | 2 << 62:032x}"

"""``GET /autellix/v1/calls``: what became of a call, and why.

On the main site a key sees its own calls, as with sessions; an admin sees everybody's. The newest
``calls_remembered`` calls are known.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

import orjson
from aiohttp import web

from autellix import wire

from ..call_log import CallRecord
from ..decisions import explain, summary
from .book import CallBook
from .errors import BadRequest, NotFound
from .state import GATEWAY, Gateway, lower_headers

ROWS_MAX: Final = 200
_LOOKED_AT_MAX: Final = 10_000


async def get_call(request: web.Request) -> web.Response:
    """Explain one call."""
    gateway = request.app[GATEWAY]
    scope = _scope_of(gateway, request)
    call_id = request.match_info["call"]
    book = _book_of(gateway)
    record = book.log.get(call_id)
    if record is None or scope not in (None, record.scope):
        raise NotFound(
            f"call: {call_id[:64]!r} is not known under this key; the newest "
            f"{gateway.config.calls_remembered} calls are",
            param="call",
        )
    return _answer(_explained(gateway, record, book.rule))


async def list_calls(request: web.Request) -> web.Response:
    """Show the newest calls, of one program if ``program`` is given; without explanations."""
    gateway = request.app[GATEWAY]
    scope = _scope_of(gateway, request)
    limit = request.query.get("limit", str(ROWS_MAX))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= ROWS_MAX):
        raise BadRequest(
            f"limit: {limit[:32]!r} is not allowed; allowed is 1 to {ROWS_MAX}", param="limit"
        )
    log = _book_of(gateway).log
    program = request.query.get("program")
    newest = log.newest() if program is None else reversed(log.of_program(program))
    seen = (r for r in islice(newest, _LOOKED_AT_MAX) if scope in (None, r.scope))
    now_s = gateway.clock.now_s()
    offset_s = gateway.clock.unix_s() - now_s
    rows = [record.view(now_s, offset_s) for record in islice(seen, int(limit))]
    return _answer({"calls": rows, "calls_known": len(log)})


def _scope_of(gateway: Gateway, request: web.Request) -> str | None:
    """Return whose calls a request may see, None: everybody's."""
    headers = lower_headers(request)
    if gateway.is_admin(request):
        return None
    _, scope = gateway.authenticate(headers)
    return scope


def _book_of(gateway: Gateway) -> CallBook:
    if gateway.book is None:
        raise NotFound("call: this server remembers none; gateway.calls_remembered is 0")
    return gateway.book


def _explained(gateway: Gateway, record: CallRecord, rule: str) -> dict[str, Any]:
    now_s = gateway.clock.now_s()
    offset_s = gateway.clock.unix_s() - now_s
    document = record.view(now_s, offset_s)
    document["summary"] = summary(record)
    document["decisions"] = [
        {
            "at_s": round(d.at_s + offset_s, 6),
            "after_s": round(d.at_s - record.begun_s, 6),
            "what": d.what,
            "why": d.why,
            "words": d.words,
            **d.fields,
        }
        for d in explain(record, rule)
    ]
    document["events_dropped"] = sum(report.events_dropped for report in record.reports)
    return document


def _answer(document: dict[str, Any]) -> web.Response:
    return web.Response(
        body=orjson.dumps(document),
        content_type="application/json",
        headers={wire.VERSION: str(wire.PROTOCOL_VERSION)},
    )

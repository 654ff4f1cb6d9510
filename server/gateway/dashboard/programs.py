"""Programs as people look at them: all, and one with its threads and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from ... import views
from ...call_log import CallRecord
from ..admin import AdminRoute
from ..errors import BadRequest, NotFound
from ..state import Gateway
from .login import PATH

ROWS_MAX: Final = 10_000
CALLS_MAX: Final = 1_000  # of one program
CALLS_AT_ONCE: Final = 100  # a row takes some 25 µs to make

CallsOf = Callable[[str], Sequence[CallRecord]]


class ProgramPages:
    """See the module.

    Args:
        gateway: Whose programs.
        calls_of: The calls of a program that are still remembered, oldest first.
    """

    def __init__(self, gateway: Gateway, calls_of: CallsOf) -> None:
        self._gateway = gateway
        self._calls_of = calls_of

    @classmethod
    def of(cls, gateway: Gateway) -> ProgramPages:
        """Return those of a gateway with the calls in its book."""
        book = gateway.book
        return cls(gateway, book.log.of_program if book is not None else lambda _: ())

    def routes(self) -> list[AdminRoute]:
        """Return what to hand to `AdminSite.add`."""
        return [
            AdminRoute("GET", f"{PATH}/programs", self.list_programs),
            AdminRoute("GET", f"{PATH}/programs/{{program_id}}", self.show_program),
        ]

    async def list_programs(self, request: web.Request) -> web.Response:
        """Return rows of the newest programs, with the fields' names."""
        limit = _limit(request)
        table, now_s = self._gateway.table, self._gateway.clock.now_s()
        rows = []
        for program in list(table.programs())[: -limit - 1 : -1]:
            rows.append(views.as_dict(views.row_of(program, now_s)))
            if len(rows) % 250 == 0:
                await asyncio.sleep(0)  # calls go on meanwhile
        return answer_json(
            {
                "now_s": now_s,
                "total": len(table),
                "calls_in_flight": table.in_flight,
                "programs": rows,
            }
        )

    async def show_program(self, request: web.Request) -> web.Response:
        """Return one program with its threads and calls; see `views.find_program`."""
        now_s = self._gateway.clock.now_s()
        wanted = request.match_info["program_id"][:256]
        program = views.find_program(self._gateway.table, wanted)
        if program is None:
            raise NotFound(f"program: {wanted!r} is not in the table", param="program")
        records = self._calls_of(program.program_id)[-CALLS_MAX:]
        calls: list[dict[str, Any]] = []
        for start in range(0, len(records), CALLS_AT_ONCE):
            calls += (record.view(now_s) for record in records[start : start + CALLS_AT_ONCE])
            await asyncio.sleep(0)  # calls go on meanwhile
        return answer_json(
            {
                "now_s": now_s,
                "row": views.as_dict(views.row_of(program, now_s)),
                "program": program.view(now_s),
                "calls": calls,
            }
        )


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(ROWS_MAX))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= ROWS_MAX):
        raise BadRequest(f"limit: {text[:32]!r} is not allowed; allowed is 1 to {ROWS_MAX}")
    return int(text)


def answer_json(document: Mapping[str, Any]) -> web.Response:
    """Return a document that nobody is to keep."""
    return web.Response(
        body=orjson.dumps(document),
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )

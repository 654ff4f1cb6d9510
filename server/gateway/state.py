"""What the handlers of one gateway share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from .. import types
from ..call_log import CallRecord
from ..clock import Clock
from ..process_table import ProcessTable
from .bodies import BodyRoom
from .book import CallBook
from .config import GatewayConfig
from .errors import Unauthorized
from .keys import ANYBODY, Tenant, find_tenant, presented_key, scope_of
from .models import ModelIndex
from .responses import ResponseHomes
from .upstream import Connections, Upstream

if TYPE_CHECKING:
    from .siblings import Siblings


@dataclass(slots=True, eq=False)
class Flight:
    """A call on its way: what a retry must cancel, and what a limit counts."""

    scope: str
    upstream: Upstream | None = None
    superseded: bool = False
    record: CallRecord | None = None  # None: no book is kept


@dataclass(slots=True, eq=False)
class Gateway:
    """The parts of one gateway."""

    config: GatewayConfig
    table: ProcessTable
    engines: types.Engines
    place: Callable[[types.CallInfo, Sequence[types.Engine]], types.Engine]
    clock: Clock
    key: bytes
    forget_programs: Callable[[Sequence[str]], None]
    engine_views: Callable[[], Sequence[Mapping[str, Any]]]
    tenants: tuple[Tenant, ...]
    connections: Connections
    homes: ResponseHomes
    models: ModelIndex
    bodies: BodyRoom
    book: CallBook | None = None
    siblings: Siblings | None = None  # of several gateway processes on one address
    #: Told that a call is over, which ``place`` was asked about any number of times, even none.
    call_over: Callable[[str], None] = lambda _: None
    #: Told what tool a program waits for from now on; None: for none any more.
    tool_noted: Callable[[str, str | None], None] = lambda *_: None
    flights: dict[str, Flight] = field(default_factory=dict)
    flights_by_scope: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        """Add one to a counter of the gateway."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def new_call_id(self) -> str:
        """Return an id for a call."""
        return secrets.token_hex(12) if self.siblings is None else self.siblings.new_call_id()

    def authenticate(self, headers: Mapping[str, str]) -> tuple[Tenant, str]:
        """Return whose request it is, and the scope of its ids.

        Raises:
            Unauthorized: keys are configured and this is none of them.
        """
        key = presented_key(headers)
        if not self.tenants:
            return ANYBODY, scope_of(key, ANYBODY)
        tenant = find_tenant(key, self.tenants)
        if tenant is None:
            self.count("unauthorized")
            raise Unauthorized("authorization: the API key is missing or not one of this server's")
        return tenant, scope_of(key, tenant)

    def is_admin(self, request: web.BaseRequest) -> bool:
        """Return whether a request may see what is everybody's.

        On the admin site it may; from a client only on this machine and if there are no keys.
        """
        if request.get(ADMIN, False):
            return True
        return not self.tenants and request.remote in (None, "127.0.0.1", "::1")

    def ready(self, model: object = None) -> list[types.Engine]:
        """Return the engines that may get calls, or those of a model."""
        ready = [e for e in self.engines.all() if e.state is types.EngineState.READY]
        return ready if model is None else self.models.serving(model, ready)


GATEWAY: Final = web.AppKey("gateway", Gateway)
ADMIN: Final = web.RequestKey("admin", bool)  # it has shown the admin key
ASKER_KEY: Final = web.RequestKey("asker's key", str)  # of whom another process asks for
BODY_BYTES: Final = web.RequestKey("body bytes", int)  # room that its body takes


def lower_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return a request's headers by lower-case name; of a repeated one the last."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    if (key := request.get(ASKER_KEY)) is not None:
        headers["x-api-key"] = key
    return headers

"""Who a call belongs to: one table of the names that clients use, and the rule that reads it.

The families are tried in order, our own headers first. The first that names a session wins, and
every field is taken from it alone: a thread of one family inside a session of another would be
nonsense. Values that are malformed are ignored and named, and a call of which nothing is left is
untagged: a program of its own. Where the names come from: docs/wire.md.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote

from autellix import wire

from .program import Arrival

VALUE_BYTES_MAX: Final = 256  # of a foreign id; our own are at most wire.VALUE_BYTES_MAX
HANDICAP_MS_MAX: Final = 2**40

#: Headers by which vLLM takes orders; a client's are read here and never reach an engine.
ENGINE_HEADERS: Final = frozenset(
    {"x-session-id", "x-vllm-priority", "x-request-id", "x-data-parallel-rank"}
)
#: The same in bodies, where they would win over the headers (``vllm_xargs.session_id`` too).
ENGINE_FIELDS: Final = ("session_id", "kv_transfer_params", "priority", "request_id")


class Family(NamedTuple):
    """The names that one kind of client uses. Headers are lower case, body paths dotted."""

    name: str
    session: tuple[str, ...]  # the first that is there
    thread: tuple[str, ...] = ()
    parent_session: tuple[str, ...] = ()
    source: Literal["headers", "body", "baggage"] = "headers"
    marks: tuple[str, ...] = ()  # one of these must be there too


class Priority(NamedTuple):
    """A way to say how urgent a call is; ``sign`` turns it into 'higher is later'."""

    name: str
    sign: int
    in_body: bool = False


OWN: Final = "autellix"

FAMILIES: Final[tuple[Family, ...]] = (
    Family("agentic_context", ("vllm_xargs.agentic_context.program_id",),
           ("vllm_xargs.agentic_context.agent_id",),
           ("vllm_xargs.agentic_context.parent_program_id",), source="body"),
    Family("agent_hint", ("agent_hint.session_id",), (), ("agent_hint.parent_session_id",),
           source="body"),
    Family("nvext", ("nvext.agent_context.session_id", "nvext.session_control.session_id"), (),
           ("nvext.agent_context.parent_session_id",), source="body"),
    Family("vllm_body", ("session_id", "vllm_xargs.session_id"), source="body"),
    Family("sglang_body", ("session_params.id",), source="body"),
    Family("thunderagent", ("program_id",), source="body"),
    Family("dynamo", ("x-dynamo-session-id", "x-dynamo-trajectory-id"), (),
           ("x-dynamo-parent-session-id",)),
    Family("claude_code", ("x-claude-code-session-id",), ("x-claude-code-agent-id",)),
    Family("opencode", ("x-session-id", "x-opencode-session", "x-session-affinity"), (),
           ("x-parent-session-id",), marks=("x-opencode-session", "x-session-affinity")),
    Family("codex", ("session-id", "session_id"), ("thread-id",)),
    Family("litellm", ("x-litellm-session-id",)),
    Family("litellm_body", ("litellm_session_id", "metadata.session_id"), source="body"),
    Family("helicone", ("helicone-session-id",)),
    Family("fireworks", ("x-multi-turn-session-id",)),
    Family("smg", ("x-smg-routing-key",)),
    Family("llm_d", ("x-session-id",), (), ("x-parent-session-id",),
           marks=("x-parent-session-id", "x-session-type")),
    Family("vllm", ("x-session-id",)),
    Family("prompt_cache_key", ("prompt_cache_key",), source="body"),
    Family("baggage", ("session.id", "gen_ai.conversation.id"), source="baggage"),
)  # fmt: skip

PRIORITIES: Final[tuple[Priority, ...]] = (
    Priority("x-vllm-priority", 1),
    Priority("x-dynamo-request-priority", -1),
    Priority("x-sglang-request-priority", -1),
    Priority("priority", 1, in_body=True),
    Priority("nvext.agent_hints.priority", -1, in_body=True),
)


# What most requests have nothing of is seen at a glance.
_HEADER_NAMES: Final = frozenset(
    name for f in FAMILIES if f.source == "headers" for name in f.session
) | {"baggage"}
_BODY_ROOTS: Final = frozenset(
    path.partition(".")[0] for f in FAMILIES if f.source == "body" for path in f.session
)
_PRIORITY_HEADERS: Final = frozenset(p.name for p in PRIORITIES if not p.in_body)
_PRIORITY_ROOTS: Final = frozenset(p.name.partition(".")[0] for p in PRIORITIES if p.in_body)


class Identity(NamedTuple):
    """What a call says of itself."""

    family: str | None  # None: untagged
    arrival: Arrival
    handicap_ms: int  # how much later than its program the client wants it; never sooner
    malformed: tuple[str, ...]  # names of headers that were ignored


def resolve(headers: Mapping[str, str], body: Mapping[str, Any], scope: str) -> Identity:
    """Return who a call belongs to.

    Args:
        headers: By lower-case name.
        body: The decoded request, empty if it is no object.
        scope: Whose key the call came with.
    """
    malformed: list[str] = []
    handicap_ms = _handicap_ms(headers, body)
    own = _own(headers, scope, malformed)
    if own.session is not None:
        return Identity(OWN, own, handicap_ms, tuple(malformed))
    untagged = Arrival(scope, attempt=own.attempt, client=own.client)
    if _HEADER_NAMES.isdisjoint(headers) and _BODY_ROOTS.isdisjoint(body):
        return Identity(None, untagged, handicap_ms, tuple(malformed))
    sources: dict[str, Mapping[str, Any]] = {
        "headers": headers, "body": _Body(body), "baggage": _baggage(headers.get("baggage", "")),
    }  # fmt: skip
    for family in FAMILIES:
        if family.marks and not any(mark in headers for mark in family.marks):
            continue
        source = sources[family.source]
        session = _first(source, family.session)
        if session is None:
            continue
        arrival = _foreign(family, source, session, scope)
        # a call id says nothing of the program: it is no mixing of families to keep it
        arrival = arrival._replace(client_call=own.client_call, attempt=own.attempt)
        return Identity(family.name, arrival, handicap_ms, tuple(malformed))
    return Identity(None, untagged, handicap_ms, tuple(malformed))


def clean_body(body: dict[str, Any]) -> bool:
    """Remove the fields that only the gateway may set; return whether any was there."""
    changed = False
    for name in ENGINE_FIELDS:
        if name in body:
            del body[name]
            changed = True
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict) and "session_id" in extra:
        del extra["session_id"]
        changed = True
    return changed


def _own(headers: Mapping[str, str], scope: str, malformed: list[str]) -> Arrival:
    def identifier(name: str) -> str | None:
        value = headers.get(name.lower())
        if value is None or wire.is_valid_id(value):
            return value
        malformed.append(name)
        return None

    def number(name: str) -> int | None:
        value = headers.get(name.lower())
        parsed = wire.parse_number(value) if value is not None else None
        if value is not None and parsed is None:
            malformed.append(name)
        return parsed

    def text(name: str) -> str | None:
        value = headers.get(name.lower())
        if value is None or (len(value) <= wire.VALUE_BYTES_MAX and value.isprintable()
                             and value.isascii()):  # fmt: skip
            return value
        malformed.append(name)
        return None

    parent_text = headers.get(wire.PARENT.lower())
    parent = wire.parse_parent(parent_text) if parent_text is not None else None
    if parent_text is not None and parent is None:
        malformed.append(wire.PARENT)
    retries = wire.parse_number(headers.get("x-stainless-retry-count", "0"))
    return Arrival(
        scope=scope,
        session=identifier(wire.SESSION),
        thread=number(wire.THREAD),
        parent=parent,
        parent_session=identifier(wire.PARENT_SESSION),
        seq=number(wire.SEQ),
        client_call=identifier(wire.CALL),
        attempt=retries or 0,
        node=text(wire.NODE),
        conversation=identifier(wire.CONVERSATION),
        client=text(wire.CLIENT),
    )


def _foreign(family: Family, source: Mapping[str, Any], session: str, scope: str) -> Arrival:
    parent = _first(source, family.parent_session)
    thread = _first(source, family.thread)
    if parent is not None and parent != session:
        # a child session is a thread of its parent's program
        return Arrival(scope, parent, thread_label=thread or session, parent_session=parent)
    return Arrival(scope, session, thread_label=thread)


def _first(source: Mapping[str, Any], names: Sequence[str]) -> str | None:
    for name in names:
        value = source.get(name)
        if (
            isinstance(value, str)
            and value
            and value.isprintable()
            and len(value.encode()) <= VALUE_BYTES_MAX
        ):
            return value
    return None


def _baggage(text: str) -> dict[str, str]:
    """Return the members of a W3C baggage header, without their properties."""
    pairs = (member.partition(";")[0].partition("=") for member in text[:8192].split(","))
    return {name.strip(): unquote(value.strip()) for name, found, value in pairs if found}


def _handicap_ms(headers: Mapping[str, str], body: Mapping[str, Any]) -> int:
    if _PRIORITY_HEADERS.isdisjoint(headers) and _PRIORITY_ROOTS.isdisjoint(body):
        return 0
    fields = _Body(body)
    for priority in PRIORITIES:
        value = fields.get(priority.name) if priority.in_body else headers.get(priority.name)
        if isinstance(value, bool) or not isinstance(value, str | int):
            continue
        if isinstance(value, str):
            if len(value) > 20 or not value.lstrip("+-").isdecimal() or not value.isascii():
                continue
            try:
                value = int(value)
            except ValueError:  # "+-3"
                continue
        return min(max(0, priority.sign * value), HANDICAP_MS_MAX)
    return 0


class _Body(Mapping[str, Any]):
    """A JSON object read by dotted paths."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def __getitem__(self, path: str) -> Any:
        value: Any = self._document
        for name in path.split("."):
            if not isinstance(value, Mapping):
                raise KeyError(path)
            value = value[name]
        return value

    def __iter__(self) -> Any:
        return iter(self._document)

    def __len__(self) -> int:
        return len(self._document)

"""Who a call belongs to: one table of the names that clients use, and the rule that reads it.

The families are tried in order, our own headers first. The first that names a session wins, and
every field is taken from it alone: a thread of one family inside a session of another would be
nonsense. Values that are malformed are ignored and named, and a call of which nothing is left is
untagged: a program of its own. Where the names come from: docs/wire.md.

Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote

from autellix import wire

from .program import Arrival
from .wishes import NO_WISHES, Wishes

VALUE_BYTES_MAX: Final = 256  # of a foreign id; our own are at most wire.VALUE_BYTES_MAX
HANDICAP_MS_MAX: Final = 2**40

#: What a role adds to a program's attained service: with the default levels a delegated program
#: begins in the fifth of eight, one in the background in the last.
ROLE_HANDICAP_MS: Final = {"interactive": 0, "delegated": 4_000, "background": 32_000}
assert tuple(ROLE_HANDICAP_MS) == wire.ROLES

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
OPENER: Final = "content_opener"  # the last resort, and only if it is asked for
OPENER_MESSAGES_MAX: Final = 16

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


# By lower-case name, as the headers are.
_SESSION, _THREAD, _PARENT, _PARENT_SESSION, _SEQ, _CALL, _NODE, _CONVERSATION, _CLIENT = (
    name.lower()
    for name in (
        wire.SESSION, wire.THREAD, wire.PARENT, wire.PARENT_SESSION, wire.SEQ, wire.CALL,
        wire.NODE, wire.CONVERSATION, wire.CLIENT,
    )
)  # fmt: skip

_WEIGHT, _DEADLINE, _KIND = (n.lower() for n in (wire.WEIGHT, wire.DEADLINE, wire.KIND))
_WISHES: Final = frozenset((_WEIGHT, _DEADLINE, _KIND))

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


def resolve(
    headers: Mapping[str, str], body: Mapping[str, Any], scope: str, *, infer: bool = False
) -> Identity:
    """Return who a call belongs to.

    Args:
        headers: By lower-case name.
        body: The decoded request, empty if it is no object.
        scope: Whose key the call came with.
        infer: Take an untagged call for one of the conversation that begins as it does.
    """
    malformed: list[str] = []
    handicap_ms = _handicap_ms(headers, body) + _role_ms(headers, malformed)
    wishes = _wishes(headers, malformed)
    own = _own(headers, scope, malformed)
    if wishes is not NO_WISHES:
        own = own._replace(wishes=wishes)
    if own.session is not None:
        return Identity(OWN, own, handicap_ms, tuple(malformed))
    untagged = Arrival(scope, attempt=own.attempt, client=own.client, wishes=wishes)
    if _HEADER_NAMES.isdisjoint(headers) and _BODY_ROOTS.isdisjoint(body):
        return _by_opener(untagged, body, handicap_ms, malformed, infer=infer)
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
        # these say nothing of which program it is: it is no mixing of families to keep them
        arrival = arrival._replace(
            client_call=own.client_call, attempt=own.attempt, wishes=own.wishes
        )
        return Identity(family.name, arrival, handicap_ms, tuple(malformed))
    return _by_opener(untagged, body, handicap_ms, malformed, infer=infer)


def _by_opener(
    untagged: Arrival,
    body: Mapping[str, Any],
    handicap_ms: int,
    malformed: list[str],
    *,
    infer: bool,
) -> Identity:
    opener = opener_of(body) if infer else None
    if opener is None:
        return Identity(None, untagged, handicap_ms, tuple(malformed))
    arrival = untagged._replace(session=f"opener:{opener}")
    return Identity(OPENER, arrival, handicap_ms, tuple(malformed))


def opener_of(body: Mapping[str, Any]) -> str | None:
    """Return a hash of how a conversation begins: all up to its first user message.

    An agent sends its whole conversation with each call, so what it begins with stays. Two runs
    that begin alike have the same opener: whoever infers sessions from it takes them for one.
    """
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return None
    begin: list[Any] = [body.get("model"), body.get("system"), body.get("instructions")]
    for message in messages[:OPENER_MESSAGES_MAX]:
        begin.append(message)
        if isinstance(message, Mapping) and message.get("role") == "user":
            text = json.dumps(begin, sort_keys=True, default=str)
            return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return None


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
    parent_text = headers.get(_PARENT)
    parents = wire.parse_parents(parent_text) if parent_text is not None else ()
    if parent_text is not None and not parents:
        malformed.append(wire.PARENT)
    retries = headers.get("x-stainless-retry-count", "0")
    return Arrival(
        scope=scope,
        session=_identifier(headers, wire.SESSION, _SESSION, malformed),
        thread=_number(headers, wire.THREAD, _THREAD, malformed),
        parent=parents[0] if parents else None,
        follows=parents[1:],
        parent_session=_identifier(headers, wire.PARENT_SESSION, _PARENT_SESSION, malformed),
        seq=_number(headers, wire.SEQ, _SEQ, malformed),
        client_call=_identifier(headers, wire.CALL, _CALL, malformed),
        attempt=0 if retries == "0" else wire.parse_number(retries) or 0,
        node=_text(headers, wire.NODE, _NODE, malformed),
        conversation=_identifier(headers, wire.CONVERSATION, _CONVERSATION, malformed),
        client=_text(headers, wire.CLIENT, _CLIENT, malformed),
    )


def _wishes(headers: Mapping[str, str], malformed: list[str]) -> Wishes:
    if _WISHES.isdisjoint(headers):
        return NO_WISHES
    numbers: list[float | None] = []
    for name, lower, parse in (
        (wire.WEIGHT, _WEIGHT, wire.parse_weight),
        (wire.DEADLINE, _DEADLINE, wire.parse_deadline),
    ):
        text = headers.get(lower)
        numbers.append(parse(text) if text is not None else None)
        if text is not None and numbers[-1] is None:
            malformed.append(name)
    kind = _text(headers, wire.KIND, _KIND, malformed)
    if kind == "":
        malformed.append(wire.KIND)
    return Wishes(numbers[0], numbers[1], unquote(kind) if kind else None)


def _identifier(
    headers: Mapping[str, str], name: str, lower: str, malformed: list[str]
) -> str | None:
    value = headers.get(lower)
    if value is None or wire.is_valid_id(value):
        return value
    malformed.append(name)
    return None


def _number(headers: Mapping[str, str], name: str, lower: str, malformed: list[str]) -> int | None:
    value = headers.get(lower)
    if value is None:
        return None
    parsed = wire.parse_number(value)
    if parsed is None:
        malformed.append(name)
    return parsed


def _text(headers: Mapping[str, str], name: str, lower: str, malformed: list[str]) -> str | None:
    value = headers.get(lower)
    if value is None or (
        len(value) <= wire.VALUE_BYTES_MAX and value.isprintable() and value.isascii()
    ):
        return value
    malformed.append(name)
    return None


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


def _role_ms(headers: Mapping[str, str], malformed: list[str]) -> int:
    role = headers.get(wire.ROLE.lower())
    if role is None:
        return 0
    if role not in ROLE_HANDICAP_MS:
        malformed.append(wire.ROLE)
    return ROLE_HANDICAP_MS.get(role, 0)


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

"""Who a call belongs to: one real header set of each family, and hostile ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autellix import wire
from autellix.server.identity import FAMILIES, clean_body, resolve

# family, headers, body, session, thread label
GOLDEN: list[tuple[str, dict[str, str], dict[str, Any], str, str | None]] = [
    ("claude_code",
     {"user-agent": "claude-cli/2.0.31 (external, cli)", "anthropic-version": "2023-06-01",
      "x-app": "cli", "x-claude-code-session-id": "2f1c8c9e-6a53-4d1c-9a55-0e0b3c7a1d11",
      "x-claude-code-agent-id": "agent-7", "x-claude-code-parent-agent-id": "agent-0"},
     {}, "2f1c8c9e-6a53-4d1c-9a55-0e0b3c7a1d11", "agent-7"),
    ("codex",
     {"user-agent": "codex_cli_rs/0.58.0", "originator": "codex_cli_rs",
      "session-id": "019a7b52-8f37-7c41-9c88-93d31d01c2aa", "thread-id": "019a-thread"},
     {"prompt_cache_key": "019a7b52"}, "019a7b52-8f37-7c41-9c88-93d31d01c2aa", "019a-thread"),
    ("codex", {"session_id": "older-codex"}, {}, "older-codex", None),
    ("opencode",
     {"user-agent": "opencode/1.0.60", "x-opencode-session": "ses_52", "x-session-id": "ses_52",
      "x-session-affinity": "ses_52"}, {}, "ses_52", None),
    ("opencode",
     {"x-session-affinity": "ses_53", "x-session-id": "ses_53", "x-parent-session-id": "ses_52"},
     {}, "ses_52", "ses_53"),
    ("dynamo",
     {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "root"}, {}, "root", "child"),
    ("vllm", {"user-agent": "AsyncOpenAI/Python 3.57.0", "x-session-id": "chat-9"}, {},
     "chat-9", None),
    ("llm_d", {"x-session-id": "b", "x-parent-session-id": "a", "x-session-type": "sub"}, {},
     "a", "b"),
    ("vllm_body", {}, {"session_id": "abc"}, "abc", None),
    ("vllm_body", {}, {"vllm_xargs": {"session_id": "abc"}}, "abc", None),
    ("agentic_context", {},
     {"vllm_xargs": {"agentic_context": {"program_id": "p", "agent_id": "a"}}}, "p", "a"),
    ("agent_hint", {},
     {"agent_hint": {"session_id": "sub", "parent_session_id": "top",
                     "cache_control": {"type": "ephemeral", "ttl": "5m"}}}, "top", "sub"),
    ("sglang_body", {}, {"session_params": {"id": "sg-1", "rid": None, "offset": -1}}, "sg-1",
     None),
    ("nvext", {}, {"nvext": {"agent_context": {"session_id": "n"}}}, "n", None),
    ("thunderagent", {}, {"program_id": "ta-1", "docker_ids": []}, "ta-1", None),
    ("litellm", {"x-litellm-session-id": "lite"}, {}, "lite", None),
    ("litellm_body", {}, {"litellm_session_id": "lite"}, "lite", None),
    ("helicone", {"helicone-session-id": "h"}, {}, "h", None),
    ("fireworks", {"x-multi-turn-session-id": "f"}, {}, "f", None),
    ("smg", {"x-smg-routing-key": "r"}, {}, "r", None),
    ("baggage", {"baggage": "userId=7, session.id=conv%2D1;ttl=5", "traceparent": "00-ab-cd-01"},
     {}, "conv-1", None),
    ("prompt_cache_key", {"user-agent": "Agents/Python 0.24.0"}, {"prompt_cache_key": "k"},
     "k", None),
]  # fmt: skip

OWN = {"x-autellix-session": "run", "x-autellix-thread": "3", "x-autellix-parent": "0:2",
       "x-autellix-seq": "5", "x-autellix-call": "c-1", "x-autellix-client": "python/0.1;src=ctx",
       "x-stainless-retry-count": "2", "x-session-id": "run"}  # fmt: skip


@pytest.mark.parametrize(("family", "headers", "body", "session", "label"), GOLDEN)
def test_a_real_request_of_each_family(family, headers, body, session, label):
    """The right family, session and thread."""
    identity = resolve(headers, body, "key-1")
    assert identity.family == family
    assert identity.arrival.session == session
    assert identity.arrival.thread_label == label
    assert identity.arrival.scope == "key-1"
    assert identity.malformed == ()


def test_every_family_has_a_golden_request():
    """A family that nobody tried is a guess."""
    assert {f.name for f in FAMILIES} == {row[0] for row in GOLDEN}


SYSTEM = {"role": "system", "content": "You are an agent."}
ASK = {"role": "user", "content": [{"type": "text", "text": "Weather?"}]}
LATER = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": "?"}]


def test_a_conversation_is_known_by_how_it_begins_only_if_that_is_asked_for():
    """The last resort, after every name; another model or opener is another conversation."""
    first = {"model": "m", "messages": [SYSTEM, ASK]}
    turn = {"model": "m", "messages": [SYSTEM, ASK, *LATER], "temperature": 1}
    assert resolve({}, turn, "").family is None
    got = [resolve({}, body, "key", infer=True) for body in (first, turn)]
    assert got[0] == got[1]
    assert got[0].family == "content_opener"
    assert got[0].arrival.scope == "key"
    others = [
        {**turn, "model": "n"}, {**turn, "messages": [ASK, *LATER]},
        {"model": "m", "input": "Weather?"}, {**first, "system": "Be brief."},
    ]  # fmt: skip
    sessions = {resolve({}, body, "", infer=True).arrival.session for body in (turn, *others)}
    assert len(sessions) == 5
    assert resolve({"x-session-id": "s"}, turn, "", infer=True).family == "vllm"
    for nothing in ({"prompt": "p"}, {"messages": []}, {"messages": [SYSTEM]}, {"messages": 7}):
        assert resolve({}, nothing, "", infer=True).family is None


def test_our_own_headers_win_and_are_read_whole():
    """Nothing of another family is mixed in."""
    identity = resolve({**OWN, "x-claude-code-agent-id": "x"}, {"session_id": "other"}, "")
    arrival = identity.arrival
    assert identity.family == "autellix"
    assert arrival.session == "run"
    assert (arrival.thread, arrival.seq, arrival.attempt) == (3, 5, 2)
    assert arrival.parent == wire.ParentCall(0, 2)
    assert arrival.client_call == "c-1"
    assert arrival.thread_label is None


@pytest.mark.parametrize(
    ("role", "handicap_ms"),
    [("interactive", 0), ("delegated", 4_000), ("background", 32_000), ("urgent", 0), ("", 0)],
)
def test_a_role_can_only_lower(role: str, handicap_ms: int):
    """A role adds service on top of a number that the client gives; an unknown one adds nothing."""
    headers = {**OWN, "x-autellix-role": role}
    assert resolve(headers, {}, "").handicap_ms == handicap_ms
    assert resolve({**headers, "x-vllm-priority": "500"}, {}, "").handicap_ms == handicap_ms + 500
    assert resolve({**headers, "x-vllm-priority": "-500"}, {}, "").handicap_ms == handicap_ms
    ignored = resolve(headers, {}, "").malformed
    assert ignored == (() if handicap_ms or role == "interactive" else ("X-Autellix-Role",))


def test_a_list_of_parents_is_bounded():
    """The first is the fork, the others follow; one bad or one too many, and none is taken."""
    headers = {**OWN, "x-autellix-parent": "0:2,4:1"}
    arrival = resolve(headers, {}, "").arrival
    assert arrival.parent == wire.ParentCall(0, 2)
    assert arrival.follows == (wire.ParentCall(4, 1),)
    for bad in ("0:2,", "0:2,x", ",".join(["0:1"] * 17)):
        identity = resolve({**OWN, "x-autellix-parent": bad}, {}, "")
        assert identity.arrival.parent is None
        assert identity.malformed == ("X-Autellix-Parent",)


def test_fields_of_two_families_are_never_mixed():
    """A body session takes no thread from a harness header."""
    identity = resolve({"x-claude-code-agent-id": "a"}, {"session_id": "s"}, "")
    assert identity.family == "vllm_body"
    assert identity.arrival.thread_label is None


def test_nothing_means_untagged():
    """A plain OpenAI client: a program of its own."""
    identity = resolve({"user-agent": "OpenAI/Python 3.57.0"}, {"user": "me"}, "")
    assert identity.family is None
    assert identity.arrival.session is None


@pytest.mark.parametrize("name", wire.REQUEST_HEADERS)
@pytest.mark.parametrize(
    "garbage", ["", "x" * 129, "a b\x00", "\udcff", "é", "-1", "1e3", "9" * 99]
)
def test_garbage_in_our_headers_is_ignored_and_named(name, garbage):
    """No value can break the resolver; what is malformed is said."""
    identity = resolve({name.lower(): garbage}, {}, "")
    if not wire.is_valid_id(garbage):
        assert identity.arrival.session is None
        if name not in (wire.NODE, wire.CLIENT):
            assert identity.malformed == (name,)


@pytest.mark.parametrize(
    ("headers", "body", "handicap_ms"),
    [
        ({"x-vllm-priority": "500"}, {}, 500),
        ({"x-vllm-priority": "-500"}, {}, 0),
        ({"x-dynamo-request-priority": "-7"}, {}, 7),  # higher is sooner there
        ({"x-dynamo-request-priority": "7"}, {}, 0),
        ({"x-sglang-request-priority": "-3"}, {}, 3),
        ({}, {"priority": 66}, 66),
        ({}, {"priority": 10**23}, 2**40),
        ({}, {"priority": True}, 0),
        ({}, {"priority": 7.5}, 0),
        ({"x-vllm-priority": "garbage"}, {"priority": 4}, 4),
        ({"x-vllm-priority": "+-3"}, {}, 0),
        ({"x-vllm-priority": "9" * 5000}, {}, 0),
        ({}, {"nvext": {"agent_hints": {"priority": -2}}}, 2),
    ],
)  # fmt: skip
def test_a_client_can_only_lower_its_priority(headers, body, handicap_ms):
    """Polarity is converted; what would be sooner counts nothing."""
    assert resolve(headers, body, "").handicap_ms == handicap_ms


def test_the_engines_fields_leave_the_body():
    """What would win over the gateway's headers is taken out; the rest stays."""
    body = {"model": "m", "session_id": "s", "priority": 1, "request_id": "r",
            "kv_transfer_params": {}, "vllm_xargs": {"session_id": "s", "x": 1}}  # fmt: skip
    assert clean_body(body)
    assert body == {"model": "m", "vllm_xargs": {"x": 1}}
    assert not clean_body(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [n.lower() for n in wire.REQUEST_HEADERS]
    + [n for f in FAMILIES if f.source == "headers" for n in (*f.session, *f.thread, *f.marks)]
    + ["x-vllm-priority", "baggage", "x-stainless-retry-count"]
)
FIELDS = st.sampled_from(
    ["session_id", "vllm_xargs", "nvext", "program_id", "priority", "metadata", "messages"]
)


@given(
    st.dictionaries(NAMES, st.text(max_size=300), max_size=6),
    st.dictionaries(FIELDS, JSON, max_size=4),
)
def test_no_request_breaks_the_resolver(headers, body):
    """Whatever comes: an answer within bounds, and a body without engine fields."""
    identity = resolve(headers, body, "", infer=True)
    session = identity.arrival.session
    assert session is None or 0 < len(session.encode()) <= 256
    assert 0 <= identity.handicap_ms <= 2**40
    clean_body(body)
    assert not {"session_id", "priority"} & set(body)

"""The trace loader: what ships is sound, what is wrong is named by file and line."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from autellix.server.lab import trace

GOOD = {
    "program": "p",
    "source": "test",
    "kind": "chat",
    "arrival": None,
    "shared_prefix": {"group": "g", "tokens": 3},
    "calls": [
        {
            "id": 0,
            "parents": [],
            "prompt_tokens": 5,
            "output_tokens": 2,
            "cached_prefix_of": None,
            "prefix_tokens": 0,
            "tool_seconds_before": None,
        },
        {
            "id": 1,
            "parents": [0],
            "prompt_tokens": 9,
            "output_tokens": 1,
            "cached_prefix_of": 0,
            "prefix_tokens": 7,
            "tool_seconds_before": 1.5,
            "interrupt": "tool",
        },
    ],
}

# (programs, calls) as the sets' own README gives them.
SHIPPED = {
    "bfcl-gt": (384, 4049),
    "chat-real": (30, 160),
    "chat-sharegpt": (1013, 6807),
    "claude-code": (257, 18011),
    "lats": (98, 17037),
    "lmcache-miniswe": (9, 193),
    "mini-swe": (257, 10239),
    "mooncake-conversation": (4198, 5940),
    "tau-airline": (92, 1114),
}


def changed(*path: object, value: object) -> str:
    """Return GOOD as a line, with one field put to ``value``."""
    line = copy.deepcopy(GOOD)
    spot: object = line
    for key in path[:-1]:
        spot = spot[key]  # type: ignore[index]
    spot[path[-1]] = value  # type: ignore[index]
    return json.dumps(line)


def test_every_shipped_set_loads_with_its_known_size():
    """What ships is what its README says, and passes every check."""
    assert {n for n in trace.names() if n != "mixed"} == set(SHIPPED)
    for name, (programs, calls) in SHIPPED.items():
        loaded = trace.load(name)
        assert (len(loaded), sum(len(p.calls) for p in loaded)) == (programs, calls), name


def test_mixed_has_the_same_number_of_each_kind():
    """The mixed set samples its three sets equally, and always alike."""
    mixed = trace.load("mixed")
    kinds = [p.kind for p in mixed]
    assert kinds.count("chat") == kinds.count("react") == kinds.count("mcts") == 98
    assert mixed == trace.load("mixed")


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz", "t.jsonl.gz"])
def test_what_is_written_reads_back_the_same(tmp_path: Path, name: str):
    """Write and read are inverse, compressed or not."""
    programs = trace.load("lats")[:2] + trace.load("claude-code")[:2]
    assert trace.write(programs, tmp_path / name) == 4
    assert trace.load(str(tmp_path / name)) == programs


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ("[]", "a program is a JSON object"),
        (changed("messages", value="secret"), "unknown fields"),
        (changed("kind", value="poem"), "kind is 'poem'"),
        (changed("calls", value=[]), "at least one call"),
        (changed("calls", 1, "parents", value=[7]), r"call 1: parents \[7\] do not stand"),
        (changed("calls", 1, "id", value=0), "call 1: id 0 stands twice"),
        (changed("calls", 0, "output_tokens", value=0), "at least 1"),
        (changed("calls", 0, "prompt_tokens", value="5"), "prompt_tokens is '5', not int"),
        (changed("calls", 0, "prompt_tokens", value=True), "prompt_tokens is True, not int"),
        (changed("calls", 1, "prefix_tokens", value=10), "prefix_tokens 10 is not in 0"),
        (changed("calls", 1, "cached_prefix_of", value=4), "cached_prefix_of 4"),
        (changed("calls", 1, "tool_seconds_before", value=-1), "no number of seconds"),
        (changed("calls", 1, "interrupt", value="ghost"), "interrupt is 'ghost'"),
        (changed("shared_prefix", value={"group": "g"}), "group and tokens"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_reason(line: str, wrong: str):
    """The error says where and what, for every rule."""
    with pytest.raises(trace.TraceError, match=rf"^here\.jsonl:3: .*{wrong}"):
        list(trace.read([json.dumps(GOOD), "", line], "here.jsonl"))


def test_a_program_may_stand_only_once():
    """Two lines of one name are an error."""
    with pytest.raises(trace.TraceError, match=r"x:2: program 'p' stands twice"):
        list(trace.read([json.dumps(GOOD)] * 2, "x"))


def test_an_unknown_name_lists_the_known_ones():
    """The error helps."""
    with pytest.raises(trace.TraceError, match="bfcl-gt"):
        trace.load("no-such-trace")

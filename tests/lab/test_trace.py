"""The trace loader: what ships is sound, what is wrong is named by file and line."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import lzma
import re
from pathlib import Path

import pytest

from autellix.server.lab import cli, trace

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
        (changed("calls", 1, "parents", value=[[1]]), r"call 1: parents has \[\[?1\]?\], not int"),
        (changed("calls", 1, "parents", value=[False]), "call 1: parents has False, not int"),
        (changed("calls", 1, "cached_prefix_of", value=[0]), r"cached_prefix_of is \[0\], not int"),
        (changed("calls", 1, "role", value=5), "call 1: role is 5, not str"),
        (changed("calls", 1, "role", value={}), r"call 1: role is \{\}, not str"),
        (changed("role_prefixes", value=[]), r"role_prefixes is \[\], not dict"),
        (
            changed("role_prefixes", value={"a": {"group": "g", "tokens": -1}}),
            "role_prefixes 'a': tokens is -1, not in 0",
        ),
        ('{"program": ' + "9" * 5000 + "}", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        (" " * (trace.LINE_BYTES_MAX + 1) + "7", "longer than"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_reason(line: str, wrong: str):
    """The error says where and what, for every rule."""
    with pytest.raises(trace.TraceError, match=rf"^here\.jsonl:3: .*{wrong}"):
        list(trace.read([json.dumps(GOOD), "", line], "here.jsonl"))


# What each field may be, of the values below; all others are wrong.
WRONG = ([], {}, [[1]], True, -1, 1.5, 10**30, float("nan"), float("inf"), "ghost", None)
ALLOWED = {
    ("program",): ("ghost",),
    ("source",): ("ghost",),
    ("kind",): (),
    ("arrival",): (1.5, None),
    ("shared_prefix",): (None,),
    ("shared_prefix", "group"): ("ghost",),
    ("shared_prefix", "tokens"): (),
    ("role_prefixes",): ({}, None),
    ("role_prefixes", "a"): (None,),
    ("role_prefixes", "a", "tokens"): (),
    ("calls",): (),
    ("calls", 0): (),
    ("calls", 0, "id"): (),
    ("calls", 0, "parents"): ([],),
    ("calls", 0, "prompt_tokens"): (),
    ("calls", 0, "output_tokens"): (),
    ("calls", 0, "cached_prefix_of"): (None,),
    ("calls", 0, "prefix_tokens"): (),
    ("calls", 0, "tool_seconds_before"): (1.5, None),
    ("calls", 0, "interrupt"): (None,),
    ("calls", 0, "role"): ("ghost", None),
    ("calls", 0, "thread"): ("ghost", None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"), list(itertools.product(ALLOWED, WRONG)), ids=lambda part: repr(part)[:50]
)
def test_a_field_of_a_wrong_type_or_size_is_named(path: tuple[str | int, ...], value: object):
    """Every field, with every kind of wrong value: an error of one line, never a traceback."""
    with_roles = json.loads(changed("role_prefixes", value={"a": {"group": "g", "tokens": 1}}))
    spot = with_roles
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = value
    lines = [json.dumps(with_roles)]
    if any(value is good or value == good for good in ALLOWED[path] if value is not True):
        (program,) = trace.read(lines, "x")
        assert tuple(trace.read([json.dumps(trace.to_json(program))], "x")) == (program,)
        return
    name = next(str(key) for key in reversed(path) if isinstance(key, str))
    with pytest.raises(trace.TraceError, match=rf"^x:1: .*{name.rstrip('s')}") as caught:
        list(trace.read(lines, "x"))
    assert len(str(caught.value)) < 200


GOOD_BYTES = json.dumps(GOOD).encode() + b"\n"
# A second program, so that both packed files are long enough to lose their end.
TWO = GOOD_BYTES + GOOD_BYTES.replace(b'"p"', b'"' + bytes(range(97, 123)) * 9 + b'"')


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("t.jsonl.xz", b"this is no xz", "t.jsonl.xz:1: cannot be read: "),
        ("t.jsonl.xz", lzma.compress(TWO)[:-30], "t.jsonl.xz:[1-3]: cannot be read: "),
        ("t.jsonl.gz", b"this is no gzip", "t.jsonl.gz:1: cannot be read: "),
        ("t.jsonl.gz", gzip.compress(TWO, mtime=0)[:-30], "t.jsonl.gz:[1-3]: cannot be read: "),
        (
            "t.jsonl.gz",
            gzip.compress(TWO, mtime=0)[:10] + b"\xff" * 40,
            "t.jsonl.gz:1: cannot be read: ",
        ),
        ("t.jsonl", GOOD_BYTES + b'{"program": "\xff"}\n', "t.jsonl:2: not UTF-8: "),
        ("t.jsonl", GOOD_BYTES + b" " * (trace.LINE_BYTES_MAX + 1), "t.jsonl:2: longer than"),
        ("t.jsonl", b"\n", "t.jsonl: there is no program in it"),
    ],
    ids=("no xz", "cut xz", "no gzip", "cut gzip", "broken gzip", "not UTF-8", "long", "empty"),
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys, name: str, content: bytes, wrong: str
):
    """The command says it in one line, with the line's number, and its status is 2."""
    (tmp_path / name).write_bytes(content)
    assert cli.trace(["check", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert re.match(f"autellix trace: {wrong}", error)
    assert error.count("\n") == 1


def test_a_program_may_stand_only_once():
    """Two lines of one name are an error."""
    with pytest.raises(trace.TraceError, match=r"x:2: program 'p' stands twice"):
        list(trace.read([json.dumps(GOOD)] * 2, "x"))


def test_an_unknown_name_lists_the_known_ones():
    """The error helps."""
    with pytest.raises(trace.TraceError, match="bfcl-gt"):
        trace.load("no-such-trace")


def test_a_long_wrong_value_is_cut():
    """An error stays short, however long the value is that it shows."""
    for path in (("kind",), ("calls", 0, "role")):
        long = "x" * 10_000 if path == ("kind",) else ["x" * 10_000] * 9
        with pytest.raises(trace.TraceError, match=f"{path[-1]} is .*xxx.*, not ") as caught:
            list(trace.read([changed(*path, value=long)], "x"))
        assert len(str(caught.value)) < 500

"""What travels to an engine: sealed programs and tagged calls."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autellix.server.call_tag import (
    CallTag,
    find_call,
    format_call,
    seal_program,
    unseal_program,
)
from autellix.server.lab.run_state import CallRun

HEX = st.text("0123456789abcdef", min_size=8, max_size=40)


@given(HEX, st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_a_seal_opens_with_its_key_alone(program_id, key, other):
    """Another key makes another seal."""
    sealed = seal_program(program_id, key)
    assert unseal_program(sealed, key) == program_id
    if other != key:
        assert unseal_program(sealed, other) in (None, program_id)
        assert unseal_program(sealed[:-1] + ("0" if sealed[-1] != "0" else "1"), key) is None


@given(
    HEX, st.integers(0, 10**9 - 1), st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1),
    st.integers(10, 100_000), st.none() | st.integers(0, 10**15 - 1),
    st.none() | st.text("0123456789abcdef", min_size=12, max_size=12),
    st.none() | st.booleans(),
)  # fmt: skip
def test_a_tag_is_found_in_what_vllm_makes_of_it(
    call_id, thread, wait_ms, arrival_ms, weight, deadline_ms, kind, by_path
):
    """Every form in which vLLM passes a request id on."""
    tag = CallTag(call_id, thread, wait_ms, arrival_ms, weight / 1000, deadline_ms, kind, by_path)
    text = format_call(tag)
    for form in ("chatcmpl-{}-bc4ca7c3", "0_chatcmpl-{}-d0a0b0c0", "cmpl-{}-1-99", "resp_{}_0-f0"):
        assert find_call(form.format(text)) == tag


@pytest.mark.parametrize("by_path", [True, False, None])
def test_an_engine_of_an_earlier_version_reads_all_but_the_measure(by_path):
    """Its pattern knows no measure, and would stop in front of it."""
    earlier = re.compile(
        r"ax1-([0-9a-f]{8,40})-(\d{1,9})-(\d{1,15})-(\d{1,15})(?![\d])"
        r"(?:-w(\d{1,6}))?(?:-u(\d{1,15}))?(?:-k([0-9a-f]{12}))?"
    )
    text = format_call(CallTag("c0ffee00", 2, 1500, 99, 2.5, 4000, "0123456789ab", by_path))
    match = earlier.search(f"chatcmpl-{text}-bc4ca7c3")
    assert match is not None
    assert match.groups() == ("c0ffee00", "2", "1500", "99", "2500", "4000", "0123456789ab")


def test_a_tag_of_an_earlier_gateway_does_not_say_its_measure():
    """Hence it is None: a path that is taken for a sum would stay in the engine's books."""
    earlier = "ax1-c0ffee00-2-1500-99-w2500-u4000-k0123456789ab"
    tag = find_call(f"chatcmpl-{earlier}-bc4ca7c3")
    assert tag == CallTag("c0ffee00", 2, 1500, 99, 2.5, 4000, "0123456789ab", None)


def test_the_longest_tag_is_short():
    """It is in every id that vLLM makes of it, in logs and in keys of dictionaries."""
    longest = CallTag(
        "c" * 40, 10**9 - 1, 10**15 - 1, 10**15 - 1, 999.999, 10**15 - 1, "0" * 12, True
    )
    assert len(format_call(longest)) < 128


def test_the_lab_says_that_its_waits_are_sums():
    """It adds up the waits of a program's calls, whatever policy its engine has."""
    program = SimpleNamespace(
        number=1, arrival_s=2.0, wait_s=1.5, program=SimpleNamespace(calls=[SimpleNamespace(id=7)])
    )
    tag = find_call(CallRun(program, 0, None, 3.0).request_id)
    assert tag is not None
    assert (tag.wait_ms, tag.by_path) == (1500, False)


@pytest.mark.parametrize("text", ["", "ax1-", "resp_01", "ax1-xyz-1-2-3", "ax1-c0ffee00-1-2"])
def test_anything_else_is_no_tag(text):
    """A foreign id is not mistaken for one."""
    assert find_call(text) is None


@given(st.text(max_size=200))
def test_no_text_opens_as_a_program_by_chance(text):
    """A client's own session id is never a sealed one."""
    assert unseal_program(text, b"key") is None

"""What travels to an engine: sealed programs and tagged calls."""

from __future__ import annotations

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
    st.none() | st.text("0123456789abcdef", min_size=12, max_size=12), st.booleans(),
)  # fmt: skip
def test_a_tag_is_found_in_what_vllm_makes_of_it(
    call_id, thread, wait_ms, arrival_ms, weight, deadline_ms, kind, by_path
):
    """Every form in which vLLM passes a request id on."""
    tag = CallTag(call_id, thread, wait_ms, arrival_ms, weight / 1000, deadline_ms, kind, by_path)
    text = format_call(tag)
    for form in ("chatcmpl-{}-bc4ca7c3", "0_chatcmpl-{}-d0a0b0c0", "cmpl-{}-1-99", "resp_{}_0-f0"):
        assert find_call(form.format(text)) == tag


@pytest.mark.parametrize("text", ["", "ax1-", "resp_01", "ax1-xyz-1-2-3", "ax1-c0ffee00-1-2"])
def test_anything_else_is_no_tag(text):
    """A foreign id is not mistaken for one."""
    assert find_call(text) is None


@given(st.text(max_size=200))
def test_no_text_opens_as_a_program_by_chance(text):
    """A client's own session id is never a sealed one."""
    assert unseal_program(text, b"key") is None

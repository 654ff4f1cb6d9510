"""Keep, swap, recompute or drop: the cheapest by what was measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autellix.server.swap.choose import Choice, Speeds, Victim, choose

FAST_LINK = Speeds(out_bytes_s=2e10, in_bytes_s=2e10, prefill_tokens_s=2000.0)


def victim(**changes: object) -> Victim:
    """A call of 1,000 tokens in blocks of 16 with 128 KiB each, on a full device."""
    base = Victim(1000, 16, 1 << 17, 0, 0, prefix_cache=True)
    return base._replace(**changes)


def test_a_fast_link_swaps():
    """0.8 ms a way against half a second of prefill."""
    assert choose(victim(), FAST_LINK).choice is Choice.SWAP


def test_a_slow_link_recomputes():
    """A link slower than prefill is not used."""
    slow = FAST_LINK._replace(out_bytes_s=1e6, in_bytes_s=1e6)
    assert choose(victim(), slow).choice is Choice.RECOMPUTE


def test_with_room_on_the_device_whole_blocks_are_kept():
    """Only slots are short: the prefix cache will have the blocks."""
    roomy = victim(tokens=992, free_device_blocks=10_000)
    assert choose(roomy, FAST_LINK).choice is Choice.KEEP
    assert choose(roomy._replace(prefix_cache=False), FAST_LINK).choice is Choice.SWAP


def test_a_long_tail_outside_the_prefix_cache_is_swapped():
    """The last, partial block is lost by keeping; if that costs more, all is swapped."""
    roomy = victim(tokens=1015, block_tokens=128, free_device_blocks=10_000)
    assert choose(roomy, FAST_LINK).choice is Choice.SWAP


def test_without_measurements_it_swaps():
    """The first victim yields the first measurement."""
    assert choose(victim(), Speeds()).choice is Choice.SWAP


def test_a_call_that_will_not_resume_is_dropped():
    """Nobody will ask for its blocks."""
    assert choose(victim(resumes=False), Speeds()).choice is Choice.DROP


def test_a_fresh_call_has_nothing_to_swap():
    """No token computed, no block to move."""
    assert choose(victim(tokens=0), Speeds()).choice is Choice.RECOMPUTE


@given(st.floats(1e6, 1e11), st.floats(1.0, 1e5), st.integers(1, 10_000))
def test_a_faster_link_never_turns_a_swap_into_recomputing(link, prefill, tokens):
    """The choice is monotonic in the speed of the link."""
    call = victim(tokens=tokens)
    now = choose(call, Speeds(link, link, prefill)).choice
    faster = choose(call, Speeds(2 * link, 2 * link, prefill)).choice
    assert now is not Choice.SWAP or faster is Choice.SWAP


def test_speeds_are_blended_where_both_are_known():
    """A missing figure does not erase a known one."""
    old = Speeds(100.0, None, 10.0)
    assert old.blend(Speeds(200.0, 50.0, None), share=0.5) == Speeds(150.0, 50.0, 10.0)

"""The KV tokens of a program: shared ones once, siblings together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autellix.server.policy.working_set import WorkingSet, common_blocks

SIZE = 10


def chain(*names: str) -> list[str]:
    """Return block hashes: each stands for all blocks before it."""
    return ["/".join(names[: n + 1]) for n in range(len(names))]


@given(st.lists(st.sampled_from("ab")), st.lists(st.sampled_from("ab")))
def test_common_blocks_by_bisection_is_what_a_scan_finds(first, second):
    """On chains, where a block is like another only if all before it are."""
    left, right = chain(*first), chain(*second)
    scanned = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        scanned += 1
    assert common_blocks(left, right) == scanned


def test_a_chat_grows_and_its_past_counts_once():
    """The second prompt holds the first one and its answer."""
    working_set = WorkingSet()
    own = working_set.enter(chain(*"abc"), 30, 10, SIZE, ())
    assert working_set.beside(0) == 40
    working_set.leave(own, 0)
    assert working_set.beside(0) == 40  # it stays in the cache
    working_set.enter(chain(*"abcdef"), 60, 10, SIZE, ())
    assert working_set.beside(0) == 70


def test_siblings_share_their_trunk():
    """Five calls on one prompt of 100 tokens, 10 of their own each."""
    working_set = WorkingSet()
    trunk = [f"t{n}" for n in range(10)]
    for sibling in range(5):
        working_set.enter(chain(*trunk, f"own{sibling}"), 110, 20, SIZE, ())
    assert working_set.beside(0) == 5 * 30 + 100


def test_a_program_that_is_never_idle_does_not_count_what_is_long_past():
    """One call always overlaps with the next one: the sum stays that of two calls."""
    working_set = WorkingSet()
    before = working_set.enter(chain("first"), 10, 5, SIZE, ())
    for number in range(100):
        own = working_set.enter(chain(f"next{number}"), 10, 5, SIZE, ())
        working_set.leave(before, 0)
        before = own
        assert working_set.beside(0) <= 30


def test_what_a_kind_shares_is_not_the_programs():
    """A system prompt of 50 tokens that another program begins with as well."""
    working_set = WorkingSet()
    working_set.enter(chain(*"sssssx"), 60, 0, SIZE, chain(*"sssssy"))
    assert working_set.kind_tokens == 50
    assert working_set.beside(50) == 10
    assert working_set.beside(20) == 40  # no more than is counted for the kind


def test_what_goes_first_is_what_nobody_else_begins_with():
    """The kind's part stays; of a program like no other its first prompt stays as well."""
    working_set = WorkingSet()
    own = working_set.enter(chain(*"ssx"), 30, 0, SIZE, chain(*"ssy"))
    working_set.leave(own, 0)
    working_set.enter(chain(*"ssxz"), 40, 0, SIZE, chain(*"ssy"))
    assert working_set.own_chains(chain(*"ssy")) == [chain(*"ssx")[2:], chain(*"ssxz")[3:]]
    working_set.forget()
    assert working_set.own_chains(chain(*"ssy")) == []
    alone = WorkingSet()
    own = alone.enter(chain(*"pq"), 20, 0, SIZE, ())
    alone.leave(own, 0)
    alone.enter(chain(*"pqr"), 30, 0, SIZE, ())
    assert alone.own_chains(None) == [chain(*"pqr")[2:]]

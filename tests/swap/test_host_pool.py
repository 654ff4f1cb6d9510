"""The pool's books: no slot is lost, shared or kept by mistake, whatever the order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from autellix.server.swap.host_pool import HostPool, SlotRef

OWNERS = st.sampled_from([f"call{i}" for i in range(6)])
KEYS = st.lists(
    st.one_of(st.none(), st.sampled_from([bytes([i]) for i in range(5)])), min_size=0, max_size=5
)


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool beside a plain model of it: what each call believes it stored where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(8)
        self.content: dict[SlotRef, object] = {}
        self.believed: dict[str, list[tuple[SlotRef, object]]] = {}
        self.unique = 0

    @rule(owner=OWNERS, keys=KEYS)
    def reserve(self, owner: str, keys: list[bytes | None]) -> None:
        if owner in self.believed:
            self.pool.release(owner)
            del self.believed[owner]
        free, stored = self.pool.free_count, self.pool.stored_count(set(keys))
        distinct = len({k for k in keys if k is not None}) - stored + keys.count(None)
        got = self.pool.reserve(owner, keys)
        if not keys or distinct > free:
            assert got is None
            assert self.pool.free_count == free
            return
        assert got is not None
        assert len(got.fresh) == distinct == free - self.pool.free_count
        beliefs = []
        for index, key in enumerate(keys):
            self.unique += 1
            wanted: object = key if key is not None else self.unique
            if index in got.fresh:
                self.content[got.slots[index]] = wanted
            beliefs.append((got.slots[index], wanted))
        self.believed[owner] = beliefs

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        self.pool.release(owner)
        self.believed.pop(owner, None)

    @rule(owner=OWNERS)
    def late_release_of_an_earlier_generation(self, owner: str) -> None:
        found = self.pool.find(owner)
        if found is not None:
            assert self.pool.release(owner, found.generation - 1) == 0
            assert self.pool.find(owner) == found

    @rule(slot=st.integers(0, 7), data=st.data())
    def fail(self, slot: int, data: st.DataObject) -> None:
        held = [ref for b in self.believed.values() for ref, _ in b if ref.slot_id == slot]
        ref = data.draw(st.sampled_from(held)) if held else SlotRef(slot, 10**9)
        losers = self.pool.fail([ref])
        assert set(losers) == {o for o, b in self.believed.items() if ref in dict(b)}
        for owner in losers:
            del self.believed[owner]

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.believed.clear()
        assert self.pool.free_count == self.pool.slot_count

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check_integrity()
        assert self.pool.owner_count == len(self.believed)
        for owner, beliefs in self.believed.items():
            found = self.pool.find(owner)
            assert found is not None
            assert [ref for ref, _ in beliefs] == list(found.slots)
            for ref, wanted in beliefs:
                assert self.content[ref] == wanted, "a slot holds another block"


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_shared_prefix_is_stored_once_and_lives_as_long_as_its_last_owner():
    """Two calls with the same prefix take its blocks once; the second keeps them."""
    pool = HostPool(4)
    first = pool.reserve("a", [b"p", b"q", None])
    second = pool.reserve("b", [b"p", b"q", None])
    assert first is not None
    assert second is not None
    assert second.fresh == (2,)
    assert second.slots[:2] == first.slots[:2]
    assert pool.free_count == 0
    assert pool.release("a") == 1
    assert pool.holds(second.slots[0])
    assert pool.release("b") == 3


def test_a_full_pool_says_no_and_changes_nothing():
    """Reserving is all or nothing."""
    pool = HostPool(2)
    assert pool.reserve("a", [None]) is not None
    assert pool.reserve("b", [None, None]) is None
    assert pool.find("b") is None
    assert pool.free_count == 1


def test_a_slot_never_comes_back_under_the_same_stamp():
    """An old reference does not match the slot's next use."""
    pool = HostPool(1)
    old = pool.reserve("a", [None])
    assert old is not None
    pool.release("a")
    new = pool.reserve("b", [None])
    assert new is not None
    assert new.slots[0].slot_id == old.slots[0].slot_id
    assert not pool.holds(old.slots[0])
    assert pool.fail(old.slots) == ()
    assert pool.find("b") == new


def test_a_call_cannot_reserve_twice():
    """The caller releases first: forgetting it is a programmer's error."""
    pool = HostPool(4)
    pool.reserve("a", [None])
    with pytest.raises(AssertionError, match="holds slots already"):
        pool.reserve("a", [None])

"""KV of programs between two calls: who takes it along, who goes when the pool is full."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.swap import shelf as shelf_module
from autellix.server.swap.host_pool import HostPool
from autellix.server.swap.shelf import Shelf


def chain(*names: str) -> list[bytes]:
    """Return hashes of blocks; each names all before it."""
    return ["/".join(names[: n + 1]).encode() for n in range(len(names))]


def test_a_call_takes_what_it_begins_with():
    """The program's history was cut: what follows is another one's."""
    pool = HostPool(8)
    shelf = Shelf(pool)
    shelf.put("p", chain(*"abcd"), 3)
    taken = shelf.take("p", chain(*"abxy"), "call")
    assert taken is not None
    assert (len(taken.reservation.slots), taken.step) == (2, 3)
    assert (pool.free_count, len(shelf)) == (6, 0)
    pool.release("call")
    pool.check_integrity()
    assert pool.free_count == 8


def test_a_call_of_another_thread_leaves_it_there():
    """It has nothing in common with what is there; the one that has comes later."""
    pool = HostPool(8)
    shelf = Shelf(pool)
    shelf.put("p", chain(*"abcd"), 1)
    assert shelf.take("p", chain(*"xy"), "other") is None
    assert shelf.take("q", chain(*"abcd"), "stranger") is None
    assert shelf.take("p", chain(*"abcde"), "call") is not None


def test_what_is_shared_lies_there_once():
    """Three programs with a system prompt of two blocks."""
    pool = HostPool(8)
    shelf = Shelf(pool)
    for name in "pqr":
        assert shelf.put(name, chain("s", "t", name), 1) is not None
    assert pool.free_count == 8 - 5
    for name in "pqr":
        shelf.drop(name)
    assert pool.free_count == 8


def test_the_oldest_goes_first_and_nobody_in_vain():
    """Room is made for what fits; for what never fits nobody goes."""
    pool = HostPool(6)
    shelf = Shelf(pool)
    pool.reserve("call", [None, None])
    shelf.put("old", chain(*"ab"), 1)
    shelf.put("new", chain(*"cd"), 2)
    assert shelf.put("large", chain(*"vwxyz"), 3) is None
    assert "old" in shelf
    assert "new" in shelf
    assert shelf.put("fits", chain(*"ef"), 4) is not None
    assert "old" not in shelf
    assert "new" in shelf
    assert shelf.dropped == 1
    assert shelf.make_room([None, None])
    assert "new" not in shelf


def test_a_shared_prompt_does_not_empty_the_shelf_in_vain():
    """Three programs share six blocks: they hold nine slots, not 21, and eleven never fit."""
    pool = HostPool(10)
    shelf = Shelf(pool)
    for name in "pqr":
        assert shelf.put(name, chain(*"stuvwx", name), 1) is not None
    assert not shelf.make_room(chain(*"abcdefghijk"))
    assert len(shelf) == 3


def test_newer_blocks_take_the_place_of_older_ones():
    """A program has one place."""
    pool = HostPool(8)
    shelf = Shelf(pool)
    shelf.put("p", chain(*"abc"), 1)
    shelf.put("p", chain(*"abcd"), 5)
    assert pool.free_count == 4
    taken = shelf.take("p", chain(*"abcd"), "call")
    assert taken is not None
    assert taken.step == 5


def test_newer_blocks_that_do_not_fit_leave_the_older_ones():
    """The next call begins with those all the same."""
    pool = HostPool(4)
    shelf = Shelf(pool)
    shelf.put("p", chain(*"ab"), 1)
    pool.reserve("call", [None])
    assert shelf.put("p", chain(*"abcde"), 5) is None
    assert shelf.put("p", chain(*"xyzw"), 6) is None, "a slot of the four is a call's"
    taken = shelf.take("p", chain(*"abc"), "next")
    assert taken is not None
    assert (len(taken.reservation.slots), taken.step) == (2, 1)


def test_room_is_made_with_one_count_of_what_is_needed(monkeypatch):
    """However many have to go; a call of 1,900 blocks would stop the engine for a second."""
    pool = HostPool(64)
    shelf = Shelf(pool)
    for number in range(64):
        shelf.put(f"p{number}", chain(f"p{number}"), 1)
    counted: list[int] = []
    need = pool.need
    monkeypatch.setattr(pool, "need", lambda keys: counted.append(1) or need(keys))
    assert shelf.make_room([None] * 60)
    assert len(shelf) == 4
    assert len(counted) == 1


def test_what_goes_may_be_of_the_blocks_that_need_room():
    """Two of the three blocks lie there, until the oldest goes for the third."""
    pool = HostPool(5)
    shelf = Shelf(pool)
    shelf.put("p", chain(*"ab"), 1)
    shelf.put("q", chain("x"), 1)
    shelf.put("r", chain("y"), 1)
    pool.reserve("call", [None])
    assert shelf.make_room(chain(*"abc"))
    assert "p" not in shelf
    assert "q" not in shelf
    assert pool.reserve("saved", chain(*"abc")) is not None


def test_programs_are_bounded_too(monkeypatch):
    """Many may share one slot."""
    monkeypatch.setattr(shelf_module, "PROGRAMS_MAX", 3)
    shelf = Shelf(HostPool(8))
    for number in range(5):
        shelf.put(f"p{number}", chain("s"), 1)
    assert len(shelf) == 3
    assert "p1" not in shelf
    assert shelf.dropped == 2


def test_a_gather_that_failed_leaves_nothing():
    """The pool took the slots of all who share one that was never filled."""
    pool = HostPool(8)
    shelf = Shelf(pool)
    reservation = shelf.put("p", chain(*"ab"), 1)
    shelf.put("q", chain("a", "c"), 1)
    shelf.put("r", chain("z"), 1)
    assert reservation is not None
    losers = pool.fail([reservation.slots[0]])
    assert [shelf.lost(owner) for owner in losers] == [True, True]
    assert not shelf.lost("some call")
    assert (len(shelf), pool.free_count) == (1, 7)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_slots_are_conserved(seed: int):
    """Programs come, go on, end, are pushed out; calls save beside them; nothing is lost."""
    rng = random.Random(seed)
    pool = HostPool(rng.randrange(1, 12))
    shelf = Shelf(pool)
    saved: list[str] = []
    for number in range(60):
        program = f"p{rng.randrange(4)}"
        keys = chain(*(rng.choice("ab") for _ in range(rng.randrange(1, 6))))
        match rng.randrange(5):
            case 0:
                shelf.put(program, keys, number)
            case 1 if shelf.take(program, keys, f"call{number}") is not None:
                saved.append(f"call{number}")
            case 2:
                shelf.drop(program)
            case 3 if shelf.make_room(keys):
                assert pool.reserve(f"call{number}", keys) is not None
                saved.append(f"call{number}")
            case 4 if saved:
                pool.release(saved.pop(rng.randrange(len(saved))))
        pool.check_integrity()
        assert pool.owner_count == len(shelf) + len(saved)
    for name in saved:
        pool.release(name)
    for number in range(4):
        shelf.drop(f"p{number}")
    assert pool.free_count == pool.slot_count

"""Whom to take out of the batch: lowest level, least lost, nobody in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autellix.server.policy.victim import (
    MISFITS_MAX,
    Running,
    Waiting,
    choose_for_room,
    choose_victims,
)


def running(*calls: tuple[int, int]) -> list[Running]:
    """Return calls of (level, lost tokens)."""
    return [Running(level, lost, False, n) for n, (level, lost) in enumerate(calls)]


def choose(waiting, batch, *, slots=0, blocks=100, freed=10) -> list[int]:
    return choose_victims(
        [Waiting(*call) for call in waiting],
        batch,
        slots=slots,
        blocks=blocks,
        blocks_of=lambda number: freed,
    ).victims


def test_the_lowest_level_goes_first_then_who_loses_least():
    """Three calls of level 3: the one with the least work; then the next."""
    batch = running((3, 50), (2, 1), (3, 20), (3, 30))
    assert choose([(1, 5)], batch) == [2]
    assert choose([(1, 5), (1, 5)], batch) == [2, 3]


def test_nobody_gives_way_where_there_is_room():
    """Slots and blocks are free."""
    assert choose([(1, 5), (1, 5)], running((3, 1)), slots=2) == []


def test_never_inside_a_level_and_never_upwards():
    """Only a strictly higher level takes a place."""
    assert choose([(3, 5)], running((3, 1), (2, 1))) == []


def test_protected_calls_stay():
    """In its cool-down a call is no victim."""
    batch = [Running(4, 1, True, 0), Running(3, 9, False, 1)]
    assert choose([(1, 5)], batch) == [1]


def test_nobody_gives_way_in_vain():
    """What would not fit even without them all costs nobody his place; a smaller one is helped."""
    batch = running((3, 1), (3, 2))
    assert choose([(1, 500)], batch, slots=1, blocks=0) == []
    assert choose([(1, 500), (2, 10)], batch, slots=1, blocks=0) == [0]
    assert choose([(1, 500)] * MISFITS_MAX + [(2, 10)], batch, slots=1, blocks=0) == []


def test_victims_that_turn_out_not_to_be_needed_stay():
    """A big one that frees enough alone spares the small ones that were taken before it."""
    freed = {0: 2, 1: 2, 2: 50}
    victims = choose_victims(
        [Waiting(1, 50)],
        running((5, 1), (5, 2), (5, 3)),
        slots=3,
        blocks=0,
        blocks_of=lambda number: freed[number],
    )
    assert victims.victims == [2]


def test_room_for_the_others_is_made_by_the_worst_but_one_stays():
    """Whatever the levels; protection yields if there is no other way."""
    batch = [Running(1, 9, False, 0), Running(3, 9, False, 1), Running(4, 9, True, 2)]
    assert choose_for_room(batch, blocks=5, blocks_of=lambda number: 10) == [1]
    assert choose_for_room(batch, blocks=500, blocks_of=lambda number: 10) == [1, 0]
    assert choose_for_room(batch[:1], blocks=5, blocks_of=lambda number: 10) == []


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=12),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30), st.booleans()), max_size=12),
    st.integers(0, 4),
    st.integers(0, 40),
)
def test_every_choice_is_paid_for(waiting, batch, slots, blocks):
    """Victims are unprotected, each once, and of a lower level than the best waiting call."""
    waiting.sort()
    calls = [Running(*call, n) for n, call in enumerate(batch)]
    victims = choose_victims(
        [Waiting(*call) for call in waiting],
        calls,
        slots=slots,
        blocks=blocks,
        blocks_of=lambda number: calls[number].lost_tokens,
    ).victims
    assert len(set(victims)) == len(victims)
    for number in victims:
        assert not calls[number].protected
        assert calls[number].level > waiting[0][0]

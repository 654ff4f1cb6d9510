"""The waiting queue: vLLM's interface, the policy's order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from autellix.server.engine.waiting import PASSED_MAX, WaitingQueue


@dataclass(eq=False)
class Item:
    """Stands for a request."""

    level: int
    number: int
    size: int = 0

    @property
    def key(self) -> tuple[int, float, int]:
        return (self.level, 0.0, self.number)


def queue_of(*items: Item, fits=None, skip_steps: int = 0) -> WaitingQueue:
    queue = WaitingQueue(lambda item: item.key, fits, skip_steps)
    for item in items:
        queue.add_request(item)
    queue.begin_step()
    return queue


def drain(queue: WaitingQueue) -> list[Item]:
    items = []
    while queue:
        shown = queue.peek_request()
        items.append(queue.pop_request())
        assert items[-1] is shown
    return items


def test_best_first():
    """Whatever the order in which they came."""
    items = [Item(2, 1), Item(1, 3), Item(1, 2), Item(3, 0)]
    assert drain(queue_of(*items)) == sorted(items, key=lambda item: item.key)


def test_peek_from_nothing():
    """As vLLM's own queues."""
    with pytest.raises(IndexError):
        queue_of().peek_request()


def test_a_call_that_does_not_fit_is_passed_over_for_some_steps_only():
    """Then it keeps its place, and nobody passes it any more."""
    big, small = Item(1, 0, size=9), Item(2, 1, size=1)
    queue = queue_of(big, small, fits=lambda item: item.size < 5, skip_steps=2)
    for _ in range(2):
        assert queue.peek_request() is small
        queue.end_step()
        queue.begin_step()
    assert not queue
    assert len(queue) == 2


def test_only_so_many_are_passed_over_in_a_step():
    """Looking costs time."""
    items = [Item(1, n, size=9) for n in range(PASSED_MAX + 1)]
    queue = queue_of(*items, Item(2, 99), fits=lambda item: item.size < 5, skip_steps=9)
    assert not queue
    assert len(queue) == PASSED_MAX + 2


def test_what_is_shown_is_what_is_popped_though_room_shrinks():
    """The front does not change between vLLM's look and its pop."""
    room = [9]
    item = Item(1, 0, size=5)
    queue = queue_of(item, Item(2, 1), fits=lambda item: item.size < room[0], skip_steps=9)
    assert queue.peek_request() is item
    room[0] = 1
    assert queue.pop_request() is item


def test_a_held_call_is_back_after_the_step():
    """It counts, and is not shown."""
    victim = Item(1, 0)
    queue = queue_of(victim)
    queue.hold(victim)
    assert not queue
    assert (len(queue), victim in queue) == (1, True)
    queue.end_step()
    assert drain(queue) == [victim]


def test_random_operations_against_a_list():
    """Add, pop, remove, move, hold, end of step: always the best of those that are shown."""
    rng = random.Random(5)
    queue = queue_of()
    shown: list[Item] = []
    held: list[Item] = []
    for number in range(20_000):
        dice = rng.random()
        if dice < 0.4:
            item = Item(rng.randint(1, 8), number)
            queue.add_request(item)
            shown.append(item)
        elif dice < 0.6 and shown:
            queue.begin_step()
            best = min(shown, key=lambda item: item.key)
            assert queue.pop_request() is best
            shown.remove(best)
        elif dice < 0.8 and shown:
            item = rng.choice(shown)
            item.level = rng.randint(1, 8)
            queue.moved(item)
        elif dice < 0.9 and shown:
            gone = rng.sample(shown, min(len(shown), 3))
            queue.remove_requests(gone)
            shown = [item for item in shown if item not in gone]
        elif dice < 0.95 and shown:
            item = shown.pop(rng.randrange(len(shown)))
            queue.hold(item)
            held.append(item)
        else:
            queue.end_step()
            shown += held
            held.clear()
            assert list(queue) == sorted(shown, key=lambda item: item.key)
        assert len(queue) == len(shown) + len(held)
        if not held:
            for level in range(1, 9):
                assert queue.count(level) == sum(item.level == level for item in shown)
    assert len(queue._heap) <= 4 * len(shown) + 1000

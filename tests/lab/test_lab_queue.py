"""The lab's waiting queue keeps its order under every operation."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "pop", "remove", "move"]), st.integers(0, 20)), max_size=60
)


@given(OPERATIONS, st.lists(st.integers(0, 5), min_size=21, max_size=21))
@settings(max_examples=150, deadline=None)
def test_the_queue_is_a_sorted_list(operations, keys):
    """Whatever comes, goes or changes its key, the head is the least key, earliest entry."""
    from autellix.server.lab.lab_queue import OrderedQueue

    runs = {str(n): SimpleNamespace(key=key) for n, key in enumerate(keys)}
    requests = {n: SimpleNamespace(request_id=str(n)) for n in range(21)}
    queue = OrderedQueue(lambda run: (run.key,), runs)
    model: list[tuple[int, int, int]] = []
    for order, (what, n) in enumerate(operations):
        inside = [m for m in model if m[2] == n]
        if what == "add" and not inside:
            queue.add_request(requests[n])
            model.append((runs[str(n)].key, order, n))
        elif what == "pop" and model:
            assert queue.pop_request() is requests[min(model)[2]]
            model.remove(min(model))
        elif what == "remove" and inside:
            queue.remove_request(requests[n])
            model.remove(inside[0])
        elif what == "move":
            runs[str(n)].key = (runs[str(n)].key + 3) % 6
            queue.rekey([str(n)])
            if inside:
                model.remove(inside[0])
                model.append((runs[str(n)].key, order, n))
        assert len(queue) == len(model)
        assert [int(r.request_id) for r in queue] == [n for _, _, n in sorted(model)]

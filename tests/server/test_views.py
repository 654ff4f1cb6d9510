"""Rows of programs and engines, and how fairness is figured."""

from __future__ import annotations

from autellix.server import views
from tests.gateway.dashboard.scene import Scene, add_story


def row_of(scene: Scene, session: str) -> dict[str, object]:
    """Return a program's row by its fields' names."""
    program = views.find_program(scene.table, session)
    assert program is not None
    return views.as_dict(views.row_of(program, scene.now_s))


def test_a_row_has_what_people_ask_for():
    """Name, framework, state, level, calls, service, wait, engine, slowdown."""
    scene = Scene()
    scene.program("s", "agent", "LangGraph")
    call = scene.begin("s", engine="e1")
    row = row_of(scene, "s")
    assert (row["state"], row["in_flight"], row["slowdown"]) == ("active", 1, None)
    scene.advance(4.01)
    scene.end(*call, [(1.0, "run", 3, "fresh")])
    row = row_of(scene, "s")
    assert (row["name"], row["framework"], row["engine"]) == ("agent", "LangGraph", "e1")
    assert (row["state"], row["level"], row["calls"]) == ("tool_wait", 3, 1)
    assert (row["service_s"], row["wait_s"]) == (3.0, 1.0)
    assert row["slowdown"] == 1.333
    assert row["end_s"] is None
    scene.advance(views.SETTLES_S)
    assert row_of(scene, "s")["state"] == "idle"


def test_a_program_whose_engine_tells_nothing_has_no_slowdown():
    """Its service is wall time, and its wait unknown."""
    scene = Scene()
    call = scene.begin("s")
    scene.advance(2)
    scene.end(*call, None)
    row = row_of(scene, "s")
    assert (row["slowdown"], row["service_s"]) == (None, 2.0)


def test_a_program_that_is_over_has_an_end():
    """The moment of its end, or of its last answer if that came later."""
    scene = Scene()
    call = scene.begin("s")
    program = views.find_program(scene.table, "s")
    assert program is not None
    scene.advance(1)
    scene.table.end_program(program, "ok", scene.now_s)
    assert row_of(scene, "s")["state"] == "draining"
    scene.advance(2)
    scene.end(*call, None)
    row = row_of(scene, "s")
    assert (row["state"], row["end_s"]) == ("ended", scene.now_s)


def test_names_that_are_no_text_are_no_framework():
    """What an owner says of itself is not trusted to be a text."""
    assert views.framework_of({"framework": 7}) is None
    assert views.framework_of({"metadata": {"framework": "DSPy"}}) == "DSPy"
    assert len(views.framework_of({"framework": "x" * 500}) or "") == 64


def test_fairness_of_known_slowdowns():
    """Jain's index by hand, percentiles, and classes by size."""

    def row(service_s: float, slowdown: float | None) -> views.Row:
        fields = dict.fromkeys(views.COLUMNS)
        fields.update(service_s=service_s, slowdown=slowdown)  # type: ignore[call-overload]
        return tuple(fields.values())

    rows = [row(1, 1.0), row(2, 1.0), row(3, 2.0), row(4, 4.0), row(9, None)]
    fair = views.fairness(rows)
    assert fair["programs"] == 4
    assert fair["jain"] == round(64 / (4 * 22), 4)
    assert fair["percentiles"]["50"] == 2.0
    assert fair["percentiles"]["100"] == 4.0
    assert [part["slowdown_mean"] for part in fair["classes"]] == [1.0, 1.0, 2.0, 4.0]
    assert views.fairness([row(1, 3.0)] * 9)["jain"] == 1.0
    assert views.fairness([])["jain"] is None


def test_an_engine_that_tells_nothing_is_shown_as_such():
    """A stock engine has a state and the gateway's calls; the rest is unknown, not nought."""
    row = views.engine_row({"engine": "r0", "state": "ready", "calls": 3, "channel": None})
    assert (row["calls"], row["kv_use"], row["running"]) == (3, None, None)
    assert views.queue_sample(1.0, [row], 3) == (1.0, 3, 0, 0, [])


def test_the_graph_has_the_forks_and_joins_that_happened():
    """Parents of each call, as the page draws them."""
    scene = Scene()
    program_id = add_story(scene)
    assert scene.gateway.book is not None
    calls = [r.view(scene.now_s) for r in scene.gateway.book.log.of_program(program_id)]
    parents = {(c["thread"], c["seq"]): sorted(map(tuple, c["parents"])) for c in calls}
    assert parents[(2, 0)] == [(0, 0)]
    assert parents[(1, 1)] == [(1, 0)]
    assert {(1, 1), (2, 0), (3, 0)} <= set(parents[(0, 1)])

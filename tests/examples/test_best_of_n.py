"""Best of N on engines inside the process; the engine is fake, all the rest is real."""

from __future__ import annotations

import pytest

from autellix.server import MultiEngine
from examples import best_of_n
from tests.pool.fake_fleet import fake_engines as fake_engines


@pytest.mark.usefixtures("fake_engines")
async def test_each_rollout_is_a_program(capsys: pytest.CaptureFixture[str]):
    """Two calls each, one after the other, all ended; the best of each country is kept."""
    async with MultiEngine("m") as engine:
        best = await best_of_n.best_of_n(engine)
        programs = {p.session: p for p in engine.fleet.table.programs()}
        assert engine.fleet.table.in_flight == 0
    count = best_of_n.N * len(best_of_n.CAPITALS)
    assert set(programs) == {f"rollout-{index}" for index in range(count)}
    assert {p.calls_begun for p in programs.values()} == {2}
    assert {tuple(p.threads) for p in programs.values()} == {(0,)}
    assert all(p.ended_s is not None for p in programs.values())
    assert set(best) == set(best_of_n.CAPITALS)
    said = f"best of 4: {count} rollouts, {2 * count} calls, 0 failed\n"
    assert capsys.readouterr().out == said


def test_a_right_answer_beats_a_short_one():
    """The reward is at least 1 for the right city, and below 1 for anything else that was said."""
    assert best_of_n.reward_of("France", "It is certainly Paris, I think") > 1
    assert best_of_n.reward_of("France", "Lyon") < 1
    assert best_of_n.reward_of("France", "Paris") > best_of_n.reward_of("France", "Paris it is")

"""Weight, deadline and kind, from the call's tag to who is let in. Virtual time."""

from __future__ import annotations

import pytest

from autellix.server.call_tag import CallTag, format_call
from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler
from autellix.server.policy.hazard import bucket_of

BLOCK = 4
PROMPT, ANSWER = 60, 10
GATEWAY_S = 5000.0  # its clock is so much ahead
HOLDER, EARLY, LATE = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def at_the_door(policy: str, **wishes: float | str) -> Pipeline:
    """Return an engine with room for one program: one inside, two at the door.

    The wishes are those of the one that came last; ``left_s`` is the time to its deadline.
    """
    pipeline = build_pipeline(
        AutellixScheduler, kv_blocks=24, slots=8, policy_config={"policy": policy}
    )
    if policy == "adaptive":
        hazard = pipeline.scheduler.autellix.kinds.anybody.hazard
        for _ in range(20):  # programs so far had five seconds of work
            hazard.passed(0, bucket_of(5.0))
            hazard.ended(bucket_of(5.0))
    left_s = wishes.pop("left_s", None)
    for number, name in enumerate((HOLDER, EARLY, LATE)):
        now_ms = int((pipeline.clock.now_s() + GATEWAY_S) * 1000)
        tag = CallTag(name, 0, 0, now_ms)
        if name == LATE:
            until = None if left_s is None else now_ms + int(float(left_s) * 1000)
            tag = tag._replace(deadline_ms=until, **wishes)
        first = 1000 * (1 + number)
        pipeline.add(
            make_request(
                f"chatcmpl-{format_call(tag)}-bc4ca7c3",
                range(first, first + PROMPT),
                ANSWER,
                block_tokens=BLOCK,
                arrival_s=pipeline.clock.now_s(),
                session_id=f"program-{name}",
            )
        )
        pipeline.step()
    return pipeline


def order_of(pipeline: Pipeline) -> list[str]:
    """Run to the end; return who ended when."""
    calls = [(name, PROMPT, ANSWER) for name in pipeline.tokens]
    pipeline.run()
    pipeline.check_tokens(calls)
    return [name.split("-")[2] for name in pipeline.order()]


def test_without_wishes_who_came_first_is_first():
    """Programs that are alike go in the order they came."""
    assert order_of(at_the_door("adaptive")) == [HOLDER, EARLY, LATE]


@pytest.mark.parametrize("wishes", [{"weight": 100.0}, {"left_s": 20.0}, {"left_s": -1.0}])
def test_a_heavy_program_or_one_with_a_deadline_is_let_in_first(wishes: dict[str, float]):
    """It overtakes at the door whoever is due later; whoever is inside is not put out."""
    assert order_of(at_the_door("adaptive", **wishes)) == [HOLDER, LATE, EARLY]


def test_a_light_program_lets_others_go_first():
    """One that came later, too, as long as it is due by then."""
    assert order_of(at_the_door("adaptive", weight=0.01)) == [HOLDER, EARLY, LATE]


@pytest.mark.parametrize("policy", ["plas", "atlas", "mlfq", "fcfs"])
def test_policies_of_levels_take_no_notice(policy: str):
    """There is nothing of it in their order."""
    wished = at_the_door(policy, weight=100.0, left_s=1.0, kind="0123456789ab")
    assert order_of(wished) == order_of(at_the_door(policy))


def test_what_the_policy_is_told():
    """The deadline is on the engine's own clock; a kind is its name, in place of its prefix."""
    pipeline = at_the_door("adaptive", weight=2.5, left_s=60.0, kind="0123456789ab")
    call = next(call for name, call in pipeline.scheduler.calls.items() if LATE in name)
    member = call.program.member
    assert (member.weight, member.kind.name) == (2.5, "0123456789ab")
    assert member.deadline_s == pytest.approx(call.arrival_s + 60.0)
    other = next(call for name, call in pipeline.scheduler.calls.items() if EARLY in name)
    assert (other.program.member.weight, other.program.member.deadline_s) == (1.0, None)
    assert other.program.member.kind.name is None
    pipeline.run()

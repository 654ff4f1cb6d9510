"""Which engine gets a call: the rules, and the balancer that counts for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.policy.balancer import (
    LEAK_AFTER_S,
    PLACEMENTS,
    Balancer,
    UnknownPlacementError,
    build,
    chunks,
)
from autellix.server.policy.placement import (
    Autellix,
    CallFacts,
    EngineView,
    LeastLoaded,
    ProgramHash,
    RoundRobin,
    Usage,
)
from autellix.server.policy.prompt_length import BYTES_PER_TOKEN, PromptLength
from autellix.server.types import CallInfo

NAMES = sorted(PLACEMENTS)


def info(
    number: int, program: str = "p", tokens: int | None = 100, content: bytes = b""
) -> CallInfo:
    """Return a call of a program."""
    return CallInfo(
        f"c{number}", program, 0, "/v1/completions", "m", 4 * (tokens or 100), tokens, None, {},
        content,
    )  # fmt: skip


def engines(*calls: int) -> list[EngineView]:
    """Return engines e0, e1, … with so many calls."""
    return [EngineView(f"e{index}", count) for index, count in enumerate(calls)]


def facts(program: str, tokens: int = 100) -> CallFacts:
    """Return what a rule is told of a call."""
    return CallFacts("c", program, tokens)


def test_round_robin_takes_turns():
    """Whatever the load."""
    rule = RoundRobin()
    assert [rule.choose(facts("p"), engines(9, 0, 0), 0.0) for _ in range(4)] == [
        "e0", "e1", "e2", "e0",
    ]  # fmt: skip


def test_least_loaded_takes_the_fewest_calls_and_turns_among_equals():
    """An idle fleet does not send everything to its first engine."""
    rule = LeastLoaded()
    assert rule.choose(facts("p"), engines(2, 1, 2), 0.0) == "e1"
    assert {rule.choose(facts("p"), engines(1, 1, 1), 0.0) for _ in range(3)} == {"e0", "e1", "e2"}


def test_program_hash_moves_only_the_programs_of_an_engine_that_goes():
    """All others stay, and those that move are spread."""
    rule = ProgramHash()
    names = [f"program-{n}" for n in range(300)]
    before = {name: rule.choose(facts(name), engines(0, 0, 0), 0.0) for name in names}
    after = {name: rule.choose(facts(name), engines(0, 0, 0)[:2], 0.0) for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "e2")
    assert {after[name] for name in names if before[name] == "e2"} == {"e0", "e1"}
    assert rule.choose(facts("program-1"), engines(0, 0), 0.0) == rule.choose(
        facts("program-1"), engines(7, 7), 0.0
    )


def test_ids_are_compared_whole():
    """One id that begins like another is another program."""
    rule = Autellix(threshold_tokens=0)
    assert rule.choose(facts("session-1"), engines(0, 5), 0.0) == "e0"
    assert rule.choose(facts("session-12"), engines(5, 0), 0.0) == "e1"
    assert rule.choose(facts("session-1"), engines(5, 0), 0.0) == "e0"


def test_the_papers_rule():
    """Short calls go to the least loaded; long ones stay with the first pin, come what may."""
    rule = Autellix(threshold_tokens=2048)
    assert rule.choose(facts("p", 2048), engines(3, 1), 0.0) == "e1"
    assert rule.choose(facts("p", 2049), engines(3, 1), 0.0) == "e1"
    assert rule.choose(facts("p", 9999), engines(0, 50), 0.0) == "e1"
    assert rule.choose(facts("p", 10), engines(0, 50), 0.0) == "e0"
    assert rule.choose(facts("p", 9999), engines(0), 0.0) == "e0"  # its engine takes no calls
    assert rule.choose(facts("p", 9999), engines(9, 0), 0.0) == "e0"


@pytest.mark.parametrize("name", NAMES)
def test_rules_have_names_and_settings(name: str):
    """Each is made by its name, and never gets the load or the settings of another."""
    assert build(name) is not build(name)


def test_what_no_rule_is_called_is_refused():
    """With what is allowed."""
    with pytest.raises(UnknownPlacementError, match="allowed is one of round-robin"):
        build("nearest")
    with pytest.raises(UnknownPlacementError, match="autellix:SETTING=NUMBER"):
        build("autellix:treshold=3")
    with pytest.raises(UnknownPlacementError, match="SETTING=NUMBER"):
        build("autellix:threshold_tokens=many")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["place", "end", "measured", "forget", "die", "drain", "back", "said"]),
        st.integers(0, 15),
        st.integers(0, 20_000),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_counts_are_exact_whatever_happens(name: str, events):
    """Only engines that take calls get one, counts are the tickets, and end at 0."""
    balancer = Balancer(build(name))
    ready = {"e0", "e1", "e2"}
    placed: dict[str, str] = {}
    for at, (what, number, tokens) in enumerate(events):
        now_s = float(at)
        engine = f"e{number % 3}"
        if what == "place":
            call = info(number, f"p{number % 4}", tokens, b"x" * tokens)
            placed[call.call_id] = balancer.place(call, sorted(ready), now_s)
            assert placed[call.call_id] in ready
        elif what == "end":
            balancer.end(f"c{number}", now_s)
            placed.pop(f"c{number}", None)
        elif what == "measured":
            usage = Usage(tokens, tokens // 2, number, 0.5)
            balancer.measured(placed.get(f"c{number}", engine), f"c{number}", usage, now_s)
        elif what == "forget":
            balancer.forget_program(f"p{number % 4}")
        elif what == "die" and len(ready) > 1:
            ready.discard(engine)
            balancer.forget_engine(engine)
        elif what == "drain" and len(ready) > 1:
            ready.discard(engine)
        elif what == "back":
            ready.add(engine)
        elif what == "said":
            balancer.said(engine, running=number, waiting=1, now_s=now_s)
        assert balancer.faults() == []
        assert sum(balancer.calls().values()) == len(placed)
    for call_id in list(placed):
        balancer.end(call_id, 1e3)
        balancer.end(call_id, 1e3)
    assert balancer.calls() == {}
    assert balancer.faults() == []


@pytest.mark.parametrize("name", NAMES)
def test_programs_that_are_over_leave_nothing(name: str):
    """Whether they are said to be over before or after their last call has ended."""
    balancer = Balancer(build(name))
    for number in range(200):
        balancer.place(info(number, f"p{number}", 5000), ["e0", "e1"], 0.0)
        if number % 2:
            balancer.forget_program(f"p{number}")
        balancer.end(f"c{number}", 0.0)
        balancer.forget_program(f"p{number}")
    if hasattr(balancer.placement, "__len__"):
        assert len(balancer.placement) == 0


@pytest.mark.parametrize(
    "name", ["autellix:programs_max=8", "locality:programs_max=8", "prefix-tree:nodes_max=8"]
)
def test_what_a_rule_remembers_is_bounded(name: str):
    """Programs nobody ends push each other out, oldest use first."""
    balancer = Balancer(build(name))
    for number in range(100):
        content = bytes([number]) * 4096
        balancer.place(info(number, f"p{number}", 5000, content), ["e0", "e1"], 0.0)
    assert len(balancer.placement) <= 8


def test_drift_is_what_an_engine_says_beyond_our_count_and_0_when_idle():
    """Calls of others show; a leak would."""
    balancer = Balancer(build("least-loaded"))
    balancer.place(info(1), ["e0"], 0.0)
    balancer.said("e0", running=3, waiting=1, now_s=1.0)
    assert balancer.drift() == {"e0": 3}
    balancer.end("c1", 2.0)
    balancer.said("e0", running=0, waiting=0, now_s=3.0)
    assert balancer.drift() == {"e0": 0}


def test_calls_of_others_count_between_two_words_of_an_engine():
    """What the engine said, plus what has come and gone here since."""
    balancer = Balancer(build("least-loaded"))
    balancer.said("e0", running=5, waiting=0, now_s=1.0)
    for number in range(5):
        assert balancer.place(info(number), ["e0", "e1"], 1.0) == "e1"
    balancer.said("e0", running=0, waiting=0, now_s=2.0)
    assert balancer.place(info(9), ["e0", "e1"], 2.0) == "e0"


def test_a_leak_is_found_and_taken_back():
    """An engine that has had no call for long is believed; the late end does no harm."""
    balancer = Balancer(build("least-loaded"))
    balancer.place(info(1), ["e0"], 0.0)
    for second in range(int(LEAK_AFTER_S)):
        balancer.said("e0", running=0, waiting=0, now_s=second)
        assert balancer.leaks == 0
    balancer.said("e0", running=0, waiting=0, now_s=LEAK_AFTER_S + 1)
    assert balancer.leaks == 1
    assert balancer.calls() == {}
    balancer.end("c1", LEAK_AFTER_S + 2)
    assert balancer.faults() == []


def test_prompt_length_is_learned_for_each_model():
    """From what the engines count; exact lengths teach nothing."""
    balancer = Balancer(build("autellix"))
    text = info(1, tokens=None)._replace(prompt_bytes=6000)
    for number in range(200):
        call = text._replace(call_id=f"c{number}")
        balancer.place(call, ["e0"], 0.0)
        balancer.end(call.call_id, 0.0)
        balancer.measured("e0", call.call_id, Usage(1000, 0, 1, 0.1), 0.0)
    assert balancer.lengths.ratio("m") == pytest.approx(6.0, rel=0.01)
    assert balancer.lengths.ratio("another") == BYTES_PER_TOKEN
    balancer.place(info(999, tokens=7), ["e0"], 0.0)
    balancer.measured("e0", "c999", Usage(7000, 0, 1, 0.1), 0.0)
    assert balancer.lengths.ratio("m") == pytest.approx(6.0, rel=0.01)


def test_prompt_length_of_no_figure_changes_nothing():
    """Neither an empty request nor an empty count."""
    lengths = PromptLength()
    lengths.learn("m", 0, 5)
    lengths.learn("m", 5, 0)
    assert lengths.estimate("m", 400) == 100


def test_chunks_are_alike_for_as_long_as_the_content_is():
    """And differ from the first difference on, however alike the rest is."""
    one, other = chunks(b"a" * 2048), chunks(b"a" * 1024 + b"b" + b"a" * 1023)
    assert len(one) == 4
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])

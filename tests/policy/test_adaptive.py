"""The adaptive policy: who is inside, who gives way, and that nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from autellix.server.policy.adaptive import AT_DOOR, INSIDE, AdaptivePolicy, Room
from autellix.server.policy.base import Arrival
from autellix.server.policy.config import PolicyConfig
from autellix.server.policy.elders import Elders
from autellix.server.policy.leveled import make_policy
from tests.policy.kv_toy import KvToy, ToyProgram

CONFIG = PolicyConfig(policy="adaptive")


def policy(tokens: int = 1000, **settings) -> AdaptivePolicy:
    return AdaptivePolicy(PolicyConfig(policy="adaptive", **settings), Room(tokens, 10, 64))


def come(one: AdaptivePolicy, name: str, tokens: int, now_s: float, **more):
    hashes = [f"{name}/{n}" for n in range(tokens // 10)]
    arrival = Arrival(f"{name} at {now_s}", name, prompt_tokens=tokens, hashes=hashes, **more)
    return one.arrive(arrival, now_s)


def teach(one: AdaptivePolicy, *works_s: float, times: int = 20) -> None:
    """Let programs of these sizes come and go."""
    for n in range(times):
        for work_s in works_s:
            call = come(one, f"taught-{n}-{work_s}", 10, 0.0)
            one.promote(0.0)
            one.run(call, 0.0)
            one.charge_work([(call, 1, 10)], work_s)
            one.leave(call, 0.0)
            one.forget((f"taught-{n}-{work_s}",))


def test_programs_enter_as_their_kv_fits():
    """Three of 300 tokens and room for 900: an expected answer is counted, so two are inside."""
    one = policy()
    calls = [come(one, name, 300, 0.0) for name in "abc"]
    one.promote(0.0)
    assert [call.level for call in calls] == [INSIDE, INSIDE, AT_DOOR]
    one.run(calls[0], 0.0)
    one.leave(calls[0], 1.0)
    one.forget(("a",))
    assert one.promote(1.0) == [calls[2]]
    assert calls[2].level == INSIDE


@pytest.mark.parametrize("by_path", [True, False, None])
def test_a_figure_fills_the_measure_that_it_is_in(by_path):
    """A path, of a call sent off before the switch, is no sum; one that does not say is a sum."""
    one = policy()
    program = come(one, "a", 100, 0.0, service_s=3.0, wait_s=2.0, by_path=by_path).program
    assert (program.sum_s, program.wait_sum_s) == ((0.0, 0.0) if by_path else (3.0, 2.0))
    assert (program.path_s, program.wait_path_s) == ((3.0, 2.0) if by_path else (0.0, 0.0))
    # Either way it is no newcomer: the sum is at least the path.
    assert program.member.work_s == 3.0 * one._work_of_service


def test_one_that_is_larger_than_all_there_is_runs_alone():
    """Nothing is refused: with nobody inside the first at the door enters."""
    one = policy()
    large = come(one, "large", 5000, 0.0)
    small = come(one, "small", 100, 1.0)
    one.promote(1.0)
    assert (large.level, small.level) == (INSIDE, AT_DOOR)


def test_a_call_of_a_program_inside_enters_at_once():
    """Whatever stands at the door: it holds its place between its calls."""
    one = policy()
    first = come(one, "a", 700, 0.0)
    one.promote(0.0)
    one.run(first, 0.0)
    door = come(one, "b", 700, 0.5)
    one.promote(0.5)
    one.leave(first, 1.0)
    second = come(one, "a", 710, 1.0)
    one.promote(1.0)
    assert (second.level, door.level) == (INSIDE, AT_DOOR)


def test_a_much_larger_program_gives_way_at_its_boundary_and_wholly():
    """Long ones go on for long here: whoever has run for long makes room for a new one."""
    one = policy(displace=0.5)
    teach(one, 0.1, 0.1, 0.1, 100.0)
    long = come(one, "long", 700, 0.0)
    one.promote(0.0)
    one.run(long, 0.0)
    one.charge_work([(long, 1, 700)], 30.0)
    one.leave(long, 30.0)
    goes_on = come(one, "long", 710, 30.0)
    one.promote(30.0)
    one.run(goes_on, 30.0)
    short = come(one, "short", 500, 31.0)
    assert one.promote(31.0) == []  # not in the middle of a call
    one.leave(goes_on, 40.0)
    back = come(one, "long", 720, 40.0)
    one.promote(40.0)
    assert (short.level, back.level) == (INSIDE, AT_DOOR)
    assert one.running_set.pauses == 1
    one.run(short, 40.0)
    one.leave(short, 41.0)
    one.forget(("short",))
    one.promote(41.0)
    assert back.level == INSIDE


def test_siblings_go_together():
    """All calls of a program have one place, the first one in front."""
    one = policy()
    calls = []
    for n in range(3):
        arrival = Arrival(f"join-{n}", "join", prompt_tokens=50, hashes=[f"x{k}" for k in range(5)])
        calls.append(one.arrive(arrival, float(n)))
    other = come(one, "other", 50, 0.5)
    one.promote(3.0)
    order = sorted([*calls, other], key=lambda call: call.key)
    assert order == [*calls, other]


def test_weights_and_deadlines_move_a_program_but_not_before_it_came():
    """Half the weight is twice the way back; a deadline pulls forward at most to its arrival."""
    one = policy(100)
    teach(one, 1.0)
    plain = come(one, "plain", 90, 100.0)
    light = come(one, "light", 90, 100.0, weight=0.5)
    due = come(one, "due", 90, 110.0, deadline_s=111.0)
    members = [call.program.member for call in (plain, light, due)]
    away = [member.due_s - member.began_s for member in members]
    assert abs(away[1] - 2 * away[0]) < 1e-6
    assert 0 <= away[2] < 1.0 < away[0]


def test_a_tool_keeps_the_seat_for_a_while_and_a_human_does_not():
    """Somebody stands at the door: the seat of a program that is away for long is given away."""
    one = policy()
    call = come(one, "a", 700, 0.0)
    one.promote(0.0)
    one.run(call, 0.0)
    one.leave(call, 1.0)
    door = come(one, "b", 700, 1.5)
    one.promote(1.5)
    assert door.level == INSIDE  # nobody inside has a call
    assert one.promote(10.0) == []
    third = come(one, "c", 700, 10.0)
    one.promote(10.0)
    assert third.level == AT_DOOR
    assert [m.program.program_id for m in one.running_set.seated] == ["b"]


def test_nobody_is_lost_in_random_work():
    """Random programs, sizes, pauses and KV: all end, and the books are right in every step."""
    for seed in range(60):
        draw = random.Random(seed)
        programs = [
            ToyProgram(
                f"p{n}",
                draw.randrange(60),
                [draw.randrange(1, 12) for _ in range(draw.randrange(1, 5))],
                draw.randrange(10, 900),
                draw.choice((0, 0, 1, 5, 30)),
                draw.choice((1.0, 0.5, 4.0)),
                draw.choice((None, None, 100.0)),
            )
            for n in range(draw.randrange(1, 25))
        ]
        config = PolicyConfig(
            policy="adaptive",
            ageing=draw.choice((0.0, 0.5, 5.0)),
            displace=draw.choice((0.0, 1.0)),
            keep_gaps=draw.random() < 0.7,
            elders=draw.choice((0.0, 0.2, 0.9)),
        )
        assert not len(KvToy(programs, config=config).run().policy.elders)


@pytest.mark.parametrize(
    "seeds",
    [
        range(60),
        pytest.param(range(60, 3_060), marks=[pytest.mark.heavy, pytest.mark.timeout(0)]),
    ],
    ids=["60", "3000"],
)
def test_nobody_who_comes_after_it_is_due_enters_before_it(seeds: range):
    """The bound: due = arrival + ageing x what is left. Later ones stand behind, however small."""
    worst = 0
    for seed in seeds:
        draw = random.Random(seed)
        large = ToyProgram("large", 40, [20], 600, 0, 0.05)  # of little weight
        others = [
            ToyProgram(f"p{n}", n // 2, [draw.randrange(1, 6)], draw.randrange(100, 400))
            for n in range(200)
        ]
        toy = KvToy([large, *others], config=PolicyConfig(policy="adaptive", ageing=20.0))
        due = float(large.at)
        while large.ended is None:
            toy.step()
            call = toy.waiting.get("large")
            if call is not None:
                due = call.program.member.due_s
            assert toy.now < 20_000
        before = toy.entered[: toy.entered.index("large")]
        latest = max(p.at for p in others if p.name in before)
        worst = max(worst, latest)
        assert latest <= due + 1
    assert worst > 40  # it was overtaken at all


def test_at_the_door_nothing_makes_a_program_due_later():
    """New calls of it come, and others teach that programs like it are long."""
    one = policy(500)
    teach(one, 1.0)
    inside = come(one, "inside", 400, 0.0)
    one.promote(0.0)
    first = come(one, "first", 400, 1.0)
    due_s = first.program.member.due_s
    teach(one, 200.0, times=60)
    second = come(one, "first", 410, 2.0)
    assert second.program is first.program
    assert first.program.member.due_s <= due_s
    assert inside.level == INSIDE


def test_switching_to_it_and_back_loses_no_call():
    """Calls that run or wait under plas are inside or at the door afterwards, and back."""
    plas = make_policy(PolicyConfig(policy="plas"))
    calls = [
        plas.arrive(Arrival(n, n, prompt_tokens=300, hashes=[f"{n}{k}" for k in range(30)]), 0.0)
        for n in "abcd"
    ]
    plas.run(calls[0], 1.0)
    adaptive = make_policy(CONFIG, plas.ledger, Room(1000, 10, 64))
    for call in calls:
        adaptive.enter(call)
    adaptive.promote(2.0)
    assert calls[0].level == INSIDE
    assert [call.level for call in calls[1:]].count(INSIDE) == 1
    again = make_policy(PolicyConfig(policy="plas"), adaptive.ledger)
    for call in calls:
        again.enter(call)
    for call in calls:
        again.leave(call, 3.0)
    assert all(program.calls == 0 for program in (call.program for call in calls))


def away(one: AdaptivePolicy, name: str, tokens: int, now_s: float, tool: str | None = None):
    """Let a program make a call and go away at once, for a tool that has this name."""
    call = come(one, name, tokens, now_s)
    one.promote(now_s)
    assert call.level == INSIDE
    one.run(call, now_s)
    one.leave(call, now_s)
    if tool is not None:
        one.note_tool(name, tool, now_s)


def seated(one: AdaptivePolicy) -> set[str]:
    return {member.program.program_id for member in one.running_set.seated}


def test_when_programs_grow_no_more_give_way_than_must():
    """Seven fit up to what is let in; one grows beyond what there is: one of them makes room."""
    one = policy(2000, kv_fill=0.9, kv_most=1.0)
    calls = [come(one, f"p{n}", 100, float(n)) for n in range(8)]
    one.promote(8.0)
    assert len(seated(one)) == 7
    for call in calls[:7]:
        one.run(call, 8.0)
    one.charge_work([(calls[0], 1, 480)], 0.01)
    assert one.running_set.taken_tokens > 2000
    one.promote(9.0)
    rooms = one.running_set
    assert sum(member.yields for member in rooms.seated) == 1
    assert 1800 < rooms.taken_tokens - rooms.coming_tokens <= 2000
    assert calls[7].level == AT_DOOR


def taught_gaps() -> AdaptivePolicy:
    """A policy for which people are away for long and builds are not."""
    one = policy()
    one._token_s = 0.05  # a whole cache takes 50 s to compute anew
    for _ in range(200):
        one.gaps.returned("human", 3000.0)
    for _ in range(20):
        one.gaps.returned("build", 12.0)
    return one


def test_a_seat_is_kept_by_the_name_of_the_tool():
    """Of two that are away, the one in a build keeps its seat; for one unknown all gaps answer."""
    one = taught_gaps()
    away(one, "builds", 150, 0.0, "build")
    away(one, "unknown", 200, 0.0)
    runs = come(one, "runs", 250, 0.0)
    one.promote(0.0)
    one.run(runs, 0.0)
    door = come(one, "door", 150, 10.0)
    one.promote(10.0)
    assert door.level == INSIDE
    assert seated(one) == {"builds", "runs", "door"}


def test_a_gap_is_learned_under_the_name_of_its_tool_and_of_no_later_one():
    """The name is forgotten when the program is back."""
    one = policy()
    for n in range(10):
        away(one, "a", 300 + n, 100.0 * n, "build")
        come_back_s = 100.0 * n + 20.0
        call = come(one, "a", 310 + n, come_back_s)
        one.promote(come_back_s)
        one.run(call, come_back_s)
        one.leave(call, come_back_s)  # and now 80 s without a name
    assert len(one.gaps) == 1
    assert one.gaps._by_key["build"].endings == 10


def test_a_tool_that_ran_beside_a_call_has_no_gap():
    """It is over before the program is away, so what comes is not its gap."""
    one = policy()
    call = come(one, "a", 300, 0.0)
    one.promote(0.0)
    one.run(call, 0.0)
    one.note_tool("a", "build", 0.0)
    one.note_tool("a", None, 1.0)
    one.leave(call, 2.0)
    come(one, "a", 310, 90.0)
    assert len(one.gaps) == 0


def test_the_end_of_a_tool_keeps_the_seat_for_the_call_that_comes():
    """As long as a program without tools has, and no longer."""
    one = taught_gaps()
    away(one, "a", 400, 0.0, "human")
    runs = come(one, "runs", 250, 0.0)
    one.promote(0.0)
    one.run(runs, 0.0)
    one.note_tool("a", None, 500.0)
    door = come(one, "door", 150, 501.0)
    assert one.promote(501.0) == []
    assert seated(one) == {"a", "runs"}
    assert one.promote(503.0) == [door]


def test_a_hint_about_nobody_or_about_who_lost_the_seat_is_no_harm():
    """Hints come late, twice, and for programs of other engines."""
    one = policy()
    one.note_tool("nobody", "build", 0.0)
    away(one, "a", 700, 0.0)
    door = come(one, "b", 700, 5.0)
    one.promote(5.0)
    assert door.level == INSIDE
    for tool in ("build", None, None):
        one.note_tool("a", tool, 6.0)
    assert seated(one) == {"b"}
    off = policy(keep_gaps=False)
    away(off, "a", 300, 0.0, "build")
    off.note_tool("a", None, 1.0)
    assert seated(off) == {"a"}, "nobody is at the door"


def test_a_program_that_loses_its_seat_is_told_of_once():
    """With all of its blocks, the shared ones too; one that is over is not."""
    one = taught_gaps()
    away(one, "a", 300, 0.0, "human")
    away(one, "b", 300, 0.0, "human")
    waiting = come(one, "c", 800, 20.0)
    one.forget(("b",))
    one.promote(20.0)
    assert waiting.level == INSIDE
    assert one.displaced() == [("a", [f"a/{n}" for n in range(30)], ())]
    assert one.displaced() == []


def test_a_call_that_comes_back_before_it_is_told_goes_on_from_there():
    """Its blocks are saved for it, though its program lost the seat an instant ago."""
    one = taught_gaps()
    away(one, "a", 300, 0.0, "human")
    come(one, "b", 800, 20.0)
    one.promote(20.0)
    back = come(one, "a", 300, 20.0)
    (told,) = one.displaced()
    assert told.call_ids == (back.call_id,)


def test_a_seat_is_kept_no_longer_than_fetching_takes():
    """What it costs to have KV again is the cheaper of computing and fetching."""
    one = taught_gaps()
    away(one, "a", 100, 0.0, "build")
    one.note_fetch(0.001)  # a second for a whole cache: a build takes longer
    away(one, "b", 100, 0.0, "build")
    runs = come(one, "runs", 100, 0.0)
    one.promote(0.0)
    one.run(runs, 0.0)
    come(one, "door", 400, 5.0)
    one.promote(5.0)
    assert seated(one) == {"a", "runs", "door"}


def test_gaps_leave_nothing_behind():
    """Nobody is at the door, so nobody takes a seat back; what is kept of old gaps is bounded."""
    one = policy()
    for n in range(2000):
        away(one, "a", 100 + n % 10, float(n), "build")
    assert len(one.running_set._gaps) <= 2 * len(one.running_set.seated) + 65


def test_an_elder_is_let_in_before_newcomers():
    """A long program, and small ones without end: it ends, and without a share it does not."""
    ended = {}
    for share in (0.0, 0.4):
        config = PolicyConfig(policy="adaptive", elders=share, ageing=1000.0, displace=0.01)
        small = [ToyProgram(f"p{n}", n, [4], 250) for n in range(400)]
        large = ToyProgram("large", 30, [5] * 12, 300)
        toy = KvToy([*small, large], config=config)
        while toy.now < 400:
            toy.step()
        ended[share] = large.ended
    assert ended[0.0] is None
    assert ended[0.4] is not None


def test_who_becomes_an_elder():
    """The oldest that are here long enough and behind newcomers, as many as fit; no giant."""
    elders = Elders(600)
    one = policy()
    members = []
    for n, tokens in enumerate((600, 100, 100, 150, 50)):
        member = come(one, f"m{n}", tokens, float(n)).program.member
        member.left_s, member.passed = 10.0, n != 4
        members.append(member)
        elders.stand(member)
    assert elders.choose(10.5) == []  # only the one that is too large is here long enough
    assert elders.choose(20.0) == members[1:3]
    elders.stand(members[1])  # it is one already
    assert elders.choose(20.0) == []
    elders.drop(members[1])
    assert elders.choose(20.0) == [members[3]]
    assert members[1] not in elders
    for member in members:
        elders.drop(member)
    assert (len(elders), elders.tokens) == (0, 0.0)


def test_beyond_what_the_engine_bears_there_are_few_elders():
    """Twenty stand where six would fit: the share is that of one, and all six's as others go."""
    one = policy()
    members = [come(one, f"m{n}", 100, float(n)).program.member for n in range(20)]
    size = members[0].room_tokens()
    elders = Elders(6 * size)
    for member in members:
        member.left_s, member.passed = 10.0, True
        elders.stand(member)
    assert elders.choose(100.0) == members[:1]
    for member in members[5:]:
        elders.sit(member)
    assert elders.ripe_tokens == 4 * size
    assert elders.choose(100.0) == members[1:5]
    for member in members:
        elders.drop(member)
    assert (len(elders), elders.tokens, elders.ripe_tokens) == (0, 0.0, 0.0)


def test_one_of_little_weight_holds_up_no_elder():
    """It came first and becomes one late; those behind it do not wait for that."""
    elders = Elders(600)
    one = policy()
    light, plain = (come(one, name, 100, float(n)).program.member for n, name in enumerate("ab"))
    for member, weight in ((light, 0.01), (plain, 1.0)):
        member.left_s, member.passed, member.weight = 10.0, True, weight
        elders.stand(member)
    assert elders.choose(20.0) == [plain]
    assert elders.choose(2000.0) == [light]


def test_who_comes_and_goes_leaves_nothing_with_the_elders():
    """A program that stands up and leaves again and again has one valid entry, by its last time."""
    elders = Elders(600)
    one = policy()
    blocked = come(one, "blocked", 100, 0.0).program.member
    guest = come(one, "guest", 100, 1.0).program.member
    blocked.left_s, blocked.passed, guest.left_s, guest.passed = 1e9, True, 10.0, True
    elders.stand(blocked)
    for n in range(5000):
        guest.began_s = float(n)
        elders.stand(guest)
        elders.drop(guest)
        elders.choose(float(n))
    assert len(elders._young) + len(elders._ripe) <= 2 * 2 + 2 * 64
    elders.stand(guest)
    elders.sit(guest)
    assert elders.choose(1e6) == []

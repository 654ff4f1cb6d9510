"""The policies on a toy engine: examples by hand, and properties over random programs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.policy.base import Arrival
from autellix.server.policy.config import PolicyConfig
from autellix.server.policy.leveled import make_policy
from autellix.server.policy.service import Ledger

from .toy import Toy, ToyCall, chain
from .two_engines import TwoEngines

LEVELS = PolicyConfig(
    policy="plas", level_bounds_s=(2.0, 4.0, 8.0), beta=None, order="call", first_step_s=1.0
)


def under(policy: str, **changes) -> PolicyConfig:
    return dataclasses.replace(LEVELS, policy=policy, **changes)


def programs() -> list[ToyCall]:
    """Two programs of many calls, then two of few: nobody's single call is long."""
    return [
        *chain("a", [2, 2, 2, 2]),
        *chain("b", [2, 2, 2, 2]),
        *chain("c", [2], at=5),
        *chain("d", [2], at=5),
    ]


def test_plas_sees_what_fcfs_and_mlfq_do_not():
    """The paper's point: MLFQ is as blind to programs of small calls as FCFS."""
    waited = {
        name: Toy(under(name), programs()).run().waited() for name in ("fcfs", "mlfq", "plas")
    }
    assert waited == {"fcfs": 30, "mlfq": 30, "plas": 24}
    ended = {toy.program: toy.ended for toy in Toy(under("plas"), programs()).run().calls}
    assert ended["c"] < ended["a"]
    assert ended["d"] < ended["b"]


def waits(calls: list[ToyCall], *policies: str) -> dict[str, int]:
    """Return the steps that all calls waited on one slot, by policy."""
    return {
        name: Toy(under(name), [dataclasses.replace(toy) for toy in calls]).run().waited()
        for name in policies
    }


def test_the_gantt_chart_fcfs_18_mlfq_18_plas_12():
    """The paper's first chart gives these sums and not its programs: these were found by search.

    MLFQ sees single calls of one to three steps, and b and c wait behind them as under FCFS. Under
    PLAS a is a program that has had seven steps by the time its last call comes.
    """
    calls = [*chain("a", [3, 1, 3, 3]), *chain("b", [1, 3], at=1), *chain("c", [1, 1], at=3)]
    assert waits(calls, "fcfs", "mlfq", "plas") == {"fcfs": 18, "mlfq": 18, "plas": 12}


def test_the_critical_path_atlas_11_mlfq_14():
    """The paper's second example, with programs found by search: a chain, and a fork of three.

    PLAS adds up the fork's three calls, which are no longer path than one of them.
    """
    chained = chain("a", [2, 1, 2])
    fork = [
        ToyCall("b0", "b", 1),
        *(ToyCall(f"b{n}", "b", 1, parents=("b0",)) for n in (1, 2, 3)),
        ToyCall("b4", "b", 1, parents=("b1", "b2", "b3")),
    ]
    found = waits([*chained, *fork], "fcfs", "mlfq", "plas", "atlas")
    assert found == {"fcfs": 14, "mlfq": 14, "plas": 12, "atlas": 11}


def test_atlas_puts_the_longest_path_first_where_plas_counts_threads():
    """Three parallel calls make a program old under PLAS, and no older than one under ATLAS."""
    wide = [ToyCall(f"w{i}", "w", 2) for i in range(3)]
    after = ToyCall("wx", "w", 2, parents=("w0", "w1", "w2"))
    other = chain("o", [3, 3])
    ended = {
        policy: {
            toy.name: toy.ended
            for toy in Toy(
                under(policy),
                [dataclasses.replace(toy) for toy in (*wide, after, *other)],
                slots=2,
            )
            .run()
            .calls
        }
        for policy in ("plas", "atlas")
    }
    assert ended["atlas"]["wx"] <= ended["plas"]["wx"]
    policy = make_policy(under("atlas"))
    calls = [policy.arrive(Arrival(f"c{i}", "w"), 0.0) for i in range(3)]
    policy.charge(calls, 1.5)
    for call in calls:
        policy.leave(call, 2.0)
    program = policy.ledger.get("w")
    assert (program.sum_s, program.path_s) == (4.5, 1.5)


def test_a_call_sinks_quantum_by_quantum():
    """Quanta by default are the widths of the levels; a long step may skip a level."""
    policy = make_policy(under("plas"))
    call = policy.arrive(Arrival("c", "p"), 0.0)
    seen = []
    for _ in range(9):
        policy.charge([call], 1.0)
        seen.append(call.level)
    assert seen == [1, 2, 2, 3, 3, 3, 3, 4, 4]
    other = policy.arrive(Arrival("d", "q"), 0.0)
    policy.charge([other], 5.0)
    assert other.level == 3


def test_a_program_enters_at_the_level_of_its_service():
    """The gateway's figure counts if it is larger than the engine's own."""
    policy = make_policy(under("plas"))
    first = policy.arrive(Arrival("c1", "p", service_s=3.0), 0.0)
    assert first.level == 2
    policy.charge([first], 2.0)
    policy.leave(first, 2.0)
    assert policy.arrive(Arrival("c2", "p", service_s=3.0), 2.0).level == 3
    assert policy.arrive(Arrival("c3", "p", service_s=9.0), 2.0).level == 4


def test_mlfq_forgets_the_program():
    """Every call begins in level 1."""
    policy = make_policy(under("mlfq"))
    assert policy.arrive(Arrival("c", "p", service_s=100.0), 0.0).level == 1


def test_program_order_inside_a_level():
    """By program: the older program's new call goes before the newer program's older call."""
    ahead = {}
    for order in ("program", "call"):
        policy = make_policy(under("plas", order=order))
        old = policy.arrive(Arrival("a0", "a"), 0.0)
        new = policy.arrive(Arrival("b0", "b"), 1.0)
        policy.leave(old, 1.5)
        again = policy.arrive(Arrival("a1", "a"), 2.0)
        ahead[order] = again.key < new.key
    assert ahead == {"program": True, "call": False}


def test_untagged_calls_are_programs_of_their_own():
    """They leave nothing behind."""
    policy = make_policy(under("plas"))
    call = policy.arrive(Arrival("c", None), 0.0)
    policy.charge([call], 3.0)
    policy.leave(call, 3.0)
    assert len(policy.ledger) == 0


def test_a_change_of_policy_keeps_service_and_calls():
    """PLAS to ATLAS and back: every program keeps its sum and its path."""
    plas = make_policy(under("plas", beta=2.0))
    calls = [plas.arrive(Arrival(f"c{i}", "p"), 0.0) for i in range(3)]
    plas.run(calls[0], 0.0)
    plas.charge(calls[:1], 3.0)
    atlas = make_policy(under("atlas", beta=2.0), plas.ledger)
    for call in calls:
        atlas.enter(call)
    assert [call.level for call in calls] == [2, 1, 1]
    for call in calls:
        atlas.leave(call, 5.0)
    program = atlas.ledger.get("p")
    assert (program.sum_s, program.path_s) == (3.0, 3.0)


@st.composite
def single_threaded(draw) -> list[ToyCall]:
    calls = []
    for number in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
        calls += chain(
            f"p{number}-",
            lengths,
            at=draw(st.integers(0, 10)),
            pause=draw(st.integers(0, 3)),
        )
    return calls


@settings(max_examples=150, deadline=None)
@given(
    single_threaded(),
    st.integers(1, 3),
    st.sampled_from([None, 1.0, 4.0]),
    st.sampled_from(["program", "call"]),
)
def test_atlas_is_plas_on_single_threaded_programs(calls, slots, beta, order):
    """Where each call follows the one before, the longest path is the sum: the same schedule."""
    runs = [
        Toy(
            under(policy, beta=beta, order=order),
            [dataclasses.replace(toy) for toy in calls],
            slots=slots,
        ).run()
        for policy in ("plas", "atlas")
    ]
    assert [t.ended for t in runs[0].calls] == [t.ended for t in runs[1].calls]


@pytest.mark.parametrize("policy", ["plas", "atlas"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_service_never_exceeds_the_truth_over_two_engines(policy, data):
    """An engine takes the larger of the gateway's figure and its own; nothing is counted twice.

    Two engines serve calls of one program; the gateway hears of ended calls with random delay, and
    calls carry what it knew when they were sent. With all news there both engines have the truth,
    and give the next calls the same level. (Under atlas no call is under way while another ends: an
    engine takes one that comes after it as its successor, which the gateway does not.)
    """
    rig = TwoEngines(under(policy))
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["send", "arrive", "end", "hear"]))
        if action == "send":
            rig.send(data.draw(st.integers(0, 1)))
            if policy == "atlas":
                rig.arrive(0)
        elif action == "arrive" and rig.under_way:
            rig.arrive(data.draw(st.integers(0, 9)))
        elif action == "end" and rig.inside:
            which, wait, seconds = (data.draw(st.integers(0, top)) for top in (9, 5, 5))
            rig.end(which, wait, seconds)
        elif action == "hear" and rig.news:
            rig.hear(data.draw(st.integers(0, 9)))
        rig.check()
    first, second = rig.calls_at_both()
    rig.check()
    assert first.level == second.level
    truth = rig.truth
    for call in (first, second):
        program = call.program
        if policy == "plas":
            assert (program.sum_s, program.wait_sum_s) == (truth.sum_s, truth.wait_sum_s)
        else:
            assert (program.path_s, program.wait_path_s) == (truth.path_s, truth.wait_path_s)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_service_never_exceeds_the_truth_across_a_switch_of_policy(data):
    """Gateway and engines switch one after the other, with calls and reports under way.

    The program begins with three calls side by side, so its sum and its path differ.
    """
    rig = TwoEngines(under("plas"))
    for _ in range(3):
        rig.send(0)
        rig.arrive(0)
    for _ in range(3):
        rig.end(0, 1.0, 2.0)
        rig.hear(0)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["send", "arrive", "end", "hear", "gateway", "engine"]))
        policy = data.draw(st.sampled_from(["plas", "atlas"]))
        which = data.draw(st.integers(0, 9))
        if action == "send":
            rig.send(which % 2)
        elif action == "arrive" and rig.under_way:
            rig.arrive(which)
        elif action == "end" and rig.inside:
            wait, seconds = (data.draw(st.integers(0, 5)) for _ in range(2))
            rig.end(which, wait, seconds)
        elif action == "hear" and rig.news:
            rig.hear(which)
        elif action == "gateway":
            rig.switch_gateway(policy)
        elif action == "engine":
            rig.switch_engine(which % 2, policy)
        rig.check()
    rig.switch_gateway("plas")
    for engine in range(2):
        rig.switch_engine(engine, "plas")
    first, second = rig.calls_at_both()
    assert first.level == second.level
    assert first.program.sum_s == second.program.sum_s == rig.truth.sum_s


@pytest.mark.parametrize("by_path", [True, False, None])
@pytest.mark.parametrize("policy", ["plas", "atlas"])
def test_a_figure_fills_the_measure_that_it_is_in(policy, by_path):
    """A sum is no path and a path no sum; a figure that does not say is the policy's own."""
    program = make_policy(under(policy)).arrive(
        Arrival("c", "p", service_s=3.0, wait_s=2.0, by_path=by_path), 0.0
    ).program  # fmt: skip
    is_path = policy == "atlas" if by_path is None else by_path
    assert (program.sum_s, program.wait_sum_s) == ((0.0, 0.0) if is_path else (3.0, 2.0))
    assert (program.path_s, program.wait_path_s) == ((3.0, 2.0) if is_path else (0.0, 0.0))


@pytest.mark.parametrize("policy", ["plas", "atlas"])
def test_a_gateway_makes_nobody_due_earlier(policy):
    """16 parallel calls that waited a second each: one second on a path, whoever counts."""
    due = []
    for has_gateway in (False, True):
        rig = TwoEngines(under(policy, beta=8.0))
        for _ in range(16):
            rig.send(0)
            rig.arrive(0)
        for _ in range(16):
            rig.end(0, 1.0, 2.5)
            rig.hear(0)
        rig.send(0)
        if not has_gateway:
            engine, told, arrival = rig.under_way.pop()
            rig.under_way.append((engine, told, arrival._replace(service_s=0.0, wait_s=0.0)))
        call = rig.arrive(0)
        steps = range(400)
        due.append(next(s for s in steps if call in rig.engines[0].promote(call.arrival_s + s)))
    assert due[0] == due[1]
    # 8 x (1 s of a first step + the program's service) - its wait
    assert due[1] == (8 * (1 + 16 * 2.5) - 16 if policy == "plas" else 8 * (1 + 2.5) - 1)


def test_the_ledger_is_bounded_and_forgets_the_longest_idle():
    """Programs with calls stay; of the others the longest idle goes first."""
    ledger = Ledger(2)
    busy = ledger.join("busy", 0.0)
    for name in ("a", "b", "c"):
        ledger.leave(ledger.join(name, 0.0))
    assert (ledger.get("busy"), len(ledger)) == (busy, 2)
    assert ledger.get("a") is None
    assert ledger.get("c") is not None
    ledger.forget(["busy", "c", "unknown"])
    assert ledger.get("c") is None
    ledger.leave(busy)
    assert len(ledger) == 0


@pytest.mark.parametrize("policy", ["fcfs", "mlfq", "plas", "atlas"])
def test_every_policy_ends_every_call(policy: str):
    """Nothing is left in the engine, and all service is in the ledger."""
    toy = Toy(under(policy, beta=3.0), programs(), slots=2).run()
    assert toy.inside == []
    assert toy.policy.ledger.get("a").sum_s == 8.0

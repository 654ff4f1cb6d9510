"""The locality rule: it stays, moves whole programs between two calls, and spreads wide ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autellix.server.policy.locality import HOMES_MAX, Locality
from autellix.server.policy.placement import CallFacts, EngineView, Usage
from autellix.server.policy.prefix_tree import PrefixTree


class Desk:
    """A rule, engines with true counts, and calls in flight."""

    def __init__(self, engines: int = 3, rule: Locality | None = None, **view) -> None:
        self.rule = rule or Locality()
        self.calls = {f"e{n}": 0 for n in range(engines)}
        self.view = view
        self.waiting: dict[str, int] = {}
        self.flying: dict[str, tuple[CallFacts, str]] = {}
        self.by_program: dict[str, int] = {}
        self.number = 0

    def views(self, away: str = "") -> list[EngineView]:
        """Return the engines that take calls."""
        return [
            EngineView(name, calls, waiting=self.waiting.get(name, 0), **self.view)
            for name, calls in self.calls.items()
            if name != away
        ]

    def start(self, program: str, tokens: int = 4000, now_s: float = 0.0, away: str = "") -> str:
        """Place a call; return its engine."""
        self.number += 1
        siblings = self.by_program.get(program, 0)
        facts = CallFacts(f"c{self.number}", program, tokens, siblings)
        engine = self.rule.choose(facts, self.views(away), now_s)
        self.calls[engine] += 1
        self.by_program[program] = siblings + 1
        self.flying[facts.call_id] = (facts, engine)
        return engine

    def end(self, call_id: str | None = None) -> None:
        """End a call, the oldest if none is named."""
        call_id = call_id or next(iter(self.flying))
        facts, engine = self.flying.pop(call_id)
        self.calls[engine] -= 1
        self.by_program[facts.program_id] -= 1
        self.rule.ended(facts, engine, 0.0)
        self.rule.measured(facts, engine, Usage(facts.prompt_tokens, 0, 100, 1.0), 0.0)

    def fill(self, engine: str, calls: int) -> None:
        """Give an engine calls of other programs."""
        for _ in range(calls):
            others = [name for name in self.calls if name != engine]
            saved = {name: self.calls[name] for name in others}
            self.calls.update(dict.fromkeys(others, 10_000))
            assert self.start(f"other {self.number}", 200) == engine
            self.calls.update(saved)


def test_a_program_stays_though_another_engine_has_fewer_calls():
    """A few calls more are no reason to leave a cache."""
    desk = Desk()
    home = desk.start("p")
    desk.end()
    desk.fill(home, 5)
    assert desk.start("p", 4500, now_s=10.0) == home


def test_a_program_moves_as_a_whole_when_its_engine_is_too_full():
    """Its next calls follow, and it does not go back at once."""
    desk = Desk()
    home = desk.start("p")
    desk.end()
    desk.fill(home, 60)
    away = desk.start("p", 4500, now_s=10.0)
    assert away != home
    desk.end(f"c{desk.number}")
    assert desk.rule.moves == 1
    for second in range(11, 15):
        assert desk.start("p", 4600, now_s=float(second)) == away
        desk.end(f"c{desk.number}")
    assert desk.rule.moves == 1


def test_a_long_context_waits_out_what_a_short_one_does_not():
    """Moving a large cache costs more than the queue it avoids."""
    for tokens, leaves in ((60_000, False), (500, True)):
        desk = Desk()
        home = desk.start("p", tokens)
        desk.end()
        desk.fill(home, 40)
        assert (desk.start("p", tokens, now_s=10.0) != home) is leaves


def test_an_engine_that_makes_calls_wait_is_left_for_one_that_does_not():
    """Even if it is no fuller by count."""
    desk = Desk()
    home = desk.start("p", 100)
    desk.end()
    desk.fill(home, 7)
    assert desk.start("p", 120, now_s=10.0) == home
    desk.end(f"c{desk.number}")
    desk.waiting[home] = 3
    assert desk.start("p", 140, now_s=20.0) != home


def test_a_wide_program_uses_several_engines_and_few_when_it_is_not_worth_it():
    """Four hundred calls at once spread; three with a long shared beginning stay together."""
    desk = Desk(4)
    used = [desk.start("wide", 4200) for _ in range(400)]
    shares = [used.count(name) for name in desk.calls]
    assert min(shares) > 0.8 * max(shares)
    desk = Desk(4)
    assert len({desk.start("narrow", 8000) for _ in range(3)}) == 1


def test_a_slow_engine_gets_fewer_programs():
    """A pace twice as slow weighs a call twice."""
    rule = Locality()
    counts = {"e0": 0, "e1": 0}
    for number in range(90):
        views = [
            EngineView("e0", counts["e0"], pace_s=0.02),
            EngineView("e1", counts["e1"], pace_s=0.04),
        ]
        counts[rule.choose(CallFacts(f"c{number}", f"p{number}", 100), views, 0.0)] += 1
    assert abs(counts["e0"] - 2 * counts["e1"]) <= 2


def test_a_home_that_takes_no_calls_is_left_and_not_missed():
    """A program whose engine drains or dies gets a new home, and stays there."""
    desk = Desk()
    home = desk.start("p")
    desk.end()
    away = desk.start("p", 4100, now_s=1.0, away=home)
    assert away != home
    desk.end()
    assert desk.start("p", 4200, now_s=2.0) == away


def test_what_an_engine_held_is_gone_when_its_cache_has_turned_over():
    """Then no cache keeps the program where it is too full."""
    desk = Desk(2, kv_tokens=50_000)
    home = desk.start("p", 20_000)
    desk.end()
    desk.fill(home, 30)
    assert desk.start("p", 20_000, now_s=10.0) == home
    desk.end(f"c{desk.number}")
    for number in range(3):
        facts = CallFacts(f"x{number}", f"big{number}", 20_000)
        views = [EngineView(home, 0, kv_tokens=50_000)]
        desk.rule.choose(facts, views, 10.0)
        desk.rule.ended(facts, home, 10.0)
    assert desk.start("p", 20_000, now_s=20.0) != home


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "end", "fill", "forget", "die"]),
            st.integers(0, 4),
            st.integers(1, 30_000),
        ),
        max_size=80,
    )
)
def test_a_program_changes_its_home_only_between_two_calls(events):
    """A home moves only while none of its calls is in flight, or when the home takes no calls."""
    desk = Desk(3)
    for at, (what, number, tokens) in enumerate(events):
        program = f"p{number}"
        before = desk.rule._programs.get(program)
        home = before.home if before is not None else None
        if what == "start":
            busy = desk.by_program.get(program, 0)
            away = f"e{number % 3}" if tokens % 7 == 0 else ""
            assert desk.start(program, tokens, float(at), away) != away
            if home is not None and busy and home != away:
                assert desk.rule._programs[program].home == home
        elif what == "end" and desk.flying:
            desk.end()
        elif what == "fill":
            desk.fill(f"e{number % 3}", number)
        elif what == "forget" and not desk.by_program.get(program):
            desk.rule.forget_program(program)
        elif what == "die":
            desk.rule.forget_engine(f"e{number % 3}")
    for program in desk.rule._programs.values():
        assert len(program.held) <= HOMES_MAX
    while desk.flying:
        desk.end()
    assert desk.rule._work == {}
    assert desk.rule._queued == {}


def test_the_tree_prefers_who_knows_the_prompt_until_that_one_is_overloaded():
    """The arm to compare with."""
    tree = PrefixTree(slack_calls=4, excess=1.5)
    beginning = tuple(range(10))

    def choose(prefix: tuple[int, ...], *calls: int) -> str:
        views = [EngineView(f"e{n}", count) for n, count in enumerate(calls)]
        return tree.choose(CallFacts("c", "p", 1000, 0, prefix), views, 0.0)

    first = choose(beginning, 0, 0)
    other = "e1" if first == "e0" else "e0"
    loads = (3, 0) if first == "e0" else (0, 3)
    assert choose((*beginning, 11), *loads) == first
    assert choose((*beginning[:4], *range(100, 110)), *loads) == other
    heavy = (30, 0) if first == "e0" else (0, 30)
    assert choose((*beginning, 11), *heavy) == other
    tree.forget_engine(first)
    assert choose((*beginning, 12), *loads) == other

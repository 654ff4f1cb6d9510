"""What an engine reports of a call: when it ran, why it was taken out, when it was promoted."""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from autellix.server.channel import EVENTS_MAX, CallReport, decode_up, encode
from autellix.server.channel import Accounting as AccountingMessage
from autellix.server.clock import ManualClock
from autellix.server.engine.build import build_config, build_scheduler, make_request
from autellix.server.engine.scheduler import AutellixScheduler

PROMPT = range(1000, 1040)


class Scene:
    """A scheduler of a few slots on a manual clock; its reports are kept."""

    def __init__(self, slots: int = 2, **policy: Any) -> None:
        self.clock = ManualClock(100.0)
        cls = type("Timed", (AutellixScheduler,), {"clock": self.clock})
        config = build_config(
            kv_blocks=256, slots=slots, policy_config={"policy": "plas", **policy}
        )
        self.scheduler = build_scheduler(cls, config=config)
        self.reports: dict[str, CallReport] = {}
        self.scheduler.accounts.on_report = lambda r: self.reports.update({r.request_id: r})

    def add(self, name: str, tokens: int = 900) -> None:
        self.scheduler.add_request(make_request(name, PROMPT, tokens, session_id=name))

    def steps(self, count: int, seconds: float = 0.1) -> None:
        for _ in range(count):
            output = self.scheduler.schedule()
            names = list(output.num_scheduled_tokens)
            self.clock.advance(seconds)
            result = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
            )
            self.scheduler.update_from_output(output, result)

    def end(self, *names: str) -> None:
        for name in names:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def story(self, name: str) -> list[tuple[str, str]]:
        return [(event.what, event.why) for event in self.reports[name].events]


def test_a_preempted_call_says_for_whom_and_how_it_came_back():
    """Demoted by its use, taken out for a call of level 1, run again when that one is over."""
    scene = Scene(slots=1, level_bounds_s=[0.25, 50.0], beta=None, cooldown_steps=0)
    scene.add("long")
    scene.steps(5)
    scene.add("short", tokens=2)
    scene.steps(6)
    scene.end("long")
    story = scene.story("long")
    assert story[0] == ("run", "fresh")
    assert [what for what, _ in story] == ["run", "demote", "preempt", "run"]
    assert story[2] == ("preempt", "waiting:1")
    assert story[3][1] in ("hit", "recompute")
    report = scene.reports["long"]
    times = [event.at_s for event in report.events]
    assert times == sorted(times)
    assert times[-1] <= report.stay_s
    assert (report.first_level, report.level, report.preemptions) == (1, 2, 1)
    assert scene.story("short")[0][0] == "run"


def test_a_promoted_call_says_so():
    """A call that waits too long for its service goes to level 1, and its report tells when."""
    scene = Scene(slots=1, level_bounds_s=[0.25, 50.0], beta=2.0, first_step_s=0.05)
    scene.add("first")
    scene.steps(5)
    scene.add("second")
    scene.steps(40)
    scene.end("first", "second")
    assert sum(report.promotions for report in scene.reports.values()) >= 1
    promoted = next(r for r in scene.reports.values() if r.promotions)
    assert ("promote", "") in [(e.what, e.why) for e in promoted.events]
    assert scene.scheduler.accounts.promotions >= 1


def test_a_story_is_bounded_and_survives_the_wire():
    """The first events are kept and the rest counted; a full message is within its limit."""
    scene = Scene()
    scene.add("a")
    scene.steps(1)
    call = scene.scheduler.calls["a"]
    for number in range(100):
        call.level = 1 + number % 2
        scene.scheduler.accounts.moved(call, scene.clock.now_s())
    scene.end("a")
    report = scene.reports["a"]
    assert len(report.events) == EVENTS_MAX
    assert report.events_dropped > 50
    frame = encode(AccountingMessage(boot_id="b" * 32, reports=(report,) * 256))
    assert len(frame) < 1 << 20
    assert decode_up(frame) == AccountingMessage(boot_id="b" * 32, reports=(report,) * 256)


def test_without_stories_the_figures_are_the_same():
    """The switch of the benchmark changes nothing but the events."""
    reports = []
    for keeps in (True, False):
        scene = Scene(slots=1, level_bounds_s=[0.25, 50.0], beta=None)
        scene.scheduler.accounts.keeps_events = keeps
        scene.add("long")
        scene.steps(5)
        scene.add("short", tokens=2)
        scene.steps(6)
        scene.end("long")
        reports.append(scene.reports["long"])
    told, silent = reports
    assert silent.events == ()
    assert told.preemptions == silent.preemptions
    assert told.service_s == silent.service_s

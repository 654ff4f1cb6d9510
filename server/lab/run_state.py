"""A program and its calls while the simulator runs them: what is left, what it cost so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..call_tag import CallTag, format_call
from .content import ProgramContent, Prompt
from .cost_model import Profile
from .trace import Call, Program
from .workload import Arrival


class CallRun:
    """One call that has arrived at an engine."""

    __slots__ = (
        "arrival_s", "call", "engine", "finished_s", "first_token_s", "high_tokens", "hit_tokens",
        "last_token_s", "level", "longest_gap_s", "place", "program", "prompt", "recomputed_tokens",
        "request", "request_id", "service_s", "started_s",
    )  # fmt: skip

    def __init__(self, program: ProgramRun, place: int, prompt: Prompt, now_s: float) -> None:
        self.program = program
        self.place = place
        self.call: Call = program.program.calls[place]
        self.prompt = prompt
        self.request_id = format_call(
            CallTag(
                call_id=f"{program.number:06x}{self.call.id:05x}",
                thread=0,
                wait_ms=int(program.wait_s * 1000),
                arrival_ms=int(program.arrival_s * 1000),
                by_path=False,
            )
        )
        self.request: Any = None  # vLLM's, set by whoever makes it
        self.arrival_s = now_s
        self.started_s: float | None = None  # its first step
        self.first_token_s: float | None = None
        self.last_token_s = now_s
        self.longest_gap_s = 0.0  # between two of its tokens: where preemption shows
        self.finished_s: float | None = None
        self.service_s = 0.0
        self.high_tokens = 0  # how far it was ever computed
        self.hit_tokens = 0
        self.recomputed_tokens = 0
        self.level = 0
        self.engine = 0  # its number

    @property
    def wait_s(self) -> float:
        """Seconds it could have run but did not; only once it is over."""
        assert self.finished_s is not None
        return self.finished_s - self.arrival_s - self.service_s


class ProgramRun:
    """One program from its arrival to the end of its last call.

    ``left_s`` is what a clairvoyant scheduler knows: the work of the calls that are not over.
    """

    __slots__ = (
        "_children", "alone_s", "arrival_s", "calls_left", "content", "ended_s", "hit_tokens",
        "left_s", "number", "output_tokens", "program", "prompt_tokens", "service_s", "tool_s",
        "wait_s", "waiting_parents", "work_s", "working_set_tokens",
    )  # fmt: skip

    def __init__(self, arrival: Arrival, content: ProgramContent, facts: ProgramFacts) -> None:
        calls = arrival.program.calls
        self.number = arrival.number
        self.program: Program = arrival.program
        self.arrival_s = arrival.at_s
        self.content: ProgramContent | None = content
        self.alone_s = facts.alone_s
        self.work_s = facts.work_s
        self.output_tokens = facts.output_tokens
        self.working_set_tokens = facts.working_set_tokens
        self.left_s = sum(facts.work_s)
        self.calls_left = len(calls)
        self.waiting_parents = [len(call.parents) for call in calls]
        self._children = facts.children
        self.ended_s: float | None = None
        self.service_s = 0.0
        self.wait_s = 0.0
        self.tool_s = 0.0
        self.hit_tokens = 0
        self.prompt_tokens = 0

    def roots(self) -> list[int]:
        """Return the places of the calls without parents."""
        return [place for place, count in enumerate(self.waiting_parents) if count == 0]

    def finish(self, run: CallRun) -> list[int]:
        """Take one finished call and return the places of the calls that may start now."""
        self.calls_left -= 1
        self.left_s -= self.work_s[run.place]
        self.service_s += run.service_s
        self.wait_s += run.wait_s
        self.hit_tokens += run.hit_tokens
        self.prompt_tokens += run.call.prompt_tokens
        ready = []
        for child in self._children[run.place]:
            self.waiting_parents[child] -= 1
            if not self.waiting_parents[child]:
                ready.append(child)
        if not self.calls_left:
            self.ended_s = run.finished_s
            self.content = None
        return ready


class ProgramFacts:
    """What is true of a program of the trace in every run of it; computed once per trace."""

    __slots__ = ("alone_s", "children", "output_tokens", "work_s", "working_set_tokens")

    def __init__(self, program: Program, profile: Profile, tool_s: Sequence[float]) -> None:
        calls = program.calls
        places = {call.id: place for place, call in enumerate(calls)}
        self.children: list[list[int]] = [[] for _ in calls]
        for place, call in enumerate(calls):
            for parent in call.parents:
                self.children[places[parent]].append(place)
        self.work_s = [
            profile.work_s(c.prefix_tokens, c.prompt_tokens - c.prefix_tokens, c.output_tokens)
            for c in calls
        ]
        ends_s: list[float] = []
        for place, call in enumerate(calls):
            start_s = max((ends_s[places[parent]] for parent in call.parents), default=0.0)
            new = call.prompt_tokens - call.prefix_tokens
            back_s = profile.turnaround_s if call.parents else 0.0
            ends_s.append(
                start_s
                + back_s
                + tool_s[place]
                + profile.alone_s(call.prefix_tokens, new, call.output_tokens)
            )
        self.alone_s = max(ends_s)
        self.working_set_tokens = working_set_tokens(program)
        self.output_tokens = program.output_tokens


def working_set_tokens(program: Program) -> int:
    """Return the most KV tokens that calls of the program hold at once, shared ones once.

    Calls with the same parents run together: the longest prompt, and of each what it adds.
    """
    together: dict[tuple[int, ...], tuple[int, int]] = {}
    for call in program.calls:
        shared, own = together.get(call.parents, (0, 0))
        adds = call.prompt_tokens - call.prefix_tokens + call.output_tokens
        if call.cached_prefix_of is None and call.parents == ():
            adds = call.output_tokens
            shared = max(shared, call.prompt_tokens)
        together[call.parents] = (max(shared, call.prefix_tokens), own + adds)
    return max(shared + own for shared, own in together.values())

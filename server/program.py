"""One program of the process table: its threads, its calls, and where it is in its life.

Pure: time is an argument.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from autellix import wire

from .accounts import Account, Attained, Cost
from .wishes import NO_WISHES, Wishes

THREADS_MAX: Final = 1024  # per program; the oldest thread without a call in flight gives way
UNCONSUMED_MAX: Final = 1024
RECENT_CALLS_MAX: Final = 256  # client call ids by which a retry is recognised
ENGINES_MAX: Final = 64
LABELS_MAX: Final = 1024
TOOLS_MAX: Final = 64  # running at once; more are not told apart from none
TTL_S_MAX: Final = 3600.0
IDLE_AFTER_S: Final = 10.0


class ProgramState(enum.Enum):
    """Where a program is in its life."""

    ACTIVE = "active"  # a call is in flight
    TOOL_WAIT = "tool_wait"  # the latest call ended a moment ago; the next is to be expected
    IDLE = "idle"  # open, nothing to be seen of it
    DRAINING = "draining"  # ended by its owner, with calls still in flight
    ENDED = "ended"  # a tombstone, kept for late calls and reports
    EXPIRED = "expired"  # a tombstone of a program that nobody ended


class CallKey(NamedTuple):
    """A call by its place: the thread, and its number in it."""

    thread: int
    seq: int


class Arrival(NamedTuple):
    """What is known of a call when it arrives. Only ``scope`` is always there."""

    scope: str  # whose key it came with; the same session under another key is another program
    session: str | None = None  # None: untagged, a program of its own
    thread: int | None = None
    thread_label: str | None = None  # for families whose threads have names
    parent: wire.ParentCall | None = None
    follows: tuple[wire.ParentCall, ...] = ()  # what the thread comes after besides its fork
    parent_session: str | None = None
    seq: int | None = None
    client_call: str | None = None
    attempt: int = 0  # retries before this one
    node: str | None = None
    conversation: str | None = None
    client: str | None = None
    wishes: Wishes = NO_WISHES


def program_id_of(scope: str, session: str) -> str:
    """Return the id of a session of one key: 32 hex digits, the same in every gateway."""
    # the length keeps ("a", "b:c") and ("a:b", "c") apart
    text = f"{len(scope)}:{scope}:{session}"
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"autellix-program").hexdigest()


class Elsewhere(NamedTuple):
    """What other gateways have seen of a program; it is part of the program's own figures."""

    wait_s: float = 0.0
    calls: int = 0


class Tokens(NamedTuple):
    """What a call took."""

    prompt_tokens: int
    hit_tokens: int | None  # found in the engine's cache; None: nobody said
    output_tokens: int


@dataclass(slots=True, eq=False)
class Call:
    """One attempt of one LLM call."""

    call_id: str
    program: Program
    key: CallKey
    begun_s: float
    parents: tuple[CallKey, ...]
    attempt: int = 0
    engine_id: str | None = None
    ended: bool = False
    superseded: bool = False  # a later attempt has taken its place
    cost: Cost = field(default_factory=Cost)
    usage: Tokens | None = None  # by the answer itself, as long as no engine has reported


@dataclass(slots=True, eq=False)
class Thread:
    """A chain of calls inside a program."""

    number: int
    parent: wire.ParentCall | None
    follows: tuple[wire.ParentCall, ...] = ()
    calls_begun: int = 0
    calls_ended: int = 0
    next_seq: int = 0
    last_call: CallKey | None = None
    moved: bool = True  # its fork point is new: the next call comes after what was known there
    parents: tuple[CallKey, ...] = ()  # of its latest call


@dataclass(slots=True, eq=False)
class Program:
    """One run of an agent."""

    program_id: str
    scope: str
    session: str | None
    name: str
    arrival_s: float
    account: Account
    lease_until_s: float
    last_call_s: float
    conversation: str | None = None
    parent_session: str | None = None
    opener: dict[str, Any] | None = None  # what the owner said at the start
    ended_s: float | None = None
    end_reason: str | None = None
    expired: bool = False
    completed_s: float | None = None  # the end of its latest call
    in_flight: int = 0
    calls_begun: int = 0
    calls_ended: int = 0
    calls_retried: int = 0
    calls_late: int = 0  # begun after the end of the program
    calls_reported: int = 0
    wait_s: float = 0.0  # of all its calls
    elsewhere: Elsewhere | None = None  # None: nobody has asked yet
    level: int | None = None
    preemptions: int = 0
    swaps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    home: str | None = None
    engines: dict[str, int] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    threads: dict[int, Thread] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    unconsumed: dict[CallKey, None] = field(default_factory=dict)
    ttl_s: float | None = None  # the owner's wish for its lease
    weight: float | None = None
    deadline_s: float | None = None
    kind: str | None = None  # see ``wishes.py``
    tools: dict[str, str] = field(default_factory=dict)  # running now: id → name
    tools_run: int = 0
    recent: dict[str, Call] = field(default_factory=dict)
    calls_counted: int = 0  # whose tokens are known, by a report or by the answer itself
    is_counted: bool = False  # its end is in the metrics

    def state(self, now_s: float) -> ProgramState:
        """Return where the program is in its life."""
        if self.ended_s is not None:
            return ProgramState.DRAINING if self.in_flight else ProgramState.ENDED
        if self.in_flight:
            return ProgramState.ACTIVE
        if self.expired:
            return ProgramState.EXPIRED
        if self.tools:
            return ProgramState.TOOL_WAIT
        if self.completed_s is not None and now_s - self.completed_s < IDLE_AFTER_S:
            return ProgramState.TOOL_WAIT
        return ProgramState.IDLE

    @property
    def is_tombstone(self) -> bool:
        """Whether it is over and only remembered."""
        return not self.in_flight and (self.ended_s is not None or self.expired)

    def thread_of(self, arrival: Arrival) -> Thread:
        """Return the thread that a call belongs to, made if it is new."""
        number = arrival.thread
        if number is None:
            number = self._labelled(arrival.thread_label) if arrival.thread_label else 0
        thread = self.threads.get(number)
        if thread is None:
            thread = self._add_thread(number, arrival.parent, arrival.follows)
        elif arrival.parent is not None and (arrival.parent, arrival.follows) != (
            thread.parent,
            thread.follows,
        ):
            thread.parent, thread.follows = arrival.parent, arrival.follows
            thread.moved = True
        parent, follows = arrival.parent, arrival.follows
        # A thread that has made no call yet is known by what is said of it here: where it was
        # forked is the next point. (The main thread was forked nowhere.)
        while parent and follows and not parent.seq and parent.thread not in (0, number):
            if parent.thread not in self.threads:
                self._add_thread(parent.thread, follows[0], ())
            parent, follows = follows[0], follows[1:]
        return thread

    def parents_of_next(self, thread: Thread) -> tuple[CallKey, ...]:
        """Return the calls that happened before the next one of ``thread``.

        They are the thread's latest call and the completed calls of the threads below it. At the
        first call, and when the fork point has moved, there is also what the parent knew then.
        """
        parents = dict.fromkeys(self._completed_below(thread.number))
        if thread.last_call is not None:
            parents[thread.last_call] = None
        if thread.moved:
            thread.moved = False
            parents.update(dict.fromkeys(self._known_at_fork(thread)))
        return tuple(parents)

    def _known_at_fork(self, thread: Thread) -> list[CallKey]:
        """Return the fork's call, and the completed ones below the parent, up to a made call.

        The same for every other thread that this one follows.
        """
        known: list[CallKey] = []
        for point in (thread.parent, *thread.follows):
            seen, fork = {thread.number}, point
            while fork is not None and fork.thread not in seen:
                seen.add(fork.thread)
                below = self._completed_below(fork.thread)
                known += (k for k in below if k.thread != thread.number)
                if fork.seq > 0:
                    known.append(CallKey(fork.thread, fork.seq - 1))
                    break
                parent = self.threads.get(fork.thread)
                fork = parent.parent if parent is not None else None
        return known

    def _completed_below(self, number: int) -> list[CallKey]:
        return [k for k in self.unconsumed if k.thread != number and self._below(k, number)]

    def note_completed(self, call: Call) -> None:
        """Remember a completed call until a later one that comes after it is completed as well.

        It then stands for its own parents in its thread and below; what it knew from its fork
        stays, for its siblings.
        """
        number = call.key.thread
        for key in call.parents:
            if key in self.unconsumed and (key.thread == number or self._below(key, number)):
                del self.unconsumed[key]
        while len(self.unconsumed) >= UNCONSUMED_MAX:
            del self.unconsumed[next(iter(self.unconsumed))]
        self.unconsumed[call.key] = None

    def forget_wishes(self) -> None:
        """Forget what was said of a run that is over: the session may begin another one."""
        self.weight = self.deadline_s = self.kind = None

    def note_recent(self, client_call: str, call: Call) -> None:
        """Remember a call by the id its client gave it."""
        self.recent[client_call] = call
        if len(self.recent) > RECENT_CALLS_MAX:
            del self.recent[next(iter(self.recent))]

    def attained(self) -> Attained:
        """Return service and wait in the measure that it is charged by."""
        if self.account.accounting == "atlas":
            return self.account.path.longest()
        return Attained(self.account.sum.service_s, self.wait_s)

    def forget_reports(self, call: Call) -> None:
        """Take back what an engine reported of a call that another one begins anew."""
        if call.cost.reports:
            before_s = call.cost.charged_s
            call.cost.forget_reports()
            self.calls_reported -= not call.superseded
            self.account.change(call.cost, before_s)

    def note_usage(self, call: Call, usage: Tokens) -> None:
        """Count the tokens that an answer says it took, until its engine says more."""
        if not call.cost.reports and call.usage is None:
            self._count_tokens(usage, 1)
            self.calls_counted += 1
            call.usage = usage

    def note_tokens(self, call: Call, tokens: Tokens) -> None:
        """Count the tokens that an engine reports, in place of what the answer said."""
        if call.usage is not None:
            self._count_tokens(call.usage, -1)
            call.usage = None
        elif len(call.cost.reports) == 1:  # of several engine requests the first
            self.calls_counted += 1
        self._count_tokens(tokens, 1)

    def _count_tokens(self, tokens: Tokens, sign: int) -> None:
        self.prompt_tokens += sign * tokens.prompt_tokens
        self.hit_tokens += sign * (tokens.hit_tokens or 0)
        self.output_tokens += sign * tokens.output_tokens

    def note_tool(self, tool_id: str, name: str, *, begins: bool) -> bool:
        """Note that a tool call of the agent begins or ends; return whether that is news."""
        if not begins:
            return self.tools.pop(tool_id, None) is not None
        if len(self.tools) >= TOOLS_MAX or tool_id in self.tools:
            return False
        self.tools[tool_id] = name
        self.tools_run += 1
        return True

    def view(self, now_s: float) -> dict[str, Any]:
        """Return the program as a row of JSON; times are ages in seconds."""
        end_s = self.completed_s if self.is_tombstone and self.completed_s is not None else now_s
        return {
            "program_id": self.program_id,
            "session": self.session,
            "name": self.name,
            "state": self.state(now_s).value,
            "reason": self.end_reason,
            "conversation": self.conversation,
            "parent_session": self.parent_session,
            "calls": self.calls_begun,
            "calls_ended": self.calls_ended,
            "calls_in_flight": self.in_flight,
            "calls_retried": self.calls_retried,
            "calls_late": self.calls_late,
            "calls_by_wall_time": max(0, self.calls_ended - self.calls_reported),
            "service_s": round(self.account.service_s, 6),
            "wait_s": round(self.wait_s, 6),
            "level": self.level,
            "levels": {str(k): v for k, v in sorted(self.levels.items())},
            "preemptions": self.preemptions,
            "swaps": self.swaps,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "output_tokens": self.output_tokens,
            "calls_without_tokens": max(0, self.calls_ended - self.calls_counted),
            "tools": self.tools_run,
            "tools_running": sorted(self.tools.values()),
            "home": self.home,
            "engines": dict(self.engines),
            "age_s": round(now_s - self.arrival_s, 6),
            "response_s": round(end_s - self.arrival_s, 6),
            "weight": self.weight if self.weight is not None else 1.0,
            "deadline_in_s": None if self.deadline_s is None else round(self.deadline_s - now_s, 3),
            "threads": [
                {
                    "thread": thread.number,
                    "parent": list(thread.parent) if thread.parent else None,
                    "calls": thread.calls_begun,
                    "calls_ended": thread.calls_ended,
                    "last_parents": [list(key) for key in thread.parents],
                }
                for thread in sorted(self.threads.values(), key=lambda thread: thread.number)
            ],
        }

    def _labelled(self, label: str) -> int:
        number = self.labels.get(label)
        if number is None:
            if len(self.labels) >= LABELS_MAX:
                del self.labels[next(iter(self.labels))]
            number = self.labels[label] = max([0, *self.labels.values(), *self.threads]) + 1
        return number

    def _below(self, key: CallKey, ancestor: int) -> bool:
        """Return whether ``key`` lies in the subtree of ``ancestor``."""
        thread = self.threads.get(key.thread)
        for _ in range(len(self.threads)):  # a client may claim a ring of parents
            if thread is None or thread.parent is None:
                return False
            if thread.parent.thread == ancestor:
                return True
            thread = self.threads.get(thread.parent.thread)
        return False

    def _add_thread(
        self, number: int, parent: wire.ParentCall | None, follows: tuple[wire.ParentCall, ...]
    ) -> Thread:
        if len(self.threads) >= THREADS_MAX:
            self._forget_a_thread()
        thread = self.threads[number] = Thread(number, parent, follows)
        return thread

    def _forget_a_thread(self) -> None:
        for number, thread in self.threads.items():
            if number and thread.calls_begun == thread.calls_ended:
                del self.threads[number]
                return
        del self.threads[next(iter(self.threads))]

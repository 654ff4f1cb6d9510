"""The process table: all programs of one gateway, and the service they have had.

Every call is begun once and ended once, here; what it costs is its wall time until its engine
reports, and what the engine measured from then on. Reports may be late, doubled or lost: a report
changes the figures once, and a call without one stays charged by wall time and is counted as such.

Bounds: at most ``programs_max`` programs. When the table is full, the oldest tombstone gives way,
then the open program without a call in flight that has been silent longest; a program with a call
in flight is never dropped, and when there are only such, `TableFull` is raised.

Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from autellix import wire

from . import channel
from .accounts import Account, Charged, Cost
from .accounts import Accounting as Accounting
from .changes import Changes
from .leases import TOMBSTONE_S as TOMBSTONE_S
from .leases import Leases
from .program import ENGINES_MAX, Arrival, Call, CallKey, Program, Tokens
from .program import program_id_of as program_id_of
from .wishes import Kinds

PROGRAMS_MAX: Final = 100_000
CLOSED_CALLS_MAX: Final = 65_536
SWEEP_MAX: Final = 256
REPORTS_PER_CALL_MAX: Final = 512


class TableFull(Exception):
    """Every program in the table has a call in flight, and there is no room for another."""


class ProcessTable:
    """All programs of one gateway. Not thread-safe: it belongs to the event loop."""

    def __init__(
        self,
        *,
        accounting: Accounting = "plas",
        now_s: float = 0.0,
        lease_s: float = wire.LEASE_S,
        programs_max: int = PROGRAMS_MAX,
        closed_calls_max: int = CLOSED_CALLS_MAX,
    ) -> None:
        self._accounting = accounting
        self.lease_s = lease_s
        self._programs_max = programs_max
        self._closed_max = closed_calls_max
        self._programs: dict[str, Program] = {}
        self._leases = Leases(now_s, lease_s)
        self._calls: dict[str, Call] = {}
        self._open: dict[str, Call] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()  # ended calls, whose report may come
        self._loads: dict[str, int] = {}
        self._unchecked: list[Program] = []
        self.kinds = Kinds()
        self.last_report_s: float | None = None
        self.changes = Changes()
        self.counts: dict[str, int] = dict.fromkeys(
            ("programs_begun", "programs_evicted", "calls_begun", "calls_ended", "duplicate_calls",
             "reports", "reports_duplicate", "reports_unknown", "reports_foreign",
             "calls_never_reported"), 0,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def accounting(self) -> Accounting:
        """The measure that programs are charged by; all keep both, so it may change at any time."""
        return self._accounting

    @accounting.setter
    def accounting(self, accounting: Accounting) -> None:
        self._accounting = accounting
        for program in self._programs.values():
            program.account.accounting = accounting

    def get(self, program_id: str) -> Program | None:
        """Return a program, tombstones included."""
        return self._programs.get(program_id)

    def programs(self) -> Iterator[Program]:
        """Yield every program, oldest first."""
        return iter(self._programs.values())

    def program_views(
        self, now_s: float, scope: str | None = None, *, rows_max: int | None = None
    ) -> list[dict[str, Any]]:
        """Return a row for each program, oldest first; of one scope only if it is given.

        Args:
            now_s: The time.
            scope: Whose programs.
            rows_max: Of more than so many, the newest.
        """
        newest = (p for p in reversed(self._programs.values()) if scope is None or p.scope == scope)
        return [p.view(now_s) for p in islice(newest, rows_max)][::-1]

    def count_of(self, scope: str) -> int:
        """Return how many programs there are of one scope."""
        return sum(program.scope == scope for program in self._programs.values())

    def loads(self) -> dict[str, int]:
        """Return the calls in flight by engine id."""
        return dict(self._loads)

    @property
    def in_flight(self) -> int:
        """The calls in flight."""
        return len(self._open)

    def open_program(
        self, scope: str, session: str, now_s: float, *, reopen: bool = False
    ) -> Program:
        """Return the program of a session, made if it is new, revived if it had expired.

        Args:
            scope: Whose key it is.
            session: The client's id.
            now_s: The time.
            reopen: An ended session begins again, with the service it had: its owner says so.

        Raises:
            TableFull: there is no room for a new one.
        """
        program_id = program_id_of(scope, session)
        program = self._programs.get(program_id)
        if program is None:
            program = self._add(program_id, scope, session, now_s)
        elif reopen and program.ended_s is not None:
            program.ended_s = program.end_reason = None
        self._touch(program, now_s)
        return program

    def begin_call(self, arrival: Arrival, fresh_id: str, now_s: float) -> tuple[Call, Call | None]:
        """Begin a call and return it, with the attempt in flight that it takes the place of.

        Args:
            arrival: What is known of the call.
            fresh_id: 8 to 40 hex digits that no other call has.
            now_s: The time.

        Raises:
            TableFull: the call is of a new program and there is no room for one.
        """
        if arrival.session is None:
            program = self._add(fresh_id, arrival.scope, None, now_s)
        else:
            program = self.open_program(arrival.scope, arrival.session, now_s)
        earlier = program.recent.get(arrival.client_call) if arrival.client_call else None
        if earlier is not None and arrival.attempt <= earlier.attempt:
            self.counts["duplicate_calls"] += 1  # two calls with one id: both are served
            earlier = None
        if earlier is not None:
            call = self._again(earlier, arrival.attempt, fresh_id, now_s)
        else:
            call = self._begin(program, arrival, fresh_id, now_s)
        if arrival.client_call is not None:
            program.note_recent(arrival.client_call, call)
        program.account.begin(call.cost)
        program.last_call_s = now_s
        program.in_flight += 1
        self._calls[fresh_id] = self._open[fresh_id] = call
        self._leases.fly(program)
        program.expired = False
        self.changes[program.program_id] = None
        return call, earlier if earlier is not None and not earlier.ended else None

    def dispatch(self, call: Call, engine_id: str) -> None:
        """Note the engine that a call is sent to; again if it is sent elsewhere."""
        assert not call.ended, f"call {call.call_id} has ended"
        if call.engine_id is not None:
            self._unload(call.engine_id)
            call.program.forget_reports(call)
        program = call.program
        call.engine_id = program.home = engine_id
        self._loads[engine_id] = self._loads.get(engine_id, 0) + 1
        if engine_id in program.engines or len(program.engines) < ENGINES_MAX:
            program.engines[engine_id] = program.engines.get(engine_id, 0) + 1

    def end_call(self, call: Call, now_s: float, *, completed: bool = True) -> None:
        """End a call; a second time is no harm.

        Args:
            call: The call.
            now_s: The time.
            completed: Whether it was answered, so that later calls may depend on it. A call that
                never reached an engine is charged nothing.
        """
        if call.ended:
            return
        call.ended = True
        del self._open[call.call_id]
        program = call.program
        before_s = call.cost.charged_s
        call.cost.ended = True
        if call.engine_id is not None:
            call.cost.wall_s = max(0.0, now_s - call.begun_s)
            self._unload(call.engine_id)
        program.account.change(call.cost, before_s)
        program.in_flight -= 1
        program.completed_s = now_s
        if not call.superseded:
            self._count_end(call)
            if completed:
                program.note_completed(call)
        self._close(call)
        self._touch(program, now_s)
        if program.session is None:
            program.ended_s, program.end_reason = now_s, "ok" if completed else "error"
            self._bury(program, now_s)

    def end_program(self, program: Program, reason: str, now_s: float) -> None:
        """End a program; with calls in flight it drains first."""
        if program.ended_s is None:
            program.ended_s, program.end_reason = now_s, reason
            program.forget_wishes()
            self.changes[program.program_id] = None
        if not program.in_flight:
            self._bury(program, now_s)

    def renew(self, program_id: str, now_s: float) -> bool:
        """Renew the lease of an open program; return whether there is one."""
        program = self._programs.get(program_id)
        if program is None or program.ended_s is not None or program.expired:
            return False
        self._touch(program, now_s)
        return True

    def fold_report(
        self, engine_id: str, boot_id: str, report: channel.CallReport, now_s: float
    ) -> bool:
        """Charge what an engine measured, once; return whether the report changed anything.

        A call of several engine requests (n = 2, several prompts) is charged each of them in a sum,
        and the longest of them on a path. A report of a call that is not known any more changes
        nothing and is counted: whether it was charged before cannot be told.
        """
        self.counts["reports"] += 1
        self.last_report_s = now_s
        call = self._calls.get(report.call_id) if report.call_id is not None else None
        if call is None:
            self.counts["reports_unknown" if report.call_id else "reports_foreign"] += 1
            return False
        cost, program = call.cost, call.program
        mark = f"{boot_id}/{report.request_id}"
        if mark in cost.reports or len(cost.reports) >= REPORTS_PER_CALL_MAX:
            self.counts["reports_duplicate"] += 1
            return False
        if call.engine_id != engine_id or report.program_id not in (None, program.program_id):
            self.counts["reports_foreign"] += 1  # an engine speaks for its own calls only
            return False
        before_s = cost.charged_s
        if not cost.reports and not call.superseded:
            program.calls_reported += 1
        cost.tell(mark, max(0.0, report.service_s), report.wait_s)
        program.account.change(cost, before_s)
        program.wait_s += max(0.0, report.wait_s)
        program.level = report.level
        program.levels[report.level] = program.levels.get(report.level, 0) + 1
        program.preemptions += report.preemptions
        program.swaps += report.swaps
        program.note_tokens(
            call, Tokens(report.prompt_tokens, report.hit_tokens, report.output_tokens)
        )
        self.changes[program.program_id] = None
        return True

    def has_due(self, now_s: float) -> bool:
        """Return whether `sweep` has work."""
        return self._leases.has_due(now_s)

    def sweep(self, now_s: float) -> list[str]:
        """Expire what is due, forget old tombstones; return programs that are over since last time.

        It takes ``SWEEP_MAX`` programs at most, so that calls need not wait for thousands of leases
        that run out at once: sweep again while `has_due`.

        After a standstill of the gateway nobody could renew a lease, so none runs out before half
        a lease has passed.
        """
        leases = self._leases
        leases.note_sweep(now_s)
        for _ in range(SWEEP_MAX):
            if not leases.has_due(now_s):
                break
            program = leases.pop_due()
            if self._programs.get(program.program_id) is not program:
                continue  # evicted meanwhile
            due_s = leases.due_s(program)
            if due_s > now_s:
                leases.arm(program, due_s)
            elif program.is_tombstone:
                self._drop(program)
            elif program.in_flight:
                leases.arm(program, now_s + self.lease_s)
            else:
                program.expired = True
                self._bury(program, now_s)
                leases.arm(program, now_s + TOMBSTONE_S)
        return leases.take_over()

    def take_changed(self, now_s: float) -> list[tuple[Program, Charged]]:
        """Return the programs that have changed since the last time this was asked.

        With each comes what was charged here, the wall time so far of its calls in flight included:
        that is what is to be remembered if everything stops now.
        """
        running: dict[str, list[tuple[Cost, float]]] = {}
        for call in self._open.values():
            program_id = call.program.program_id
            self.changes[program_id] = None
            if not call.cost.reports:
                so_far_s = max(0.0, now_s - call.begun_s)
                running.setdefault(program_id, []).append((call.cost, so_far_s))
        changed = [
            (program, program.account.charged(running.get(program_id, ())))
            for program_id in self.changes
            if (program := self._programs.get(program_id)) is not None
        ]
        self.changes.clear()
        return changed

    def put_back(self, programs: Iterable[Program]) -> None:
        """Take programs as changed again, that could not be remembered."""
        self.changes.update((program.program_id, None) for program in programs)

    def restore(self, program: Program, charged: Charged, now_s: float) -> bool:
        """Take over a program of an earlier life of the gateway, with what it was charged.

        Returns:
            False if the table is full or knows the program already.
        """
        if program.program_id in self._programs or len(self._programs) >= self._programs_max:
            return False
        program.account = Account(self._accounting)
        program.account.restore(charged)
        self.kinds.know(program.kind)
        self._programs[program.program_id] = program
        program.lease_until_s = now_s + self.lease_s
        self._leases.add(program)
        return True

    def renew_until(self, program: Program, until_s: float, now_s: float) -> None:
        """Take over a lease that another gateway has renewed; it counts as no change here."""
        if program.ended_s is None and until_s > max(now_s, program.lease_until_s):
            program.lease_until_s = until_s
            if not program.in_flight:
                program.expired = False
                self._leases.settle(program)

    def check_integrity(self, *, programs_max: int | None = None) -> list[str]:
        """Return what does not add up: an empty list, unless there is a mistake in the table.

        Args:
            programs_max: Look at so many programs only, others each time; all calls are looked at.
        """
        wrong = []
        open_calls = [c for c in self._open.values() if not c.ended]
        loads: dict[str, int] = {}
        in_flight: dict[str, int] = {}
        for call in open_calls:
            in_flight[call.program.program_id] = in_flight.get(call.program.program_id, 0) + 1
            if call.engine_id is not None:
                loads[call.engine_id] = loads.get(call.engine_id, 0) + 1
        if loads != self._loads:
            wrong.append(f"loads are {self._loads}, the calls in flight say {loads}")
        if len(open_calls) != self.in_flight or len(self._closed) + self.in_flight != len(
            self._calls
        ):
            wrong.append(f"{self.in_flight} calls in flight, {len(open_calls)} not ended")
        for program in self._to_check(programs_max):
            program_id = program.program_id
            if program.in_flight != in_flight.get(program_id, 0):
                wrong.append(f"{program_id} counts {program.in_flight} calls in flight")
            if (misplaced := self._leases.check(program)) is not None:
                wrong.append(misplaced)
        if (unleased := self._leases.check_size(len(self._programs))) is not None:
            wrong.append(unleased)
        return wrong

    def _to_check(self, programs_max: int | None) -> list[Program]:
        if programs_max is None:
            return list(self._programs.values())
        if not self._unchecked:
            self._unchecked = list(self._programs.values())
        some = self._unchecked[-programs_max:]
        del self._unchecked[-programs_max:]
        return [p for p in some if self._programs.get(p.program_id) is p]

    def _add(self, program_id: str, scope: str, session: str | None, now_s: float) -> Program:
        if len(self._programs) >= self._programs_max:
            victim = self._leases.victim()
            if victim is None:
                raise TableFull(f"{len(self._programs)} programs have calls in flight")
            self.counts["programs_evicted"] += 1
            self._drop(self._programs[victim])
        program = Program(
            program_id=program_id,
            scope=scope,
            session=session,
            name=session if session is not None else "untagged",
            arrival_s=now_s,
            account=Account(self._accounting),
            lease_until_s=now_s + self.lease_s,
            last_call_s=now_s,
        )
        self._programs[program_id] = program
        self.counts["programs_begun"] += 1
        self._leases.add(program)
        return program

    def _begin(self, program: Program, arrival: Arrival, call_id: str, now_s: float) -> Call:
        thread = program.thread_of(arrival)
        seq = arrival.seq if arrival.seq is not None else thread.next_seq
        thread.next_seq = max(thread.next_seq, seq + 1)
        thread.parents = program.parents_of_next(thread)
        thread.last_call = CallKey(thread.number, seq)
        thread.calls_begun += 1
        program.calls_begun += 1
        program.calls_late += program.ended_s is not None
        self.counts["calls_begun"] += 1
        program.conversation = arrival.conversation or program.conversation
        program.parent_session = arrival.parent_session or program.parent_session
        self.kinds.note(program, arrival.wishes, now_s)
        return Call(call_id, program, thread.last_call, now_s, thread.parents, arrival.attempt)

    def _again(self, earlier: Call, attempt: int, call_id: str, now_s: float) -> Call:
        """Begin another attempt of ``earlier``: the same call, counted and charged once."""
        call = Call(call_id, earlier.program, earlier.key, now_s, earlier.parents, attempt)
        earlier.cost.share_with(call.cost)
        program = earlier.program
        program.calls_retried += 1
        if earlier.ended:  # it was counted, and is now open again
            program.calls_ended -= 1
            self.counts["calls_ended"] -= 1
            if earlier.cost.reports:
                program.calls_reported -= 1
            if (thread := program.threads.get(earlier.key.thread)) is not None:
                thread.calls_ended -= 1
        earlier.superseded = True
        return call

    def _count_end(self, call: Call) -> None:
        program = call.program
        program.calls_ended += 1
        self.counts["calls_ended"] += 1
        if (thread := program.threads.get(call.key.thread)) is not None:
            thread.calls_ended += 1

    def _close(self, call: Call) -> None:
        self._closed[call.call_id] = None
        while len(self._closed) > self._closed_max:
            oldest = self._calls.pop(self._closed.popitem(last=False)[0])
            if oldest.engine_id is not None and not oldest.cost.reports:
                self.counts["calls_never_reported"] += 1

    def _unload(self, engine_id: str) -> None:
        left = self._loads[engine_id] - 1
        assert left >= 0, f"engine {engine_id} has fewer calls than none"
        if left:
            self._loads[engine_id] = left
        else:
            del self._loads[engine_id]

    def _touch(self, program: Program, now_s: float) -> None:
        self._leases.touch(program, now_s)
        self.changes[program.program_id] = None

    def _bury(self, program: Program, now_s: float) -> None:
        self._leases.bury(program, now_s)
        self.changes[program.program_id] = None

    def _drop(self, program: Program) -> None:
        del self._programs[program.program_id]
        program.recent.clear()  # else program and calls hold each other
        self.changes.pop(program.program_id, None)  # without a journal nobody else clears them
        self._leases.drop(program)

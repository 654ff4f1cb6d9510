"""The adaptive policy: a running set by KV room, its order by what programs have left.

A program is *due* at the time it came plus ``ageing`` times the time it has left to run beside the
others: what it has left (``hazard.py``) ÷ the share of a step that a call takes at present. So
short ones go first, and nobody is overtaken by whoever comes later than that. Programs run as long
as their KV fits together (``admission.py``); the others' calls stand in level 2 and are not shown
to the engine. Inside, calls are in level 1 by the due time of their program: those of a join go
together, the one that came first, which others wait for, in front.

Slots of the batch are short only where an engine has few of them. Then a running call gives its
slot to one of a program that is due earlier by the same margin as at the door, and its program
keeps its seat: nobody needs its KV.

Nothing is decided between two steps but in ``promote``, which the scheduler asks in each step.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from .admission import RunningSet
from .base import Arrival, Displaced
from .call import Call
from .config import PolicyConfig
from .elders import Elders
from .gaps import SHORT_S, Gaps
from .hazard import bound_s, bucket_of
from .member import Kinds, Member
from .service import Ledger, Program, fold
from .work import rates
from .working_set import Hashes

INSIDE: Final = 1
AT_DOOR: Final = 2
EVICTABLE_MAX: Final = 1024  # chains, and programs, whose KV waits to be taken away
LEAST_SHARE: Final = 1e-4  # of a step that a call is taken to have, so that nobody is due never
MEAN_OVER: Final = 64  # programs or calls over which a kind's means are taken


class Room:
    """What an engine has: KV tokens, tokens of a block, most tokens of a step."""

    __slots__ = ("block_tokens", "kv_tokens", "step_tokens")

    def __init__(self, kv_tokens: int, block_tokens: int, step_tokens: int) -> None:
        assert kv_tokens > 0
        assert block_tokens > 0
        self.kv_tokens = kv_tokens
        self.block_tokens = block_tokens
        self.step_tokens = step_tokens


class AdaptivePolicy:
    """See the module."""

    by_work = True

    def __init__(self, config: PolicyConfig, room: Room, ledger: Ledger | None = None) -> None:
        self.config = config
        self.room = room
        self.ledger = ledger if ledger is not None else Ledger(config.programs_max)
        self.kinds = Kinds()
        self.gaps = Gaps()
        self.running_set = RunningSet(
            room.kv_tokens * config.kv_fill, room.kv_tokens * config.kv_most
        )
        self.elders = Elders(room.kv_tokens * min(config.elders, config.kv_fill))
        self._numbers = 0
        self._token_s = 1e-4  # to compute one token of a prompt, until it was measured
        self._fetch_token_s = float("inf")  # to save one token's KV elsewhere and fetch it back
        self._work_of_service = 0.1  # the share of a step that a call takes, until it was measured
        self._settled = 0  # calls that it was measured with
        self._evictable: list[Hashes] = []
        self._displaced: dict[Member, Hashes] = {}
        self._moved: list[Call] = []

    # ── calls ──────────────────────────────────────────────────────────────────────────────────

    def arrive(self, arrival: Arrival, now_s: float) -> Call:
        """Return the call, in its level, waiting."""
        first_s = now_s if arrival.program_arrival_s is None else arrival.program_arrival_s
        program = self.ledger.join(arrival.program_id or arrival.call_id, min(first_s, now_s))
        if arrival.by_path:  # sent off under ``atlas``, while the policy is changed
            program.path_s = max(program.path_s, arrival.service_s)
            program.wait_path_s = max(program.wait_path_s, arrival.wait_s)
        else:
            program.sum_s = max(program.sum_s, arrival.service_s)
            program.wait_sum_s = max(program.wait_sum_s, arrival.wait_s)
        self._numbers += 1
        call = Call(arrival.call_id, program, self._numbers, now_s)
        call.prompt_tokens = arrival.prompt_tokens
        call.hashes = arrival.hashes
        call.service_before_s = program.path_s
        call.wait_before_s = program.wait_path_s
        member = self._member(program, arrival)
        member.weight = arrival.weight
        member.deadline_s = arrival.deadline_s
        self._come(member, call, now_s)
        return call

    def enter(self, call: Call) -> None:
        """Put a call that is in the engine where it belongs, after a change of policy."""
        call.armed = 0
        call.promoted = False
        call.quantum_left_s = float("inf")
        member = self._member(call.program, None)
        self._come(member, call, call.arrival_s)
        if call.waiting_since_s is None:
            member.running += 1
            if not member.seated:
                self.running_set.take_seat(member)
                self.elders.sit(member)
                self._place_all(member)

    def charge(self, calls: Iterable[Call], seconds: float) -> bool:
        """Charge each of these calls with service; nobody changes the level for it."""
        for call in calls:
            call.service_s += seconds
        return False

    def charge_work(self, parts: Sequence[tuple[Call, int, int]], seconds: float) -> bool:
        """Share a step among its calls; return whether a program is due at another time now.

        Args:
            parts: Each call with its tokens in the step and its context after it.
            seconds: That the step took.
        """
        tokens = context = 0
        for _, own, held in parts:
            tokens += own
            context += held
        budget = self.room.step_tokens
        token_s, context_s = rates(tokens, context, len(parts), seconds, budget)
        if tokens > budget // 2:
            self._token_s += (seconds / tokens - self._token_s) / MEAN_OVER
        moved = False
        for call, own, held in parts:
            call.held_tokens = held
            work_s = own * token_s + held * context_s
            call.work_s += work_s
            member = call.program.member
            assert isinstance(member, Member)
            member.work_s += work_s
            if member.work_s >= member.next_s:
                moved = True
                self._go_on(member)
            if held > call.expected_tokens:
                self._grow(call, held)
        return moved

    def run(self, call: Call, now_s: float) -> None:
        """The call begins to run."""
        call.stop_waiting(now_s)
        member = self._known(call)
        member.running += 1

    def wait(self, call: Call, now_s: float, *, for_slot: bool = False) -> None:
        """The call was taken out of the batch; if for others' room, its program gives way wholly.

        Whoever was asked to give way does so now, if nothing of it runs any more.
        """
        call.start_waiting(now_s)
        member = self._known(call)
        member.running -= 1
        gives_way = not for_slot or (member.yields and not member.running)
        if gives_way and member.seated and self.running_set.active > 1:
            self.running_set.pause(member)
            self._let_go(member)
            self.elders.stand(member)
            self._moved += self._place_all(member)

    def promote(self, now_s: float) -> list[Call]:
        """Let programs in and out; return the calls that have another place now."""
        for member in self.elders.choose(now_s):
            self._estimate(member)
            self._moved += self._place_all(member)
        inside, out = self.running_set.fill(now_s)
        moved, self._moved = self._moved, []
        for member in out:
            self._displace(member)
            self._let_go(member)
            if member.calls:
                self.elders.stand(member)
            else:
                self.elders.drop(member)
            moved += self._place_all(member)
        for member in inside:
            self.elders.sit(member)
            moved += self._place_all(member)
        return [call for call in moved if call.waiting_since_s is not None and not call.gone]

    def leave(self, call: Call, now_s: float) -> None:
        """The call is over, however it ended; its service goes to its program."""
        was_running = call.waiting_since_s is None
        call.stop_waiting(now_s)
        call.gone = True
        program = call.program
        fold(
            program,
            before_s=call.service_before_s,
            service_s=call.service_s,
            wait_before_s=call.wait_before_s,
            wait_s=call.wait_s,
        )
        member = self._known(call)
        member.running -= was_running
        self._settle(member, call)
        del member.calls[call]
        if not member.calls:
            member.gap_since_s = now_s
            if member.seated:
                self._begin_gap(member, now_s)
            else:
                self.running_set.withdraw(member)
                self.elders.drop(member)
        alone = program.program_id == call.call_id
        if (alone or program.ended) and not member.calls:
            self._end(member)
        self.ledger.leave(program, remember=not alone)

    def note_fetch(self, token_s: float) -> None:
        """Take the cheaper of computing and fetching for what it costs to have KV again."""
        self._fetch_token_s = token_s

    def displaced(self) -> list[Displaced]:
        """Return the programs that lost their seat and are not over; each is told once."""
        found, self._displaced = self._displaced, {}
        return [
            Displaced(
                member.program.program_id, hashes, tuple(call.call_id for call in member.calls)
            )
            for member, hashes in found.items()
        ]

    def evictable(self) -> list[Hashes]:
        """Return the blocks whose KV nobody is expected to want; each is told once."""
        chains, self._evictable = self._evictable, []
        return chains

    def forget(self, program_ids: Iterable[str]) -> None:
        """Programs are over: their seats are free, and it is known how much they took."""
        for program_id in program_ids:
            program = self.ledger.get(program_id)
            if program is not None and program.calls == 0:
                member = program.member
                if isinstance(member, Member) and member.owner is self:
                    self._end(member)
            self.ledger.forget((program_id,))

    def note_tool(self, program_id: str, tool: str | None, now_s: float) -> None:
        """A program waits for this tool, or its last tool has ended: its next call is near.

        The gap is learned under the tool's name, and the seat is kept by what is known of it.
        """
        program = self.ledger.get(program_id)
        member = program.member if program is not None else None
        if not isinstance(member, Member) or member.owner is not self:
            return
        if tool is not None:
            member.gap_key = tool
        elif member.gap_since_s is None:  # it ran beside calls: the gap that comes is another's
            member.gap_key = None
        if self.config.keep_gaps and member.seated and member.gap_since_s is not None:
            end_s = now_s + SHORT_S
            if tool is not None:
                end_s = max(end_s, member.gap_since_s + self._keep_s(member))
            self.running_set.keep_seat(member, end_s)

    # ── programs ───────────────────────────────────────────────────────────────────────────────

    def _known(self, call: Call) -> Member:
        member = call.program.member
        assert isinstance(member, Member)
        return member

    def _member(self, program: Program, arrival: Arrival | None) -> Member:
        member = program.member
        if isinstance(member, Member) and member.owner is self:
            return member
        name = arrival.kind if arrival is not None else None
        hashes = arrival.hashes if arrival is not None else ()
        kind = self.kinds.of(name, hashes)
        self._numbers += 1
        member = Member(self, program, kind, self._numbers)
        # It was on another engine. Of a sum that is not told its path is what is known for certain.
        member.work_s = max(program.sum_s, program.path_s) * self._work_of_service
        member.bucket = bucket_of(member.work_s)
        member.next_s = bound_s(member.bucket)
        program.member = member
        return member

    def _come(self, member: Member, call: Call, now_s: float) -> None:
        if member.gap_since_s is not None:
            gap_s = now_s - member.gap_since_s
            self.gaps.returned(member.gap_key, gap_s)
            member.gap_key = None
            member.began_s += gap_s
            member.gap_since_s = None
            if member.seated:
                self.running_set.end_gap(member)
        kind, working_set = member.kind, member.working_set
        size = self.room.block_tokens
        first = not working_set.recent
        answer = round(kind.answer_tokens)
        call.expected_tokens = call.prompt_tokens + answer
        call.own_tokens = working_set.enter(
            call.hashes, call.prompt_tokens, answer, size, kind.hashes
        )
        if first:
            if working_set.kind_tokens:
                kind.shared_tokens = working_set.kind_tokens
            if kind.name is not None:
                kind.hashes = call.hashes
        member.calls[call] = None
        self._estimate(member)
        if member.seated:
            self.running_set.resized(member)
        elif not self.running_set.at_door(member):
            self.running_set.knock(member)
            self.elders.stand(member)
        self._place(call, member)

    def _estimate(self, member: Member) -> None:
        """Say anew when a program is due. At the door it may only become earlier."""
        left_s = self.kinds.left_s(member.kind, member.work_s)
        # In work, an engine of 4 slots and one of 256 would need ageings that far apart.
        ageing = self.config.ageing / self._work_of_service
        due_s = member.began_s + ageing * left_s / member.weight
        if member.deadline_s is not None:
            due_s = max(
                member.began_s, min(due_s, member.deadline_s - left_s / self._work_of_service)
            )
        at_door = self.running_set.at_door(member)
        member.due_s = min(due_s, member.due_s) if at_door else due_s
        member.left_s = left_s / self._work_of_service
        member.passed = left_s > self.kinds.left_s(member.kind, 0.0)
        member.margin_s = ageing * left_s * self.config.displace
        if member in self.elders:
            # Nobody passes the first at the door: one that could not make room would hold up all.
            member.due_s = member.began_s
            member.margin_s = 0.0
        member.reload_s = ageing * member.room_tokens() * self._return_token_s
        if member.seated:
            self.running_set.moved(member)
        elif at_door:
            self.running_set.knock(member)
            self.elders.stand(member)

    def _place(self, call: Call, member: Member) -> None:
        call.home_level = INSIDE if member.seated else AT_DOOR
        call.place(call.home_level, member.due_s)
        call.displaces_s = member.due_s + member.margin_s if member.seated else float("inf")

    def _place_all(self, member: Member) -> list[Call]:
        for call in member.calls:
            self._place(call, member)
        return list(member.calls)

    def _grow(self, call: Call, tokens: int) -> None:
        """A call has become longer than was expected: expect it to grow by as much again."""
        member = self._known(call)
        expected = tokens + max(self.room.block_tokens, (tokens - call.prompt_tokens) // 2)
        more = expected - call.expected_tokens
        member.working_set.grow(more)
        call.own_tokens += more
        call.expected_tokens = expected
        self.running_set.resized(member)

    def _go_on(self, member: Member) -> None:
        """A program has come into another bucket of work: it has something else left."""
        bucket = bucket_of(member.work_s)
        for known in {member.kind, self.kinds.anybody}:
            known.hazard.passed(member.bucket, bucket)
        member.bucket = bucket
        member.next_s = bound_s(bucket)
        self._estimate(member)
        self._moved += self._place_all(member)

    def _settle(self, member: Member, call: Call) -> None:
        """Take a call's figures over to its program when it ends."""
        kind, working_set = member.kind, member.working_set
        if call.service_s > 0:
            ratio = max(call.work_s / call.service_s, LEAST_SHARE)
            self._settled = min(self._settled + 1, MEAN_OVER)
            self._work_of_service += (ratio - self._work_of_service) / self._settled
        held = max(call.held_tokens, call.prompt_tokens)
        working_set.leave(call.own_tokens, max(0, call.expected_tokens - held))
        answer = held - call.prompt_tokens
        for known in {kind, self.kinds.anybody}:
            known.answer_tokens += (answer - known.answer_tokens) / MEAN_OVER
        self._estimate(member)
        self.running_set.resized(member)

    def _begin_gap(self, member: Member, now_s: float) -> None:
        if not self.running_set.begin_gap(member, now_s + self._keep_s(member)):
            self.elders.drop(member)
            self._displace(member)
            self._let_go(member)

    def _keep_s(self, member: Member) -> float:
        """Return how long a program keeps its seat from the beginning of its gap."""
        if not self.config.keep_gaps:
            return 0.0
        return self.gaps.keep_s(member.gap_key, self.room.kv_tokens * self._return_token_s)

    @property
    def _return_token_s(self) -> float:
        """What it costs to have a token's KV again, the cheaper way."""
        return min(self._token_s, self._fetch_token_s)

    def _end(self, member: Member) -> None:
        """The program is over."""
        if member.seated and member.gap_since_s is not None:
            self.running_set.end_gap(member)
            self.running_set.active -= 1
        self.running_set.withdraw(member)
        self.elders.drop(member)
        for known in {member.kind, self.kinds.anybody}:
            known.hazard.ended(member.bucket)
        self._displaced.pop(member, None)
        self._let_go(member)
        member.program.member = None

    def _displace(self, member: Member) -> None:
        """A program has no seat any more, but it will want its KV again."""
        hashes = member.working_set.longest
        if hashes and len(self._displaced) < EVICTABLE_MAX:
            self._displaced[member] = hashes

    def _let_go(self, member: Member) -> None:
        """Nobody is expected to want a program's own KV soon."""
        working_set = member.working_set
        if len(self._evictable) < EVICTABLE_MAX:
            like = self.kinds.like(working_set.recent)
            self._evictable += working_set.own_chains(like)
        if not member.calls:
            working_set.forget()

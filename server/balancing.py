"""The balancer in a server: fed by the control channel, asked by the gateway.

One object is the only way to an engine, for every endpoint and for `MultiEngine`: `place` takes a
ticket, `call_over` gives it back, and both are called where the process table begins and ends the
call, so that no path can forget one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autellix.errors import ConfigError

from .channel import CallReport, Heartbeat, Hello
from .clock import Clock
from .policy.balancer import Balancer, UnknownPlacementError, build
from .policy.placement import Usage
from .types import CallInfo, Engine


class EngineBalancer:
    """See the module.

    Args:
        rule: A name that `policy.balancer.build` takes.
        clock: The clock of everything in the server.

    Raises:
        ConfigError: there is no such rule.
    """

    def __init__(self, rule: str, clock: Clock) -> None:
        self.rule = rule
        try:
            self._balancer = Balancer(build(rule))
        except UnknownPlacementError as error:
            raise ConfigError(str(error)) from None
        self._clock = clock
        self._boots: dict[str, str] = {}  # engine → the start it was heard of last

    def place(self, call: CallInfo, engines: Sequence[Engine]) -> Engine:
        """Return the engine for a call among those that take calls, at least one."""
        chosen = self._balancer.place(call, [e.engine_id for e in engines], self._clock.now_s())
        return next(engine for engine in engines if engine.engine_id == chosen)

    def call_over(self, call_id: str) -> None:
        """The call is over, however it went; a second time, or an unknown one, is no harm."""
        self._balancer.end(call_id, self._clock.now_s())

    def fold(self, engine_id: str, report: CallReport) -> None:
        """Learn from what an engine measured of a call."""
        if report.call_id is None:
            return
        usage = Usage(
            report.prompt_tokens, report.hit_tokens, report.output_tokens, report.service_s
        )
        self._balancer.measured(engine_id, report.call_id, usage, self._clock.now_s())

    def beat(self, engine_id: str, heartbeat: Heartbeat, hello: Hello | None) -> None:
        """Learn from an engine's figures; a new start of it holds nothing of the one before."""
        if self._boots.get(engine_id) != heartbeat.boot_id:
            if engine_id in self._boots:
                self._balancer.forget_engine(engine_id)
            self._boots[engine_id] = heartbeat.boot_id
        if hello is not None:
            self._balancer.size_of(
                engine_id, slots=hello.slots, kv_tokens=hello.kv_blocks * hello.block_tokens
            )
        self._balancer.said(
            engine_id,
            running=heartbeat.running,
            waiting=heartbeat.waiting,
            now_s=self._clock.now_s(),
        )

    def forget_programs(self, program_ids: Sequence[str]) -> None:
        """Programs are over."""
        for program_id in program_ids:
            self._balancer.forget_program(program_id)

    def forget_engine(self, engine_id: str) -> None:
        """The engine has left the pool."""
        self._boots.pop(engine_id, None)
        self._balancer.forget_engine(engine_id)

    def views(self) -> Mapping[str, Mapping[str, Any]]:
        """Return what is known of each engine, by its name."""
        return {row["engine_id"]: row for row in self._balancer.views()}

    @property
    def leaks(self) -> int:
        """Tickets that had to be taken back, since the engine did not have their calls."""
        return self._balancer.leaks

    def drift(self) -> dict[str, int]:
        """Return by engine what it said last minus what was counted then; 0 when all is idle."""
        return self._balancer.drift()

    def faults(self, loads: Mapping[str, int]) -> list[str]:
        """Return what does not add up between tickets, counts and the process table's ``loads``."""
        wrong = self._balancer.faults()
        if self._balancer.calls() != dict(loads):
            wrong.append(f"calls are {self._balancer.calls()}, the process table says {loads}")
        return wrong

"""What must be so when nothing is under way: no call, no session, no count is left anywhere."""

from __future__ import annotations

from autellix.server import MultiEngine
from autellix.server.program import ProgramState
from tests.gateway.conftest import until

OVER = (ProgramState.ENDED, ProgramState.EXPIRED)


async def check_clean(engine: MultiEngine, *, settle_s: float = 60.0) -> None:
    """Fail unless every counter is at nought, here and in the engines."""
    fleet, table = engine.fleet, engine.fleet.table
    gateway = fleet._gateway
    assert gateway is not None
    await until(lambda: table.in_flight == 0, settle_s)
    assert table.loads() == {}
    assert table.counts["calls_begun"] == table.counts["calls_ended"]
    assert table.check_integrity() == []
    assert gateway.flights == {}
    assert gateway.flights_by_scope == {}
    assert engine.calls_under_way == 0
    assert fleet.balancer.faults(table.loads()) == []
    assert fleet.balancer.leaks == 0

    def engines_idle() -> bool:
        beats = [peer.heartbeat for peer in fleet._channel.peers().values()]
        return all(beat is None or beat.running + beat.waiting == 0 for beat in beats)

    await until(engines_idle, settle_s)
    await until(lambda: not any(fleet.balancer.drift().values()), settle_s)
    assert fleet._channel.mistakes == 0


def open_sessions(engine: MultiEngine) -> int:
    """Return how many programs are not over."""
    now_s = engine.fleet.clock.now_s()
    return sum(p.state(now_s) not in OVER for p in engine.fleet.table.programs())

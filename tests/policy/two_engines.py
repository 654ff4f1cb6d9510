"""Calls of one program on two engines behind the real process table, news of them late."""

from __future__ import annotations

import dataclasses

from autellix.server.channel import CallReport
from autellix.server.policy.base import Arrival
from autellix.server.policy.call import Call
from autellix.server.policy.config import PolicyConfig
from autellix.server.policy.leveled import make_policy
from autellix.server.process_table import Accounting, ProcessTable
from autellix.server.program import Arrival as ClientCall
from autellix.server.program import Call as TableCall

NEAR = 1e-9


@dataclasses.dataclass
class Truth:
    """What somebody who sees everything at once would count, seconds.

    A path goes on from every call that had ended, anywhere, when the next one came to its engine.
    """

    sum_s: float = 0.0
    path_s: float = 0.0
    wait_sum_s: float = 0.0
    wait_path_s: float = 0.0


@dataclasses.dataclass
class Inside:
    """A call in an engine."""

    engine: int
    told: TableCall
    call: Call
    came: Truth  # what was true then


class TwoEngines:
    """See the module. Time is the number of the step; what is charged does not depend on it."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.table = ProcessTable(accounting=measure_of(config.policy))
        self.engines = [make_policy(config) for _ in range(2)]
        self.truth = Truth()
        self.news: list[CallReport] = []
        self.under_way: list[tuple[int, TableCall, Arrival]] = []
        self.inside: list[Inside] = []
        self.count = 0

    def send(self, engine: int) -> None:
        """The gateway sends a call to an engine, with what it knows."""
        self.count += 1
        now_s = float(self.count)
        told, _ = self.table.begin_call(ClientCall("", "p"), f"{self.count:08x}", now_s)
        self.table.dispatch(told, f"e{engine}")
        service_s, wait_s = told.program.attained()
        by_path = self.table.accounting == "atlas"
        arrival = Arrival(told.call_id, "p", service_s, wait_s, by_path=by_path)
        self.under_way.append((engine, told, arrival))

    def arrive(self, which: int) -> Call:
        """One of the calls under way comes to its engine."""
        engine, told, arrival = self.under_way.pop(which % len(self.under_way))
        call = self.engines[engine].arrive(arrival, float(self.count))
        self.inside.append(Inside(engine, told, call, dataclasses.replace(self.truth)))
        return call

    def end(self, which: int, wait_s: float, service_s: float) -> None:
        """A call has waited and run, and is over; its report is under way to the gateway."""
        one = self.inside.pop(which % len(self.inside))
        policy, call, truth = self.engines[one.engine], one.call, self.truth
        policy.run(call, call.arrival_s + wait_s)
        policy.charge([call], service_s)
        policy.leave(call, call.arrival_s + wait_s)
        truth.sum_s += service_s
        truth.path_s = max(truth.path_s, one.came.path_s + service_s)
        truth.wait_sum_s += wait_s
        truth.wait_path_s = max(truth.wait_path_s, one.came.wait_path_s + wait_s)
        self.table.end_call(one.told, one.told.begun_s)  # no wall time: reports alone are charged
        self.news.append(
            CallReport(
                seq=1, call_id=one.told.call_id, program_id=None, request_id="r", reason="stop",
                service_s=service_s, wait_s=wait_s, preemptions=0, swaps=0, prompt_tokens=0,
                hit_tokens=0, output_tokens=0, level=1,
            )
        )  # fmt: skip

    def hear(self, which: int) -> None:
        """One of the reports comes to the gateway."""
        report = self.news.pop(which % len(self.news))
        call = self.table._calls[report.call_id or ""]
        assert self.table.fold_report(call.engine_id or "", "b", report, float(self.count))

    def switch_gateway(self, policy: str) -> None:
        """The gateway goes by another policy."""
        self.table.accounting = measure_of(policy)

    def switch_engine(self, engine: int, policy: str) -> None:
        """The engine goes by another policy, as `AutellixScheduler.set_policy` does it."""
        config = dataclasses.replace(self.config, policy=policy)  # type: ignore[arg-type]
        self.engines[engine] = make_policy(config, self.engines[engine].ledger)
        for one in self.inside:
            if one.engine == engine:
                self.engines[engine].enter(one.call)

    def check(self) -> None:
        """No engine takes the program for larger than it is."""
        truth = self.truth
        for policy in self.engines:
            program = policy.ledger.get("p")
            assert program is None or program.sum_s <= truth.sum_s + NEAR
            assert program is None or program.path_s <= truth.path_s + NEAR
            assert program is None or program.wait_sum_s <= truth.wait_sum_s + NEAR
            assert program is None or program.wait_path_s <= truth.wait_path_s + NEAR

    def calls_at_both(self) -> list[Call]:
        """Deliver all news, let a call come to each engine, and return both."""
        while self.news:
            self.hear(0)
        self.under_way.clear()
        calls = []
        for engine in range(2):
            self.send(engine)
            calls.append(self.arrive(0))
        return calls


def measure_of(policy: str) -> Accounting:
    """Return how a gateway charges under a policy."""
    return "atlas" if policy == "atlas" else "plas"

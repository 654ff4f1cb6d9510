"""What is counted of calls and programs while they come and go. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

from . import metrics
from .call_log import CallRecord
from .channel import CallReport
from .metrics import Counter, Histogram, Metric
from .program import Program
from .views import slowdown_of

FAIRNESS_PROGRAMS: Final = 1024  # the latest ended ones, over which fairness is told

_C: Final = "counter"
_H: Final = "histogram"

CALLS: Final = Metric(
    "autellix_calls_total", _C, "Calls that are over, by how they ended.", ("outcome",)
)
ERRORS: Final = Metric(
    "autellix_call_errors_total", _C, "Calls answered with an error, by HTTP status.", ("code",)
)
PLACED: Final = Metric(
    "autellix_placements_total", _C,
    "Calls sent to an engine, by why it was this one; home is a locality hit.", ("why",),
)  # fmt: skip
DURATION: Final = Metric(
    "autellix_call_duration_seconds", _H, "From a call's coming to its answer's last byte."
)
FIRST_BYTE: Final = Metric(
    "autellix_call_first_byte_seconds", _H, "From a call's coming to its answer's first byte."
)
DISPATCH: Final = Metric(
    "autellix_call_dispatch_seconds", _H, "From a call's coming to its being sent to an engine."
)
DECISION: Final = Metric(
    "autellix_decision_seconds", _H, "Time the balancer took to choose an engine."
)
WAIT: Final = Metric(
    "autellix_call_wait_seconds", _H, "Time a call was runnable in its engine and not running."
)
SERVICE: Final = Metric(
    "autellix_call_service_seconds", _H, "Model time of a call, as its engine measured it."
)
PROMPT: Final = Metric("autellix_call_prompt_tokens", _H, "Prompt tokens of a call.")
OUTPUT: Final = Metric("autellix_call_output_tokens", _H, "Generated tokens of a call.")
PROMPT_TOKENS: Final = Metric(
    "autellix_prompt_tokens_total", _C, "Prompt tokens.", ("engine",)
)  # fmt: skip
HIT_TOKENS: Final = Metric(
    "autellix_hit_tokens_total", _C, "Prompt tokens found in the engine's cache.", ("engine",)
)
OUTPUT_TOKENS: Final = Metric(
    "autellix_output_tokens_total", _C, "Generated tokens.", ("engine",)
)  # fmt: skip
PREEMPTIONS: Final = Metric(
    "autellix_preemptions_total", _C,
    "Calls taken out of the batch: for running ones (room), for a waiting one of a higher level "
    "(waiting), by vLLM for want of blocks (engine).", ("engine", "reason"),
)  # fmt: skip
PROMOTIONS: Final = Metric(
    "autellix_promotions_total", _C, "Calls put into level 1 since they waited too long.",
    ("engine",),
)  # fmt: skip
SWAPS: Final = Metric(
    "autellix_swapped_calls_total", _C, "Preempted calls whose blocks were saved.", ("engine",)
)
ENDED: Final = Metric(
    "autellix_programs_ended_total", _C, "Programs that are over, by how they ended.", ("reason",)
)
PROGRAM_DURATION: Final = Metric(
    "autellix_program_duration_seconds", _H,
    "Completion time: from a program's first sign to the end of its last call.",
)  # fmt: skip
PROGRAM_WAIT: Final = Metric(
    "autellix_program_wait_seconds", _H, "Wait of a program's calls, added up."
)
PROGRAM_SERVICE: Final = Metric(
    "autellix_program_service_seconds", _H, "Attained service of a program that is over."
)
PROGRAM_SLOWDOWN: Final = Metric(
    "autellix_program_slowdown", _H,
    "(service + wait) / service of a program that is over, over its calls that engines reported.",
)  # fmt: skip
PROGRAM_CALLS: Final = Metric("autellix_program_calls", _H, "Calls of a program that is over.")
LAG: Final = Metric(
    "autellix_loop_lag_seconds", _H, "How late the gateway's event loop was, looked at each second."
)
FAIRNESS: Final = Metric(
    "autellix_fairness_jain", "gauge",
    "Jain's index of the slowdowns of the programs that ended last: 1 is all alike.",
)  # fmt: skip

REASONS: Final = ("ok", "error", "cancelled", "atexit")


class CallMetrics:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self._calls = Counter(CALLS)
        self._errors = Counter(ERRORS)
        self._placed = Counter(PLACED)
        self._duration = Histogram(DURATION, metrics.SECONDS)
        self._first_byte = Histogram(FIRST_BYTE, metrics.SECONDS)
        self._dispatch = Histogram(DISPATCH, metrics.SHORT_SECONDS)
        self._decision = Histogram(DECISION, metrics.SHORT_SECONDS)
        self._wait = Histogram(WAIT, metrics.SECONDS)
        self._service = Histogram(SERVICE, metrics.SECONDS)
        self._prompt = Histogram(PROMPT, metrics.TOKENS)
        self._output = Histogram(OUTPUT, metrics.TOKENS)
        self._prompt_tokens = Counter(PROMPT_TOKENS)
        self._hit_tokens = Counter(HIT_TOKENS)
        self._output_tokens = Counter(OUTPUT_TOKENS)
        self._preemptions = Counter(PREEMPTIONS)
        self._promotions = Counter(PROMOTIONS)
        self._swaps = Counter(SWAPS)
        self._ended = Counter(ENDED)
        self._program_duration = Histogram(PROGRAM_DURATION, metrics.LONG_SECONDS)
        self._program_wait = Histogram(PROGRAM_WAIT, metrics.LONG_SECONDS)
        self._program_service = Histogram(PROGRAM_SERVICE, metrics.LONG_SECONDS)
        self._program_slowdown = Histogram(PROGRAM_SLOWDOWN, metrics.RATIOS)
        self._program_calls = Histogram(PROGRAM_CALLS, metrics.COUNTS)
        self.loop_lag = Histogram(LAG, metrics.SHORT_SECONDS)
        self._slowdowns: deque[float] = deque(maxlen=FAIRNESS_PROGRAMS)
        self._reporting: set[str] = set()  # engines that tell what calls took

    def call_over(self, record: CallRecord) -> None:
        """A call is over for its client."""
        assert record.ended_s is not None
        begun_s = record.begun_s
        self._calls.add(1, (record.outcome or "ok",))
        if record.status >= 400:
            self._errors.add(1, (str(record.status),))
        self._duration.observe(record.ended_s - begun_s)
        if record.dispatched_s is not None:
            self._dispatch.observe(record.dispatched_s - begun_s)
            self._decision.observe(record.decided_s)
            for choice in record.choices:
                self._placed.add(1, (choice.why,))
        if record.head_s is not None:
            self._first_byte.observe(record.head_s - begun_s)
        engine_id = record.engine_id
        if record.tokens_from == "usage" and engine_id and engine_id not in self._reporting:
            self._count_tokens(
                engine_id, record.prompt_tokens, record.hit_tokens, record.output_tokens
            )

    def reported(self, engine_id: str, report: CallReport) -> None:
        """An engine has told what one of its requests took."""
        labels = (engine_id,)
        self._reporting.add(engine_id)
        self._wait.observe(report.wait_s)
        self._service.observe(report.service_s)
        self._count_tokens(engine_id, report.prompt_tokens, report.hit_tokens, report.output_tokens)
        if report.promotions:
            self._promotions.add(report.promotions, labels)
        if report.swaps:
            self._swaps.add(report.swaps, labels)
        left = report.preemptions
        if left:
            for event in report.events:
                if event.what == "preempt":
                    left -= 1
                    self._preemptions.add(1, (engine_id, event.why.partition("+")[0][:7]))
            if left > 0:  # more than the report has room for
                self._preemptions.add(left, (engine_id, metrics.OTHER))

    def program_over(self, program: Program, now_s: float) -> None:
        """A program has ended or run out; untagged calls are no programs to be told apart."""
        reason = program.end_reason if program.ended_s is not None else "expired"
        self._ended.add(1, (reason if reason in (*REASONS, "expired") else metrics.OTHER,))
        end_s = program.completed_s if program.completed_s is not None else now_s
        self._program_duration.observe(max(0.0, end_s - program.arrival_s))
        self._program_wait.observe(program.wait_s)
        self._program_service.observe(program.account.service_s)
        self._program_calls.observe(program.calls_begun)
        slowdown = slowdown_of(program)
        if slowdown is not None:
            self._program_slowdown.observe(slowdown)
            self._slowdowns.append(slowdown)

    def forget_engines(self, known: set[str]) -> None:
        """Drop the series of engines that are gone for good."""
        self._reporting &= known
        for counter in (
            self._prompt_tokens, self._hit_tokens, self._output_tokens, self._preemptions,
            self._promotions, self._swaps,
        ):  # fmt: skip
            for labels in [labels for labels in counter.values if labels[0] not in known]:
                del counter.values[labels]

    def jain(self) -> float | None:
        """Return Jain's index of the latest slowdowns, None if there are none."""
        squares = sum(value * value for value in self._slowdowns)
        if not squares:
            return None
        total = sum(self._slowdowns)
        return total * total / (len(self._slowdowns) * squares)

    def text(self) -> str:
        """Return the counters as Prometheus reads them."""
        parts = [
            metrics.family(kept.metric, kept.lines())
            for kept in vars(self).values()
            if isinstance(kept, Counter | Histogram)
        ]
        jain = self.jain()
        if jain is not None:
            parts.append(metrics.family(FAIRNESS, metrics.samples(FAIRNESS, {(): jain})))
        return "".join(parts)

    def _count_tokens(
        self, engine_id: str, prompt: int | None, hit: int | None, output: int | None
    ) -> None:
        labels = (engine_id,)
        self._prompt.observe(prompt or 0)
        self._output.observe(output or 0)
        self._prompt_tokens.add(prompt or 0, labels)
        self._hit_tokens.add(hit or 0, labels)
        self._output_tokens.add(output or 0, labels)

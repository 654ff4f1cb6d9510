"""OpenTelemetry: a span for each call, one for each program, and the context passed on to engines.

A call's span is in the trace of the client's request if that sent a W3C context, else in a trace of
its own; a program that runs for hours must not become one giant trace. So spans are linked, not
nested: a call to its program's span and to the calls before it. A program's trace id is its program
id, so it is the same in every gateway and can be looked up.

Nothing is made of a span while its call is under way but two random numbers. It is written down
some moments after the end, when the engine's report has come, and sent by the exporter's own
thread. Attributes are figures and names of ours: nothing of what a call says is in them.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from autellix.errors import ConfigError

from .call_log import CallLog, CallRecord
from .config import setting
from .decisions import explain
from .program import Program

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

SETTLE_S: Final = 1.0  # so long after its end a call's report has come, or does not
PENDING_MAX: Final = 10_000
LINKS_MAX: Final = 32
PROGRAMS_MAX: Final = 65_536  # whose end is not written twice
_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\Z")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where spans go."""

    endpoint: str = setting("", "OTLP over HTTP, http://HOST:4318/v1/traces; empty: no traces")
    sample: float = setting(
        1.0, "share of the calls without a context of their own", minimum=0, maximum=1
    )


class CallTrace(NamedTuple):
    """What a call's span is called."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool

    @property
    def header(self) -> str:
        """The context for the engine."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


class Tracer:
    """See the module. Belongs to the event loop; the processor has its own thread.

    Args:
        processor: Takes the spans that are over; it must not block.
        sample: Share of the calls that are traced, of those whose client does not say.
        unix_offset_s: The wall clock minus the gateway's.
    """

    def __init__(
        self, processor: SpanProcessor, *, sample: float, unix_offset_s: Callable[[], float]
    ) -> None:
        from opentelemetry.sdk.resources import Resource

        self.dropped = 0
        self._processor = processor
        self._sample = sample
        self._unix_offset_s = unix_offset_s
        self._resource = Resource.create({"service.name": "autellix"})
        self._pending: deque[tuple[float, CallRecord]] = deque()
        self._told: OrderedDict[str, None] = OrderedDict()

    def begin(self, record: CallRecord, context: str | None) -> CallTrace:
        """Name the span of a call that begins.

        Args:
            record: The call's; the name is kept in it.
            context: The client's ``traceparent``, if it sent one.
        """
        match = _PARENT.match(context.strip()) if context else None
        if match and match[1] != _NO_TRACE and match[2] != _NO_SPAN:
            trace_id, parent_id, sampled = match[1], match[2], bool(int(match[3], 16) & 1)
        else:
            trace_id, parent_id = secrets.token_hex(16), None
            sampled = self._sample >= 1 or secrets.randbelow(1 << 20) < self._sample * (1 << 20)
        trace = record.trace = CallTrace(trace_id, secrets.token_hex(8), parent_id, sampled)
        return trace

    def end(self, record: CallRecord, now_s: float) -> None:
        """A call is over; its span is written when it has settled."""
        if not record.trace.sampled:
            return
        if len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        self._pending.append((now_s + SETTLE_S, record))

    def flush(self, log: CallLog, rule: str, now_s: float) -> None:
        """Write down the calls that have settled; all of them at infinity."""
        while self._pending and self._pending[0][0] <= now_s:
            _, record = self._pending.popleft()
            self._processor.on_end(self._call_span(record, log, rule))

    def program_over(self, program: Program, now_s: float) -> None:
        """Write down a program."""
        if program.program_id in self._told:
            return
        self._told[program.program_id] = None
        if len(self._told) > PROGRAMS_MAX:
            self._told.popitem(last=False)
        self._processor.on_end(self._program_span(program, now_s))

    def close(self) -> None:
        """Send what is left; takes as long as the exporter's own time limits allow."""
        self._processor.shutdown()

    def _call_span(self, record: CallRecord, log: CallLog, rule: str) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode

        assert record.ended_s is not None
        row = record.view(record.ended_s)
        trace: CallTrace = record.trace
        linked = [(_program_context(record.program_id), "program")]
        parents = {tuple(key) for key in row["parents"]}
        for other in log.of_program(record.program_id):
            if other.place in parents and other.trace is not None and len(linked) < LINKS_MAX:
                linked.append((_context(other.trace.trace_id, other.trace.span_id), "parent"))
        events = [
            Event(d.what, _clean({"why": d.why, "words": d.words}), self._ns(d.at_s))
            for d in explain(record, rule)
        ]
        failed = record.status >= 500 or record.status == 0
        operation = _OPERATIONS.get(record.path, "inference")
        parent = _context(trace.trace_id, trace.parent_id, remote=True) if trace.parent_id else None
        return ReadableSpan(
            name=f"{operation} {record.model}" if record.model else operation,
            context=_context(trace.trace_id, trace.span_id),
            parent=parent,
            resource=self._resource,
            attributes=_clean(_call_attributes(row, operation)),
            events=events,
            links=[Link(context, {"autellix.link": kind}) for context, kind in linked],
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=self._ns(record.begun_s),
            end_time=self._ns(record.ended_s),
        )

    def _program_span(self, program: Program, now_s: float) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan

        end_s = program.completed_s if program.completed_s is not None else now_s
        named = program.name if program.name != program.session else None
        return ReadableSpan(
            name=f"program {named}" if named else "program",
            context=_program_context(program.program_id),
            resource=self._resource,
            attributes=_clean(
                {
                    "autellix.program.id": program.program_id,
                    "autellix.program.reason": program.end_reason or "expired",
                    "autellix.program.calls": program.calls_begun,
                    "autellix.program.threads": len(program.threads),
                    "autellix.service_s": program.account.service_s,
                    "autellix.wait_s": program.wait_s,
                    "autellix.preemptions": program.preemptions,
                    "autellix.swaps": program.swaps,
                    "gen_ai.usage.input_tokens": program.prompt_tokens,
                    "gen_ai.usage.output_tokens": program.output_tokens,
                }
            ),
            start_time=self._ns(program.arrival_s),
            end_time=self._ns(max(end_s, program.arrival_s)),
        )

    def _ns(self, moment_s: float) -> int:
        return int((moment_s + self._unix_offset_s()) * 1e9)


def open_tracer(config: TracingConfig, unix_offset_s: Callable[[], float]) -> Tracer | None:
    """Return the tracer that is asked for, None if none is.

    Raises:
        ConfigError: OpenTelemetry's SDK is not installed.
    """
    if not config.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: traces need OpenTelemetry's SDK ({error}); allowed is "
            "`pip install autellix[tracing]`, or no endpoint"
        ) from None
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint))
    return Tracer(processor, sample=config.sample, unix_offset_s=unix_offset_s)


_OPERATIONS: Final = {  # as OpenTelemetry's conventions for generative AI call them
    "/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat",
    "/v1/completions": "text_completion", "/v1/embeddings": "embeddings",
}  # fmt: skip


def _call_attributes(row: dict[str, Any], operation: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": row["model"],
        "gen_ai.usage.input_tokens": row["prompt_tokens"],
        "gen_ai.usage.output_tokens": row["output_tokens"],
        "http.response.status_code": row["status"],
        "url.path": row["path"],
        "autellix.program.id": row["program_id"],
        "autellix.call.id": row["call"],
        "autellix.thread": row["thread"],
        "autellix.seq": row["seq"],
        "autellix.attempt": row["attempt"],
        "autellix.node": row["node"],
        "autellix.engine": row["engine"],
        "autellix.outcome": row["outcome"],
        "autellix.level": row["level"],
        "autellix.wait_s": row["wait_s"],
        "autellix.service_s": row["service_s"],
        "autellix.preemptions": row["preemptions"],
        "autellix.promotions": row["promotions"],
        "autellix.swaps": row["swaps"],
        "autellix.hit_tokens": row["hit_tokens"],
    }


def _clean(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


def _context(trace_id: str, span_id: str, *, remote: bool = False) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=flags)


def _program_context(program_id: str) -> Any:
    """Return the span of a program: its trace is named by its id, as is the span."""
    return _context(program_id.ljust(32, "0")[:32], program_id[:16])

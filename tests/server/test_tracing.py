"""Traces: a span a call, links instead of one giant trace, and the context passed to engines."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from autellix.server.channel import CallEvent
from autellix.server.tracing import Tracer, TracingConfig, open_tracer
from tests.gateway.conftest import Rig, running
from tests.gateway.test_receipts import tell

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def traced(sample: float = 1.0) -> AsyncIterator[tuple[Rig, InMemorySpanExporter]]:
    """Run a gateway whose spans stay in memory."""
    exporter = InMemorySpanExporter()
    async with running() as rig:
        assert rig.gateway.book is not None
        rig.gateway.book.tracer = Tracer(
            SimpleSpanProcessor(exporter), sample=sample, unix_offset_s=lambda: 1e9
        )
        yield rig, exporter


def spans_of(rig: Rig, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    """Return the spans of all calls that are over."""
    book = rig.gateway.book
    assert book is not None
    assert book.tracer is not None
    book.tracer.flush(book.log, book.rule, math.inf)
    return list(exporter.get_finished_spans())


def sent_context(rig: Rig, number: int) -> str:
    return rig.engine.seen[number].headers["traceparent"]


async def test_a_call_is_a_span_with_what_became_of_it():
    """Its engine, level, wait and tokens are attributes, its decisions events."""
    async with traced() as (rig, exporter):
        await rig.chat({"X-Autellix-Session": "s"})
        events = (CallEvent(0.1, "run", 1, "fresh"), CallEvent(0.2, "preempt", 2, "room"))
        tell(rig, events=events)
        await rig.settled()
        (span,) = spans_of(rig, exporter)
    assert span.name == "chat m"
    attributes = dict(span.attributes or {})
    assert attributes["autellix.engine"] == "e0"
    assert attributes["autellix.wait_s"] == pytest.approx(0.125)
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert [e.name for e in span.events] == ["place", "run", "preempt"]
    assert span.parent is None
    assert span.start_time is not None
    assert span.start_time > 1e18
    assert sent_context(rig, 0) == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


async def test_a_call_goes_on_in_its_clients_trace():
    """The client's span is the parent; the engine gets ours and not the client's."""
    async with traced() as (rig, exporter):
        await rig.chat({"traceparent": CLIENT, "tracestate": "a=b"})
        await rig.settled()
        (span,) = spans_of(rig, exporter)
    trace_id, parent_id = CLIENT.split("-")[1:3]
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent_id
    assert sent_context(rig, 0).startswith(f"00-{trace_id}-")
    assert parent_id not in sent_context(rig, 0)
    assert rig.engine.seen[0].headers["tracestate"] == "a=b"
    assert rig.engine.seen[0].raw.count(b"traceparent") == 0


async def test_calls_of_a_program_are_linked_and_not_one_trace():
    """Each call has a trace of its own, with links to its program and to the call before it."""
    async with traced() as (rig, exporter):
        for _ in range(2):
            await rig.chat({"X-Autellix-Session": "s"})
        await rig.settled()
        first, second = spans_of(rig, exporter)
        program = next(iter(rig.table.programs()))
        rig.table.end_program(program, "ok", rig.gateway.clock.now_s())
        assert rig.gateway.book is not None
        rig.gateway.book.programs_over([program, program])
        whole = exporter.get_finished_spans()[2:]
    assert first.context.trace_id != second.context.trace_id
    assert [dict(k.attributes or {})["autellix.link"] for k in second.links] == [
        "program",
        "parent",
    ]
    assert second.links[1].context.span_id == first.context.span_id
    assert f"{second.links[0].context.trace_id:032x}" == program.program_id
    assert len(whole) == 1
    assert whole[0].context.span_id == second.links[0].context.span_id
    assert dict(whole[0].attributes or {})["autellix.program.calls"] == 2


async def test_who_is_not_sampled_is_not_written_down():
    """The flag of the client counts; without a client's context the share does."""
    async with traced(sample=0.0) as (rig, exporter):
        await rig.chat()
        assert sent_context(rig, 0).endswith("-00")
        await rig.chat({"traceparent": CLIENT[:-1] + "0"})
        assert sent_context(rig, 1).endswith("-00")
        await rig.chat({"traceparent": CLIENT})
        await rig.settled()
        (span,) = spans_of(rig, exporter)
    assert f"{span.context.trace_id:032x}" in CLIENT


@pytest.mark.parametrize("context", ["", "junk", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "é"])
async def test_a_malformed_context_is_none(context: str):
    """A call with a context that cannot be read has a trace of its own."""
    async with traced() as (rig, exporter):
        await rig.chat({"traceparent": context})
        await rig.settled()
        (span,) = spans_of(rig, exporter)
    assert span.parent is None
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", sent_context(rig, 0))


async def test_nothing_private_is_in_a_span():
    """Neither the session's name nor a word of prompt or answer."""
    secret = "planted-secret"
    async with traced() as (rig, exporter):
        rig.engine.chunk_text = secret
        await rig.chat(
            {"X-Autellix-Session": secret, "authorization": f"Bearer {secret}"},
            messages=[{"role": "user", "content": secret}],
        )
        await rig.settled()
        program = next(iter(rig.table.programs()))
        assert rig.gateway.book is not None
        rig.gateway.book.programs_over([program])
        spans = spans_of(rig, exporter)
    assert len(spans) == 2
    assert secret not in "".join(span.to_json() for span in spans)


async def test_off_by_default():
    """Without an endpoint there is no tracer, and the client's context goes on as it is."""
    assert open_tracer(TracingConfig(), lambda: 0.0) is None
    async with running() as rig:
        await rig.chat({"traceparent": CLIENT})
        assert sent_context(rig, 0) == CLIENT


async def test_a_collector_gets_the_spans_over_http():
    """OTLP over HTTP, by the real exporter: what a collector reads is what happened."""
    got: list[ExportTraceServiceRequest] = []
    arrived = asyncio.Event()

    async def collect(request: web.Request) -> web.Response:
        body = await request.read()
        got.append(ExportTraceServiceRequest.FromString(body))
        arrived.set()
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        async with running() as rig:
            book = rig.gateway.book
            assert book is not None
            book.tracer = open_tracer(TracingConfig(endpoint=url), lambda: 1e9)
            await rig.chat({"X-Autellix-Session": "s"})
            await rig.settled()
            book.tracer and book.tracer.flush(book.log, book.rule, math.inf)
        async with asyncio.timeout(20):  # the gateway's end sends what is left
            await arrived.wait()
    finally:
        await runner.cleanup()
    spans = [s for m in got for r in m.resource_spans for c in r.scope_spans for s in c.spans]
    assert [span.name for span in spans] == ["chat m"]
    named = {a.key: a.value for r in got[0].resource_spans for a in r.resource.attributes}
    assert named["service.name"].string_value == "autellix"
    values = {a.key: a.value for a in spans[0].attributes}
    assert values["autellix.engine"].string_value == "e0"
    assert spans[0].links[0].trace_id.hex() == values["autellix.program.id"].string_value

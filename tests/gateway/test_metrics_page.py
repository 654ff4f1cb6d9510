"""``/metrics``: what is exported is what the documents, the board and the alerts speak of."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from autellix.server import call_metrics, types
from autellix.server.gateway import metrics_page
from autellix.server.gateway.admin import AdminConfig, AdminSite
from autellix.server.gateway.metrics_page import MetricsPage
from autellix.server.listeners import bind
from autellix.server.metrics import Metric

from .conftest import Rig, running
from .test_receipts import tell

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "metrics.md"
BOARD = DOCS / "grafana" / "autellix.json"
ALERTS = DOCS / "grafana" / "alerts.yml"
_ROW = re.compile(r"^\| `([a-z_:]+)(?:\{([a-z_,]+)\})?` \| (\w+) \| (.+) \|$", re.MULTILINE)
_NAME = re.compile(r"\b((?:autellix|process|vllm)[:_][a-z_:]+)\b")


def everything() -> dict[str, Metric]:
    """Return every metric that the code knows, by name."""
    counted = (m for m in vars(call_metrics).values() if isinstance(m, Metric))
    return {m.name: m for m in (*counted, *metrics_page.described())}


ROW = {
    "engine": "e0", "state": "ready", "starts": 1, "calls": 2, "reports_lost": 0,
    "heard_age_s": 0.1, "balancer": {"drift": 0},
    "channel": {"slots": 4, "kv_blocks": 100, "vllm_version": "0.32.0", "scheduler": "S",
                "policy": "plas", "async_scheduling": True},
    "load": {"running": 1, "waiting": 3, "kv_blocks_free": 50, "step": 7, "step_age_s": None,
             "longest_step_s": 0.5, "computed_tokens": 10, "recomputed_tokens": 1,
             "preemptions": 1, "level_waiting": [2, 1],
             "swap": {"swap_outs": 1, "swap_ins": 1, "out_bytes": 4096, "in_bytes": 4096,
                      "out_bytes_s": 1e9, "in_bytes_s": 2e9, "pool_full": 0, "swap_failed": 0,
                      "shelved": 2, "fetched": 1}},
}  # fmt: skip


@asynccontextmanager
async def admin_site(rig: Rig) -> AsyncIterator[tuple[str, str]]:
    """Run the admin site of a gateway; its URL and key."""
    with tempfile.TemporaryDirectory(prefix="ax") as folder:
        site = AdminSite(rig.gateway, AdminConfig(), Path(folder))
        site.add(MetricsPage(rig.gateway).routes())
        listener = bind("127.0.0.1", 0)
        await site.start(listener, None)
        assert site.key_file is not None
        key = site.key_file.read_text().strip()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", key
        finally:
            await site.stop()


async def exported(rig: Rig) -> str:
    """Return the page after some traffic of every kind."""
    rig.gateway.engine_views = lambda: [ROW]
    await rig.chat({"X-Autellix-Session": "s"})
    tell(rig, preemptions=1, promotions=1)
    await rig.chat(model="unknown")
    await rig.settled()
    program = next(iter(rig.table.programs()))
    rig.table.end_program(program, "ok", rig.gateway.clock.now_s())
    book = rig.gateway.book
    assert book is not None
    book.programs_over([program, program])
    return MetricsPage(rig.gateway).text()


async def test_prometheus_reads_what_is_exported(rig: Rig):
    """Its own parser takes the text, and the figures are those of what happened."""
    text = await exported(rig)
    read = {(s.name, *s.labels.values()): s.value for f in parse(text) for s in f.samples}
    assert read["autellix_calls_total", "ok"] == 1
    assert read["autellix_calls_total", "refused"] == 1
    assert read["autellix_call_errors_total", "404"] == 1
    assert read["autellix_leaked_calls",] == 0
    assert read["autellix_engine_state", "e0", "ready"] == 1
    assert read["autellix_engine_state", "e0", "frozen"] == 0
    assert read["autellix_engine_queue_calls", "e0", "2"] == 1
    assert read["autellix_engine_kv_blocks_free", "e0"] == 50
    assert read["autellix_swap_out_bytes_total", "e0"] == 4096
    assert read["autellix_programs_ended_total", "ok"] == 1  # told twice, counted once
    assert read["autellix_balancer_drift_calls", "e0"] == 0
    assert read["process_resident_memory_bytes",] > 1e6


async def test_what_is_exported_is_documented_and_the_other_way_round(rig: Rig):
    """docs/metrics.md has each metric with its labels and kind, and none that is not there."""
    told = {
        name: (kind, tuple(labels.split(",")) if labels else ())
        for name, labels, kind, _ in _ROW.findall(DOCUMENT.read_text())
    }
    known = {m.name: (m.kind, m.labels) for m in everything().values()}
    assert told == known
    text = await exported(rig)
    types_seen = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    on_another_page = {"autellix_engine_metrics_missing"}
    assert {n: kind for n, (kind, _) in known.items() if n not in on_another_page} == types_seen


async def test_no_label_holds_an_id(rig: Rig):
    """Labels are bounded: neither sessions nor calls nor programs are in them."""
    text = await exported(rig)
    assert not re.search(r"[0-9a-f]{24}", text)
    assert '"s"' not in text


def expressions(document: Any) -> list[str]:
    """Return every PromQL expression in a board or in rules."""
    if isinstance(document, dict):
        own = [v for k, v in document.items() if k == "expr" and isinstance(v, str)]
        return own + [e for v in document.values() for e in expressions(v)]
    if isinstance(document, list):
        return [e for v in document for e in expressions(v)]
    return []


def test_board_and_alerts_speak_of_metrics_that_exist():
    """A renamed metric cannot leave an empty panel or a rule that never fires."""
    known = set(everything())
    known |= {f"{n}_{end}" for n, m in everything().items() if m.kind == "histogram"
              for end in ("bucket", "sum", "count")}  # fmt: skip
    known |= {"vllm:num_requests_running", "vllm:num_requests_waiting"}
    board = expressions(json.loads(BOARD.read_text()))
    rules = expressions(yaml.safe_load(ALERTS.read_text()))
    assert len(board) >= 20
    assert len(rules) >= 8
    used = {name for text in (*board, *rules) for name in _NAME.findall(text)}
    used -= {"autellix_engine"}  # a label
    assert used <= known, used - known


async def test_the_page_wants_the_admin_key(rig: Rig):
    """A scraper shows the key; calls are explained there too."""
    async with admin_site(rig) as (url, key):
        async with rig.client.get(f"{url}/metrics") as answer:
            assert answer.status == 401
        bearer = {"authorization": f"Bearer {key}"}
        async with rig.client.get(f"{url}/metrics", headers=bearer) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "autellix_calls_total" in await answer.text()
        _, headers, _ = await rig.chat({"authorization": "Bearer someone"})
        path = f"{url}/autellix/v1/calls/{headers['X-Autellix-Call-Id']}"
        async with rig.client.get(path, headers=bearer) as answer:
            assert (await answer.json())["decisions"][0]["what"] == "place"


async def test_engines_metrics_come_together(rig_of_two: Rig):
    """Each engine's lines carry its name; one that does not answer is named as missing."""
    rig = rig_of_two
    for engine in rig.engines:
        engine.metrics = '# TYPE vllm:x gauge\nvllm:x{engine="0"} 1\n'
    await rig.engines[1].stop()
    async with admin_site(rig) as (url, key):
        bearer = {"authorization": f"Bearer {key}"}
        async with rig.client.get(f"{url}/metrics/engines", headers=bearer) as answer:
            text = await answer.text()
    assert 'vllm:x{autellix_engine="e0",engine="0"} 1' in text
    read = {(s.name, *s.labels.values()): s.value for f in parse(text) for s in f.samples}
    assert read["autellix_engine_metrics_missing", "e0"] == 0
    assert read["autellix_engine_metrics_missing", "e1"] == 1
    assert rig.engines[0].state is types.EngineState.READY


async def test_without_a_book_the_rest_is_exported():
    """A server that remembers no calls still tells of its engines and its table."""
    async with running(calls_remembered=0) as rig:
        await rig.chat()
        text = MetricsPage(rig.gateway).text()
    assert "autellix_calls_begun_total 1" in text
    assert "autellix_call_wait_seconds" not in text

"""``/metrics``: what Prometheus reads of the gateway, its table and its engines.

It hangs on the admin site, where a scraper shows the admin key as a bearer token. The text is made
when it is asked for, from counters that are kept anyway. ``/metrics/engines`` passes on what the
engines say of themselves, each line with a label that names the engine; vLLM's own label ``engine``
is a number inside one of them.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from .. import metrics, types
from ..metrics import Labels, Metric
from ..pool.probe import ask
from . import calls
from .admin import AdminRoute
from .state import GATEWAY, Gateway

_log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_LABEL: Final = "autellix_engine"
SCRAPE_S: Final = 5.0

_C: Final = "counter"
_G: Final = "gauge"
_E: Final = ("engine",)

#: Name of the row → metric, for what the fleet's rows say of an engine.
_OF_ENGINE: Final[tuple[tuple[str, Metric], ...]] = (
    ("calls", Metric("autellix_calls_in_flight", _G, "Calls that the gateway has with it.", _E)),
    ("starts", Metric("autellix_engine_starts_total", _C, "Starts of an engine of ours.", _E)),
    ("running", Metric("autellix_engine_calls_running", _G, "Calls in the batch.", _E)),
    ("waiting", Metric("autellix_engine_calls_waiting", _G, "Calls queued in the engine.", _E)),
    ("slots", Metric("autellix_engine_slots", _G, "Places in the batch.", _E)),
    ("kv_blocks", Metric("autellix_engine_kv_blocks", _G, "KV blocks.", _E)),
    ("kv_blocks_free", Metric("autellix_engine_kv_blocks_free", _G, "Free KV blocks.", _E)),
    ("step", Metric("autellix_engine_steps_total", _C, "Steps; a heartbeat under load.", _E)),
    ("step_age_s", Metric(
        "autellix_engine_step_age_seconds", _G, "Age of the step under way, 0 between steps.", _E)),
    ("longest_step_s", Metric(
        "autellix_engine_step_longest_seconds", _G, "The longest step lately.", _E)),
    ("computed_tokens", Metric(
        "autellix_engine_computed_tokens_total", _C, "Tokens that went through the model.", _E)),
    ("recomputed_tokens", Metric(
        "autellix_engine_recomputed_tokens_total", _C,
        "Of these, tokens computed before a preemption: thrash is their share.", _E)),
    ("preemptions", Metric(
        "autellix_engine_preemptions_total", _C, "Calls taken out of the batch.", _E)),
    ("reports_lost", Metric(
        "autellix_engine_reports_lost_total", _C, "Reports that will never come.", _E)),
    ("heard_age_s", Metric(
        "autellix_engine_heard_age_seconds", _G, "Since the control channel's last word.", _E)),
    ("drift", Metric(
        "autellix_balancer_drift_calls", _G,
        "Calls that the engine said it has minus those counted; 0 when all is idle.", _E)),
    ("out_bytes", Metric("autellix_swap_out_bytes_total", _C, "Bytes saved to host memory.", _E)),
    ("in_bytes", Metric("autellix_swap_in_bytes_total", _C, "Bytes brought back.", _E)),
    ("swap_outs", Metric("autellix_swap_outs_total", _C, "Calls whose blocks were saved.", _E)),
    ("swap_ins", Metric("autellix_swap_ins_total", _C, "Calls whose blocks were loaded.", _E)),
    ("shelved", Metric(
        "autellix_swap_shelved_total", _C, "Programs saved between two calls.", _E)),
    ("fetched", Metric(
        "autellix_swap_fetched_total", _C, "Calls that took their program's saved blocks.", _E)),
    ("pool_full", Metric(
        "autellix_swap_pool_full_total", _C, "Victims recomputed, the pool being full.", _E)),
    ("swap_failed", Metric("autellix_swap_failures_total", _C, "Copies that failed.", _E)),
    ("out_bytes_s", Metric(
        "autellix_swap_out_bytes_per_second", _G, "Bandwidth of swap-outs, as measured.", _E)),
    ("in_bytes_s", Metric(
        "autellix_swap_in_bytes_per_second", _G, "Bandwidth of swap-ins, as measured.", _E)),
)  # fmt: skip

_STATE: Final = Metric(
    "autellix_engine_state", _G, "1 for the state that an engine is in.", ("engine", "state")
)
_QUEUE: Final = Metric(
    "autellix_engine_queue_calls", _G, "Calls queued in a level.", ("engine", "level")
)
_ENGINE_INFO: Final = Metric(
    "autellix_engine_info", _G, "1; what an engine runs.",
    ("engine", "vllm", "scheduler", "policy", "async_scheduling"),
)  # fmt: skip

#: Counter of the process table → metric.
_OF_TABLE: Final[tuple[tuple[str, Metric], ...]] = (
    ("programs_begun", Metric("autellix_programs_begun_total", _C, "Programs, all of them.")),
    ("programs_evicted", Metric(
        "autellix_programs_evicted_total", _C, "Programs forgotten for want of room.")),
    ("calls_begun", Metric("autellix_calls_begun_total", _C, "Calls that were begun.")),
    ("duplicate_calls", Metric(
        "autellix_duplicate_calls_total", _C, "Calls under an id that another call has.")),
    ("reports", Metric("autellix_reports_total", _C, "Reports of engines.")),
    ("reports_duplicate", Metric("autellix_reports_duplicate_total", _C, "Reports seen before.")),
    ("reports_unknown", Metric(
        "autellix_reports_unknown_total", _C, "Reports of calls that are not known.")),
    ("reports_foreign", Metric(
        "autellix_reports_foreign_total", _C, "Reports of calls that are not this gateway's.")),
    ("calls_never_reported", Metric(
        "autellix_calls_never_reported_total", _C, "Forgotten calls, charged by wall time.")),
)  # fmt: skip
_PROGRAMS: Final = Metric("autellix_programs", _G, "Programs in the table, tombstones included.")
_REMEMBERED: Final = Metric("autellix_calls_remembered", _G, "Calls whose story is kept.")
_LEAKED: Final = Metric(
    "autellix_leaked_calls", _G,
    "Calls that the table counts in flight and no handler has; anything but 0 is a mistake.",
)  # fmt: skip
_LEAKS: Final = Metric(
    "autellix_balancer_leaks_total", _C, "Calls that an engine was thought to have and had not."
)
_EVENTS: Final = Metric(
    "autellix_gateway_events_total", _C, "What the gateway met with besides calls.", ("event",)
)
_BUILD: Final = Metric("autellix_build_info", _G, "1; what runs here.", ("version", "policy"))
_CPU: Final = Metric("process_cpu_seconds_total", _C, "CPU time of the gateway's process.")
_MEMORY: Final = Metric("process_resident_memory_bytes", _G, "Its memory.")
_FILES: Final = Metric("process_open_fds", _G, "Its open files.")
_START: Final = Metric("process_start_time_seconds", _G, "When this gateway was made.")
_UNREACHED: Final = Metric(
    "autellix_engine_metrics_missing", _G, "1 for a ready engine whose metrics did not come.", _E
)


class MetricsPage:
    """The routes for a scraper, and for whoever asks about calls on the admin site."""

    def __init__(self, gateway: Gateway, *, with_engines: bool = True) -> None:
        self._gateway = gateway
        self._with_engines = with_engines  # else another process tells of them
        self._version = importlib.metadata.version("autellix")
        self._began_unix_s = gateway.clock.unix_s()

    def routes(self) -> list[AdminRoute]:
        """Return what to hand to `AdminSite.add`."""
        return [
            AdminRoute("GET", "/metrics", self._own),
            AdminRoute("GET", "/metrics/engines", self._engines),
            AdminRoute("GET", "/autellix/v1/calls", calls.list_calls),
            AdminRoute("GET", "/autellix/v1/calls/{call}", calls.get_call),
        ]

    def text(self) -> str:
        """Return everything that is ours."""
        gateway = self._gateway
        views = [_flat(view) for view in gateway.engine_views()] if self._with_engines else []
        parts = []
        if gateway.book is not None:
            names = {engine.engine_id for engine in gateway.engines.all()}
            gateway.book.metrics.forget_engines(names | {view["engine"] for view in views})
            parts.append(gateway.book.metrics.text())
        parts += (metrics.family(m, metrics.samples(m, values)) for m, values in self._now(views))
        return "".join(parts)

    def _now(self, views: list[dict[str, Any]]) -> Iterator[tuple[Metric, Mapping[Labels, float]]]:
        """Yield the figures that are read off, not counted here."""
        gateway = self._gateway
        yield from _engine_figures(views)
        counts = gateway.table.counts
        for name, metric in _OF_TABLE:
            yield metric, {(): counts.get(name, 0)}
        yield _PROGRAMS, {(): len(gateway.table)}
        if gateway.book is not None:
            yield _REMEMBERED, {(): len(gateway.book.log)}
            yield _LEAKS, {(): gateway.book.balancer_leaks()}
        yield _LEAKED, {(): gateway.table.in_flight - len(gateway.flights)}
        yield _EVENTS, {(_event(name),): count for name, count in gateway.counts.items()}
        yield _BUILD, {(self._version, gateway.config.policy): 1}
        yield from _process_figures()
        yield _START, {(): self._began_unix_s}

    async def _own(self, _request: web.Request) -> web.Response:
        return _answer(self.text())

    async def _engines(self, request: web.Request) -> web.Response:
        """Ask every ready engine, and put their answers together."""
        ready = request.app[GATEWAY].ready()
        answers = await asyncio.gather(*(_ask(engine) for engine in ready))
        texts = {e.engine_id: text for e, text in zip(ready, answers, strict=True) if text}
        try:
            merged = metrics.merge(texts, ENGINE_LABEL)
        except metrics.MergeError as error:
            _log.warning("an engine's metrics cannot be read: %s", error)
            merged = ""
        missing: dict[Labels, float] = {
            (e.engine_id,): 0.0 if e.engine_id in texts and merged else 1.0 for e in ready
        }
        return _answer(merged + metrics.family(_UNREACHED, metrics.samples(_UNREACHED, missing)))


def described() -> Iterator[Metric]:
    """Yield every metric that is read off here; the rest is in `call_metrics` and `book`."""
    yield from (metric for _, metric in (*_OF_ENGINE, *_OF_TABLE))
    yield from (
        _STATE, _QUEUE, _ENGINE_INFO, _PROGRAMS, _REMEMBERED, _LEAKED, _LEAKS, _EVENTS, _BUILD,
        _CPU, _MEMORY, _FILES, _START, _UNREACHED,
    )  # fmt: skip


async def _ask(engine: types.Engine) -> str | None:
    answer = await ask(engine.address, "/metrics", api_key=engine.api_key, deadline_s=SCRAPE_S)
    if answer is None or answer.status != 200:
        return None
    return answer.body.decode("utf-8", "replace")


def _flat(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's row with what is nested in it; what nobody said is absent."""
    load, hello = view.get("load") or {}, view.get("channel") or {}
    balancer, swap = view.get("balancer") or {}, load.get("swap") or {}
    flat = {**hello, **load, **swap, **view, "drift": balancer.get("drift")}
    if load and flat.get("step_age_s") is None:
        flat["step_age_s"] = 0.0
    flat["engine"] = view.get("engine") or view.get("engine_id") or "?"
    return flat


def _engine_figures(
    views: list[dict[str, Any]],
) -> Iterator[tuple[Metric, Mapping[Labels, float]]]:
    for name, metric in _OF_ENGINE:
        yield metric, {(v["engine"],): v[name] for v in views if v.get(name) is not None}
    yield _STATE, {(v["engine"], s.value): float(v.get("state") == s.value)
                   for v in views for s in types.EngineState}  # fmt: skip
    yield (
        _QUEUE,
        {
            (v["engine"], str(level)): count
            for v in views
            for level, count in enumerate(v.get("level_waiting") or (), start=1)
        },
    )
    yield _ENGINE_INFO, {
        (v["engine"], v["vllm_version"], v["scheduler"], v["policy"],
         "on" if v["async_scheduling"] else "off"): 1.0
        for v in views if v.get("vllm_version")
    }  # fmt: skip


def _process_figures() -> Iterator[tuple[Metric, Mapping[Labels, float]]]:
    """Yield what Prometheus's own clients tell of a process."""
    yield _CPU, {(): round(time.process_time(), 2)}
    pages = Path("/proc/self/statm")
    if pages.exists():
        yield _MEMORY, {(): int(pages.read_text().split()[1]) * resource.getpagesize()}
        yield _FILES, {(): len(os.listdir("/proc/self/fd"))}  # noqa: PTH208  (names are enough)


def _event(name: str) -> str:
    """Return a counter's name as a label: ``malformed X-Autellix-Seq`` and the like are few."""
    return name.replace(" ", "_").lower()


def _answer(text: str) -> web.Response:
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

"""What is to be seen of real calls on a real engine: receipts, explanations, metrics, dashboard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gateway.dashboard.browser import Visit, chromium
from tests.serve_process import ServeProcess, wait_until

pytestmark = [pytest.mark.heavy, pytest.mark.live, pytest.mark.timeout(420)]

CHAT = "/v1/chat/completions"
FULL = {"X-Autellix-Receipt": "full", "X-Autellix-Session": "seen"}


AGENT = """
import asyncio, autellix, openai

async def main():
    client = openai.AsyncOpenAI(api_key="none")
    async def ask(words, tokens):
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": words}], max_tokens=tokens)
    with autellix.session("live research"):
        await ask("Plan.", 8)
        await asyncio.gather(*(ask(f"Look for {n}.", 24) for n in range(3)))
        await ask("Write.", 8)

asyncio.run(main())
"""


def run_agent(server: ServeProcess) -> None:
    """Run a program of five calls, three of them side by side."""
    environment = {**os.environ, "OPENAI_BASE_URL": server.base_url}
    subprocess.run([sys.executable, "-c", AGENT], env=environment, check=True, timeout=120)


def chat(server: ServeProcess, headers: dict[str, str], **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Say yes."}],
            "max_tokens": 4, **fields}  # fmt: skip
    return server.ask("POST", CHAT, body, headers)


def test_a_real_call_is_explained_from_its_engines_report(tiny_server: ServeProcess):
    """The head of an answer has the receipt, a stream ends with it, and the story is there."""
    answer = chat(tiny_server, FULL)
    assert answer.status == 200
    assert answer.headers["x-autellix-level"] == "1"
    assert int(answer.headers["x-autellix-service-ms"]) >= 0
    streamed = chat(tiny_server, FULL, stream=True)
    _, _, receipt = streamed.body.rpartition(b": autellix ")
    told = json.loads(receipt)
    assert (told["level"], told["preemptions"]) == (1, 0)
    assert told["service_ms"] is not None

    call_id = answer.headers["x-autellix-call-id"]
    call = tiny_server.ask("GET", f"/autellix/v1/calls/{call_id}").json
    assert [d["what"] for d in call["decisions"]] == ["place", "enter", "run"]
    assert call["output_tokens"] == 4
    assert [i["state"] for i in call["intervals"]][:1] == ["gateway"]
    assert "running" in [i["state"] for i in call["intervals"]]


def test_a_scraper_reads_the_gateway_and_the_engines(tiny_server: ServeProcess):
    """Our metrics and vLLM's, with the admin key that the server made."""
    chat(tiny_server, {})
    page = tiny_server.admin_page
    wait_until(lambda: "autellix_call_service_seconds_count 0" not in page("/metrics"), 20)
    assert 'autellix_engine_state{engine="e0",state="ready"} 1' in page("/metrics")
    assert 'autellix_engine="e0"' in page("/metrics/engines")
    assert "vllm:num_requests_running{" in page("/metrics/engines")


def test_the_dashboard_shows_real_programs(tiny_server: ServeProcess):
    """Its row appears by itself; its page has the graph, the calls and when each ran; engines."""
    port, key = tiny_server.admin_site()
    with chromium() as browser:
        one = Visit(browser, f"http://127.0.0.1:{port}/dashboard")
        page = one.page
        page.goto(one.url)
        one.give_key(key)
        run_agent(tiny_server)

        def row() -> list[str]:
            return next((r for r in one.rows() if r[0].startswith("live research")), [])

        wait_until(lambda: row()[2:3] == ["Ended"] and row()[4].startswith("5"), 20)
        page.click(".grid-canvas .grid-row:has-text('live research')")
        page.wait_for_selector("h1:has-text('live research')")
        page.wait_for_selector(".dag .node")
        assert "5 calls in 4 threads" in (page.get_attribute(".dag", "aria-label") or "")
        calls = page.locator("table.calls tbody tr").all_inner_texts()
        assert len(calls) == 5
        assert all("e0" in call for call in calls)
        assert page.locator(".timeline .p-running").count() >= 5
        one.picture("live-program")
        one.go("#/engines")
        page.wait_for_selector(".engine")
        card = page.inner_text(".engine >> nth=0")
        for words in ("e0", "Ready", "heartbeat", "KV cache", "Steps a second"):
            assert words in card
        one.go("#/load")
        page.wait_for_selector(".time-chart .area")
        one.close()

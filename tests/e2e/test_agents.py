"""The main job: unmodified agents at the same time, tagged, on real vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autellix import wire
from tests.serve_process import ServeProcess, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
#: Agent → the calls of each of its threads; the order of threads does not matter.
CALLS = {
    "loop_agent": [5],
    "short_agent": [6],
    "langgraph_agent": [1, 3, 3],
    "autogen_team": [4],
}


def run_agents(server: ServeProcess) -> None:
    """Run all agents at the same time to their ends."""
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": server.base_url,
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "smollm2",
    }
    running = {
        name: subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / f"{name}.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in CALLS
    }
    for name, process in running.items():
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, f"{name}:\n{output}"


def programs(server: ServeProcess) -> dict[str, Any]:
    """Return what the server knows."""
    return server.ask("GET", "/autellix/v1/programs").json


def test_every_call_arrives_with_its_program_and_thread(smollm2_server: ServeProcess):
    """The table has one program for each agent, with its calls in its threads, and all are over.

    What the table counts is what the engine says it served, and nothing stays open or held.
    """
    served_before = smollm2_server.engine_metrics()
    known_before = {row["program_id"] for row in programs(smollm2_server)["programs"]}
    run_agents(smollm2_server)

    def rows() -> list[dict[str, Any]]:
        known = programs(smollm2_server)["programs"]
        return [row for row in known if row["program_id"] not in known_before]

    def is_over() -> bool:
        """All sessions are over, and the engine has reported every call (it does so later).

        At exit a client has half a second to say that its session has ended. On a machine that is
        slower than that, the session is over with its lease.
        """
        over = ("ended", "expired")
        return all(row["state"] in over and not row["calls_by_wall_time"] for row in rows())

    wait_until(is_over, wire.LEASE_S * 1.5, what=lambda: str(rows()))
    assert "ended" in {row["state"] for row in rows()}

    found = {
        row["name"].removesuffix(".py"): sorted(thread["calls"] for thread in row["threads"])
        for row in rows()
    }
    assert found == CALLS
    assert len({row["session"] for row in rows()}) == len(CALLS)
    for row in rows():
        assert row["calls"] == row["calls_ended"] == sum(t["calls"] for t in row["threads"])
        assert row["calls_in_flight"] == 0
        assert row["service_s"] > 0
        assert row["calls_by_wall_time"] == 0, "the engine has reported every call"
        assert row["level"] is not None
        assert row["engines"] == {"e0": row["calls"]}

    served = Counter(smollm2_server.engine_metrics())
    served.subtract(served_before)
    calls_made = sum(map(sum, CALLS.values()))
    assert served["vllm:request_success_total"] == calls_made
    assert sum(row["calls"] for row in rows()) == calls_made
    assert sum(row["prompt_tokens"] for row in rows()) == served["vllm:prompt_tokens_total"]
    assert sum(row["output_tokens"] for row in rows()) == served["vllm:generation_tokens_total"]
    assert served["vllm:num_requests_running"] == served["vllm:num_requests_waiting"] == 0
    known = programs(smollm2_server)
    assert known["calls_in_flight"] == 0
    assert known["table"]["calls_begun"] == known["table"]["calls_ended"]
    engines = smollm2_server.ask("GET", "/autellix/v1/engines").json
    assert not any(engines["loads"].values())

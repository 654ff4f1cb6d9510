"""A server with a swap pool before a real engine that is short of KV: victims come back."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve_process import Reply, serving, wait_until

pytestmark = [pytest.mark.live, pytest.mark.heavy, pytest.mark.timeout(420)]

SERVE = ["--pool-swap-mib", "64", "--policy", "plas", "--pool-drain-s", "5"]
SHORT_OF_KV = "--num-gpu-blocks-override 12 --block-size 32 --max-model-len 320 --max-num-seqs 6"
TOKENS = 180


def metric(page: str, name: str) -> float:
    """Return the sum of a metric over the engines."""
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", page, re.M))


def test_preempted_calls_come_back_from_the_host(tiny_model: Path, tmp_path: Path):
    """Six long answers do not fit: some are swapped out and in, none is lost or recomputed."""
    with serving(tmp_path / "log", str(tiny_model), *SERVE, "--", *SHORT_OF_KV.split()) as server:

        def ask(index: int) -> Reply:
            body = {"model": "tiny", "prompt": f"Program {index} counts: ", "max_tokens": TOKENS,
                    "ignore_eos": True, "temperature": 0}  # fmt: skip
            headers = {"X-Autellix-Session": f"s{index}"}
            return server.ask("POST", "/v1/completions", body, headers, timeout_s=240)

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(6)))
        assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [TOKENS] * 6
        ids = [answer.headers["x-autellix-call-id"] for answer in answers]
        told = [server.ask("GET", f"/autellix/v1/calls/{id}").json for id in ids]
        assert sum(call["swaps"] for call in told) > 0
        assert all(call["swaps"] == call["preemptions"] for call in told), told

        def swapped_in() -> float:
            return metric(server.admin_page("/metrics"), "autellix_swap_ins_total")

        wait_until(lambda: swapped_in() > 0, 20)
        shown = server.admin_page("/metrics")
        assert metric(shown, "autellix_swap_outs_total") >= metric(shown, "autellix_swap_ins_total")
        assert metric(shown, "autellix_swap_in_bytes_total") > 0
        assert metric(shown, "autellix_swap_failures_total") == 0
        assert server.ask("GET", "/autellix/v1/programs").json["calls_in_flight"] == 0


def test_a_program_gets_its_context_back_after_a_tool(tiny_model: Path, tmp_path: Path):
    """Others take its place while it waits; its next call reads saved KV, and answers the same."""
    arguments = ["--pool-swap-mib", "64", "--pool-drain-s", "5", "--", *SHORT_OF_KV.split()]
    with serving(tmp_path / "log", str(tiny_model), *arguments) as server:

        def ask(program: str, prompt: str, tokens: int, **more: object) -> Reply:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
                    "temperature": 0, **more}  # fmt: skip
            headers = {"X-Autellix-Session": program}
            return server.ask("POST", "/v1/completions", body, headers, timeout_s=240)

        def counted(name: str) -> float:
            return metric(server.admin_page("/metrics"), f"autellix_swap_{name}_total")

        prompt = "An agent reads a long file: " + "lines and lines, " * 12
        prompt += ask("agent", prompt, 24).json["choices"][0]["text"]
        with ThreadPoolExecutor(6) as pool:
            others = [
                pool.submit(ask, f"other{n}", f"Program {n} counts: ", TOKENS) for n in range(6)
            ]
            wait_until(lambda: counted("shelved") > 0, 60)
            prompt += " The tool says: done."
            answer = ask("agent", prompt, 24)
            assert all(other.result().status == 200 for other in others)
        wait_until(lambda: counted("fetched") > 0, 20)
        assert counted("in_bytes") > 0
        assert counted("failures") == 0
        # With a salt no block of it is known: all of the prompt is computed.
        anew = ask("judge", prompt, 24, cache_salt="anew")
        assert answer.json["choices"][0]["text"] == anew.json["choices"][0]["text"]

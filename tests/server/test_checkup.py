"""``autellix serve --check``: every finding has a remedy, and nothing is started."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from autellix.server import checkup
from autellix.server.checkup import Finding, examine, main
from autellix.server.config import PoolConfig, ServeConfig
from autellix.server.server_config import ServerConfig
from tests.gateway.conftest import running
from tests.gateway.test_metrics_page import ROW


def config_of(**serve: Any) -> ServerConfig:
    return ServerConfig(serve=ServeConfig(**{"port": 0, **serve}))


def found(config: ServerConfig, model: str | None = None, *args: str) -> dict[str, Finding]:
    """Return the findings by what they are of; of several the last."""
    return {finding.what: finding for finding in examine(config, model, args)}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process that loads the scheduler says; vLLM itself is not imported here."""
    said: list[Any] = [("0.32.0", "AutellixScheduler", "cpu")]
    monkeypatch.setattr(checkup, "_load_scheduler", lambda: said[0])
    return said


def test_a_machine_that_can_serve(loaded: list[Any], tmp_path: Path):
    """With a model, a free port and memory enough there is nothing bad."""
    (tmp_path / "config.json").write_text("{}")
    lines: list[str] = []
    assert main(config_of(), str(tmp_path), (), lines.append) == 0
    text = "".join(lines)
    for word in ("0.32.0 on cpu", "AutellixScheduler loads", "GiB free", "GB/s out", "a free one"):
        assert word in text


def test_whatever_is_bad_has_a_remedy(loaded: list[Any]):
    """A broken vLLM, a model that is not made, a port that is taken, too little memory."""
    loaded[0] = "ModuleNotFoundError: No module named 'vllm'"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = config_of(port=taken.getsockname()[1], replicas=64)
        config = dataclasses.replace(config, pool=PoolConfig(kv_cache_gib=1000))
        findings = found(config, "smollm2-of-nobody")
    assert {name: findings[name].state for name in ("vLLM", "port", "memory")} == dict.fromkeys(
        ("vLLM", "port", "memory"), "bad"
    )
    assert all(f.remedy for f in findings.values() if f.state != "good")
    assert found(config_of())["engines"].state == "bad"


def test_what_works_but_not_as_well_is_a_note(loaded: list[Any], tmp_path: Path):
    """Stock scheduling, no async scheduling, swapping that is off."""
    (tmp_path / "config.json").write_text("{}")
    loaded[0] = ("0.33.0", "AutellixScheduler", "cuda")
    findings = found(config_of(policy="fcfs"), str(tmp_path), "--no-async-scheduling")
    for name in ("scheduler", "async scheduling", "swap"):
        assert (findings[name].state, bool(findings[name].remedy)) == ("note", True)
    assert found(config_of(), str(tmp_path))["async scheduling"].state == "good"
    refused = found(config_of(policy="plas"), str(tmp_path), "--no-async-scheduling")
    assert refused["async scheduling"].state == "bad"


def test_the_bandwidth_of_swaps_is_measured():
    """Real copies by the native module, both ways."""
    native = pytest.importorskip("autellix.server._swap")
    out, back = checkup.measure_copies(native)
    assert out > 1e6
    assert back > 1e6


async def test_engines_elsewhere_and_a_server_that_runs_are_asked():
    """A vLLM at a URL says its version; a running server says how its engines are."""
    async with running(2) as rig:
        rig.gateway.engine_views = lambda: [ROW, {"engine": "e1", "channel": None}]
        port = rig.port
        findings = await asyncio.to_thread(found, config_of(port=port))
        assert "an autellix server listens" in findings["port"].found
        assert findings["engine e1"].remedy
        dead = await asyncio.to_thread(found, config_of(engine_url=("http://127.0.0.1:1",)), None)
        assert dead["engine"].state == "bad"
        lines: list[str] = []
        config = config_of(port=port, log_format="json", engine_url=(f"http://127.0.0.1:{port}",))
        await asyncio.to_thread(main, config, None, (), lines.append)
    rows = [json.loads(line) for line in lines]
    told = [row["found"] for row in rows if row["what"] == "engine e0"]
    assert told[0] == "ready"
    assert told[1].startswith("vLLM 0.32.0, S, policy plas")
    assert "async scheduling is on" in told
    assert any("swaps at 1.0 GB/s" in text for text in told)


def test_an_engine_that_is_silent_is_bad():
    """What the control channel has not heard of for long is frozen or steps slowly."""
    row = {**ROW, "heard_age_s": 60.0, "reports_lost": 3}
    states = [f.state for f in checkup._engine(row)]
    assert states[0] == "bad"
    assert states[-1] == "note"


def test_the_doctor_finds_the_servers_part(monkeypatch: pytest.MonkeyPatch):
    """``autellix doctor --server`` is ``autellix serve --check``."""
    from autellix import cli

    asked: list[Any] = []
    monkeypatch.setattr(cli, "_server_command", lambda *words: asked.append(words) or 0)
    assert cli.main(["doctor", "--server", "smollm2", "--port", "0"]) == 0
    assert asked == [("serve", ["--check", "smollm2", "--port", "0"])]

"""Fleets whose engines are `fake_vllm.py`: all of the server but vLLM and the model is real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autellix.server import fleet
from autellix.server.engine import launch
from autellix.server.engine.launch import EngineCommand, EngineRun, EngineSpec

FAKE = Path(__file__).with_name("fake_vllm.py")


def fake_command(spec: EngineSpec, run: EngineRun) -> EngineCommand:
    """Return how to start the fake in the place of vLLM."""
    argv = (sys.executable, str(FAKE), *launch.listen_args(run))
    return EngineCommand(argv=argv, env=launch._environment(spec, run))


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of our own that a fleet starts is the fake."""
    monkeypatch.setattr(fleet, "build_command", fake_command)
    monkeypatch.setattr(fleet, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(fleet, "resolve_model", lambda model: (model, "fake"))
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(FAKE.parents[2]))
    return

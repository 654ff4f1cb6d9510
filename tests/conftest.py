"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import ServeProcess, serving
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[1]

# A shell starts its background jobs with SIGINT ignored, and children inherit that: the tests of
# Ctrl-C would then press a dead key.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # other environments run tests without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers a file's tests stay together, and all tests of real engines do."""
    from tests.workers import LiveTogether

    return LiveTogether(config, log)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the tiny random model."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real model."""
    folder = ROOT / "models" / "smollm2"
    assert (folder / "config.json").exists(), "run `make model` first"
    return folder


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path, tmp_path_factory) -> Iterator[ServeProcess]:
    """A server with the tiny model, one for each module of tests."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, str(tiny_model), "--pool-drain-s", "5") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(smollm2: Path, tmp_path_factory) -> Iterator[ServeProcess]:
    """A server with the real model, one for all tests that do it no harm."""
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(log, str(smollm2), "--pool-drain-s", "5") as server:
        yield server

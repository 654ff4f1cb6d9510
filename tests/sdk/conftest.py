"""Every SDK test gets a fake server and an SDK in its first state."""

from __future__ import annotations

from pathlib import Path

import pytest

from autellix.testing import FakeServer, autellix_server

from .talk import Talk

__all__ = ["autellix_server"]

# `make compat` runs these, each in an environment of its own. Their frameworks, which the examples
# need here too, leave clients and loops unclosed: warnings that would fail a neighbour's test.
OWN_ENVIRONMENT = (
    "test_ag2.py",
    "test_agent_framework.py",
    "test_litellm.py",
    "test_notebook.py",
    "test_openai_agents.py",
    "test_pydantic_ai.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these to the compatibility environments."""
    is_compat = config.inipath is not None and config.inipath.parent.name == "compat"
    return True if collection_path.name in OWN_ENVIRONMENT and not is_compat else None


@pytest.fixture
def server(autellix_server: FakeServer) -> FakeServer:
    """The fake server, under the name the tests use."""
    return autellix_server


@pytest.fixture
def talk(server: FakeServer):
    """An OpenAI client, sync and async, that is closed at the end of the test."""
    talk = Talk(server)
    yield talk
    talk.close()

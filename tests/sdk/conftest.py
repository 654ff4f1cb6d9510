"""Every SDK test gets a fake server and an SDK in its first state."""

from __future__ import annotations

import pytest

from autellix.testing import FakeServer, autellix_server

from .talk import Talk

__all__ = ["autellix_server"]


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

"""Every adapter test gets a fake server and an SDK in its first state."""

from __future__ import annotations

import pytest

from autellix.testing import FakeServer, autellix_server

__all__ = ["autellix_server"]


@pytest.fixture
def server(autellix_server: FakeServer) -> FakeServer:
    """The fake server, under the name the tests use."""
    return autellix_server

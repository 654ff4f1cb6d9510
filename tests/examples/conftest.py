"""A server that records, for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autellix.testing import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that records."""
    with FakeServer() as server:
        yield server

"""Every adapter test gets a fake server and an SDK in its first state."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from autellix.testing import FakeServer, autellix_server

__all__ = ["autellix_server"]


@pytest.fixture
def server(autellix_server: FakeServer) -> FakeServer:
    """The fake server, under the name the tests use."""
    return autellix_server


@pytest.fixture
async def model(server: FakeServer) -> AsyncIterator[Any]:
    """LangChain's model, on clients that are closed at the end of the test."""
    import openai
    from langchain_openai import ChatOpenAI

    with openai.DefaultHttpxClient() as client:
        async with openai.DefaultAsyncHttpxClient() as async_client:
            yield ChatOpenAI(
                model="fake", max_retries=0, http_client=client, http_async_client=async_client
            )


@pytest.fixture(scope="session")
def dag_of() -> Callable[..., dict[str, set[str]]]:
    """The inference of the SDK's tests: the direct parents of each call."""
    path = Path(__file__).parents[1] / "sdk" / "happens_before.py"
    spec = importlib.util.spec_from_file_location("happens_before", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[..., dict[str, set[str]]] = module.dag_of
    return found

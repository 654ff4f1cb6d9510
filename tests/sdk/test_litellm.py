"""LiteLLM: the route through the OpenAI SDK, and the one that goes round it."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("litellm")

import litellm

import autellix
from autellix.testing import FakeServer

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("route", ["openai", "hosted_vllm"])
def test_sync(route: str, server: FakeServer):
    """``openai/`` takes the first net, ``hosted_vllm/`` the second."""
    with autellix.session() as session:
        litellm.completion(
            f"{route}/fake", messages=MESSAGES, api_base=server.base_url, api_key="sk-fake"
        )
    assert [c.session for c in server.calls] == [session.id]


@pytest.mark.parametrize("route", ["openai", "hosted_vllm"])
def test_async(route: str, server: FakeServer):
    """The same for coroutines."""

    async def main() -> str:
        async with autellix.session() as session:
            await litellm.acompletion(
                f"{route}/fake", messages=MESSAGES, api_base=server.base_url, api_key="sk-fake"
            )
            return session.id

    id = asyncio.run(main())
    assert [c.session for c in server.calls] == [id]


def test_it_names_the_hook_that_worked(server: FakeServer):
    """The second net is needed for one of the routes."""
    with autellix.session():
        for route in ("openai", "hosted_vllm"):
            litellm.completion(
                f"{route}/fake", messages=MESSAGES, api_base=server.base_url, api_key="sk-fake"
            )
    assert autellix.status().by_hook == {"openai": 1, "httpx": 1, "event": 0}

"""Microsoft Agent Framework: unmodified agents."""

from __future__ import annotations

import pytest

pytest.importorskip("agent_framework")

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

import autellix
from autellix.testing import FakeServer

from .talk import Talk


async def test_an_agent_with_a_sync_tool(server: FakeServer, talk: Talk):
    """The tool's calls are in the session too."""

    def search(query: str) -> str:
        """Search."""
        talk.ask(query)
        return "found"

    client = OpenAIChatCompletionClient("fake", api_key="sk-fake", base_url=server.base_url)
    server.tool_calls_next.append([("search", {"query": "q1"})])
    async with autellix.session() as session:
        await Agent(client, "helps", tools=[search]).run("go")
    assert "q1" in talk.calls
    assert len(server.calls) == 3
    assert talk.sessions == {session.id}

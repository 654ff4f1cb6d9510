"""AG2 classic (``import autogen``): sync clients, also from async chats and own threads."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("autogen.agentchat.conversable_agent")

import autogen

import autellix
from autellix.testing import FakeServer


def agent(name: str, server: FakeServer) -> autogen.ConversableAgent:
    entry = {"model": "fake", "base_url": server.base_url, "api_key": "sk-fake", "price": [0, 0]}
    return autogen.ConversableAgent(
        name,
        system_message=name,
        llm_config=autogen.LLMConfig({**entry, "api_type": "openai"}, cache_seed=None),
        human_input_mode="NEVER",
    )


def test_a_sync_chat(server: FakeServer):
    """Two agents in turn: one session."""
    with autellix.session() as session:
        agent("a", server).initiate_chat(agent("b", server), message="hi", max_turns=2)
    assert len(server.calls) == 3
    assert {c.session for c in server.calls} == {session.id}
    assert {c.thread for c in server.calls} == {0}


def test_a_group_chat(server: FakeServer):
    """Round robin over three agents."""
    members = [agent(n, server) for n in ("a", "b", "c")]
    chat = autogen.GroupChat(members, max_round=4, speaker_selection_method="round_robin")
    manager = autogen.GroupChatManager(chat, llm_config=members[0].llm_config)
    with autellix.session() as session:
        members[0].initiate_chat(manager, message="hi")
    assert len(server.calls) >= 3
    assert {c.session for c in server.calls} == {session.id}


async def test_an_async_chat_replies_in_an_executor(server: FakeServer):
    """The thread patch carries the session into the executor."""
    async with autellix.session() as session:
        await agent("a", server).a_initiate_chat(agent("b", server), message="hi", max_turns=2)
    assert len(server.calls) == 3
    assert {c.session for c in server.calls} == {session.id}


async def test_run_in_its_own_thread(server: FakeServer):
    """``run`` starts a thread of its own."""
    async with autellix.session() as session:
        response = agent("a", server).run(
            agent("b", server), message="hi", max_turns=2, user_input=False
        )
        await asyncio.to_thread(response.process)
    assert server.calls
    assert {c.session for c in server.calls} == {session.id}

"""A wrapped runnable: a program per invocation, and a batch as asked."""

from __future__ import annotations

import openai
import pytest
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

import autellix
from autellix.integrations.langchain import wrap
from autellix.testing import FakeServer


@pytest.fixture
async def steps(server: FakeServer):
    """A chain of two calls."""
    with openai.DefaultHttpxClient() as client:
        async with openai.DefaultAsyncHttpxClient() as async_client:
            model = ChatOpenAI(
                model="fake", max_retries=0, http_client=client, http_async_client=async_client
            )
            yield RunnableLambda(str.upper) | model | (lambda message: message.content) | model


def sizes(server: FakeServer) -> list[int]:
    """Return the number of calls of each session."""
    sessions = [call.session for call in server.calls]
    assert None not in sessions
    for session in set(sessions):
        server.wait_event("DELETE", str(session))
    return sorted(sessions.count(s) for s in set(sessions))


async def test_an_invocation_is_a_program(steps, server: FakeServer):
    """Invoke and stream, sync and async: a session each."""
    chain = wrap(steps)
    chain.invoke("a")
    await chain.ainvoke("a")
    assert list(chain.stream("a"))
    assert [chunk async for chunk in chain.astream("a")]
    assert sizes(server) == [2, 2, 2, 2]
    assert autellix.current_session() is None


async def test_a_batch_is_a_program_each(steps, server: FakeServer):
    """By default every item of a batch is a program."""
    wrap(steps).batch(["a", "b", "c"])
    await wrap(steps).abatch(["d", "e"])
    assert sizes(server) == [2] * 5


async def test_a_batch_can_be_one_program(steps, server: FakeServer):
    """With ``batch="all"`` a batch is one program."""
    wrap(steps, batch="all").batch(["a", "b", "c"])
    await wrap(steps, batch="all").abatch(["d", "e"])
    assert sizes(server) == [4, 6]


def test_inside_a_session_it_joins(steps, server: FakeServer):
    """An outer session wins, and the name is the program's."""
    with autellix.session("outer") as outer:
        wrap(steps, name="inner").invoke("a")
    assert {call.session for call in server.calls} == {outer.id}
    assert autellix.flush()  # or a late message would be taken for the next one
    server.clear()
    wrap(steps, name="inner").invoke("a")
    assert server.wait_event("PUT").body["name"] == "inner"

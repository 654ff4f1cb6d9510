"""A wrapped runnable: a program per invocation, and a batch as asked."""

from __future__ import annotations

import openai
import pytest
from langchain_core.runnables import RunnableGenerator, RunnableLambda
from langchain_openai import ChatOpenAI

import autellix
from autellix.integrations.langchain import ProgramRunnable, wrap
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
    """An outer session wins; the name and the role are the program's."""
    with autellix.session("outer") as outer:
        wrap(steps, name="inner").invoke("a")
    assert {call.session for call in server.calls} == {outer.id}
    assert autellix.flush()  # or a late message would be taken for the next one
    server.clear()
    wrap(steps, name="inner", role="background").invoke("a")
    assert server.wait_event("PUT").body["name"] == "inner"
    assert {call.headers["x-autellix-role"] for call in server.calls} == {"background"}


async def test_every_way_to_run_it_is_a_program(steps, server: FakeServer):
    """Events, batches by who ends first, and the stream of a longer chain: a session each."""
    chain = wrap(steps)
    longer = chain | (lambda message: message)
    assert [event async for event in chain.astream_events("a", version="v2")]
    assert sorted(number for number, _ in chain.batch_as_completed(["b", "c"])) == [0, 1]
    assert len([pair async for pair in chain.abatch_as_completed(["d", "e"])]) == 2
    assert list(longer.stream("f"))
    assert [chunk async for chunk in longer.astream("g")]
    assert sizes(server) == [2] * 7
    assert autellix.current_session() is None


async def test_a_batch_by_who_ends_first_can_be_one_program(steps, server: FakeServer):
    """With ``batch="all"`` these are one program too."""
    chain = wrap(steps, batch="all")
    assert len(list(chain.batch_as_completed(["a", "b"]))) == 2
    assert len([pair async for pair in chain.abatch_as_completed(["c", "d", "e"])]) == 3
    assert sizes(server) == [4, 6]


async def test_the_steps_before_it_are_not_part_of_it(steps, server: FakeServer):
    """In the stream of a chain the program begins when its input is whole."""
    with autellix.session("outer") as outer:
        first = (lambda text: text) | steps | (lambda message: message.content)
        chain = first | wrap(steps, nested="new")
        assert list(chain.stream("a"))
        assert [chunk async for chunk in chain.astream("b")]
    mine = [call.session == outer.id for call in server.calls]
    assert mine == [True, True, False, False] * 2


async def test_a_stream_left_early_closes_what_is_inside(server: FakeServer):
    """The inner generator's end has run when ``aclose`` returns, and in the session."""
    seen = []

    async def count(_: object):
        try:
            for number in range(9):
                yield number
        finally:
            seen.append(autellix.current_session())

    chunks = wrap(RunnableGenerator(count)).astream("a")
    assert await anext(chunks) == 0
    await chunks.aclose()
    assert [session is not None for session in seen] == [True]
    assert autellix.status().sessions == 0


async def test_a_models_own_methods_are_there(server: FakeServer):
    """``bind_tools`` of a wrapped model gives a wrapped model; attributes are the model's."""

    def look_up(word: str) -> str:
        """Look a word up."""
        return word

    with openai.DefaultHttpxClient() as client:
        model = autellix.wrap(ChatOpenAI(model="fake", max_retries=0, http_client=client))
        assert isinstance(model, ProgramRunnable)
        assert model.model_name == "fake"
        bound = model.bind_tools([look_up])
        bound.invoke("a")
        bound.invoke("b")
        assert not hasattr(model, "no_such_thing")
    assert server.calls[0].body["tools"][0]["function"]["name"] == "look_up"
    assert sizes(server) == [1, 1]


@pytest.mark.skipif(not hasattr(RunnableLambda, "stream_events"), reason="no v3 in this LangChain")
@pytest.mark.filterwarnings("ignore:.*v3:Warning")
async def test_a_models_v3_stream_is_the_models_own(model: ChatOpenAI, server: FakeServer):
    """It is driven by who reads it, so it is one call in the session around it, and no more."""
    wrapped = wrap(model)
    async with autellix.session("outer") as outer:
        assert str(await (await wrapped.astream_events("a", version="v3")).text) == "echo: a"
        assert str(wrapped.stream_events("b", version="v3").text) == "echo: b"
    assert [(call.text, call.session) for call in server.calls] == [
        ("a", outer.id),
        ("b", outer.id),
    ]
    assert sizes(server) == [2]

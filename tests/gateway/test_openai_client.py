"""The official client's behaviours: retries, time-outs, raw and streaming responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from .conftest import Rig, until


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the gateway that tags every call as the SDK does."""
    async with openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1",
        api_key="k",
        max_retries=2,
        default_headers={"X-Autellix-Session": "run-1", "X-Autellix-Call": "call-1"},
    ) as made:
        yield made


async def test_a_retry_is_one_call_charged_once(rig: Rig, client: openai.AsyncOpenAI):
    """The engine dies under the first attempt; the client's second one is the same call."""
    rig.engine.die_at, rig.engine.deaths = -1, 1
    await client.completions.create(model="m", prompt="hi")
    assert len(rig.engine.seen) == 2
    await rig.settled()
    program = next(iter(rig.table.programs()))
    assert (program.calls_begun, program.calls_ended, program.calls_retried) == (1, 1, 1)


async def test_a_time_out_cancels_the_call_and_the_retry_takes_its_place(
    rig: Rig, client: openai.AsyncOpenAI
):
    """Every attempt that the client gives up is gone in the engine."""
    rig.engine.stall_at = 0
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.2, max_retries=1).completions.create(
            model="m", prompt="hi"
        )
    await until(lambda: rig.engine.cancelled == 2)
    await rig.settled()
    assert next(iter(rig.table.programs())).calls_begun == 1


async def test_raw_responses_show_our_headers(rig: Rig, client: openai.AsyncOpenAI):
    """What the gateway says of a call can be read by its maker."""
    raw = await client.completions.with_raw_response.create(model="m", prompt="hi")
    assert raw.headers["x-autellix-family"] == "autellix"
    assert raw.parse().choices[0].text == "word " * 5


async def test_a_stream_that_is_left_early_is_cancelled(rig: Rig, client: openai.AsyncOpenAI):
    """Breaking out of the loop closes the connection, and so the call."""
    rig.engine.stall_at = 2
    async with await client.completions.create(
        model="m", prompt="hi", stream=True, stream_options={"include_usage": True}
    ) as stream:
        async for _ in stream:
            break
    await asyncio.wait_for(rig.engine.stopped.wait(), 1.0)
    await rig.settled()
    assert rig.engine.seen[-1].body["stream_options"] == {"include_usage": True}


async def test_errors_are_the_clients_own_classes(rig: Rig, client: openai.AsyncOpenAI):
    """Unknown model, malformed value, limit: each as OpenAI's own server would have it."""
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.completions.create(model="unknown", prompt="hi")
    assert not_found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.post("/completions", body=[1], cast_to=object)
    assert bad.value.param == "body"
    await rig.settled()

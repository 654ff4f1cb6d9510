"""The live bench: real order, real counts, and a run that loses calls fails."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autellix.server.lab import bench_command, cost_model, trace, workload
from autellix.server.lab.replay import Answered, Replay, Target
from autellix.server.lab.workload import Waits


class FakeServer:
    """A vLLM that answers at once, and notes what it was asked."""

    def __init__(self, lose: int | None = None, *, says_ids: bool = True) -> None:
        self.lose = lose
        self.says_ids = says_ids
        self.said: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.sessions: list[str | None] = []
        self.busy = 0
        self.most_busy = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one completion as a stream with usage."""
        body = await request.json()
        self.prompts.append(body["prompt"])
        self.sessions.append(request.headers.get("X-Autellix-Session"))
        if self.lose is not None and len(self.prompts) == self.lose:
            return web.json_response({"error": {"message": "no"}}, status=500)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        usage["total_tokens"] = sum(usage.values())
        base = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
        first = {**base, "choices": [{"index": 0, "text": "x", "finish_reason": None}]}
        if body.get("logprobs"):
            # the tokens by id: two of them may have the same text
            assert body["return_tokens_as_token_ids"] is True
            best = [{"token_id:9": -2.0, "token_id:7": -0.5, "token_id:8": -0.75}]
            count = body["max_tokens"]
            first["choices"][0]["logprobs"] = {
                "text_offset": [0] * count, "token_logprobs": [-0.5] * count,
                "tokens": ["token_id:7"] * count, "top_logprobs": best * count,
            }  # fmt: skip
        if self.says_ids:
            said = [7 + len(self.said)] * body["max_tokens"]
            self.said.append(said)
            first["choices"][0]["token_ids"] = said
        for chunk in (first, {**base, "choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.busy -= 1
        return response


class WordServer:
    """A chat server that takes words only, and counts tokens in a way of its own.

    Args:
        count: Tokens of a message, from its words.
    """

    def __init__(self, count: Callable[[list[str]], int]) -> None:
        self.count = count
        self.texts: list[str] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one chat, as a stream if that is asked for; the answer ends early."""
        body = await request.json()
        text = body["messages"][0]["content"]
        usage = {"prompt_tokens": self.count(text.split()), "completion_tokens": 1}
        usage["total_tokens"] = sum(usage.values())
        base = {"id": "c", "created": 1, "model": "m", "usage": usage}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "x"}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            return web.json_response({**base, "object": "chat.completion", "choices": [choice]})
        self.texts.append(text)
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
        chunk = {**base, "object": "chat.completion.chunk", "choices": [choice]}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        return response


async def replay(
    fake: FakeServer | WordServer,
    name: str,
    programs: int,
    *,
    concurrency: int | None = None,
    answered: Callable[[Answered], None] | None = None,
):
    """Replay the first programs of a set against the fake server."""
    application = web.Application(client_max_size=64 << 20)
    is_exact = isinstance(fake, FakeServer)
    path = "/v1/completions" if is_exact else "/v1/chat/completions"
    application.router.add_post(path, fake.complete)
    some = [p for p in trace.load(name) if len(p.calls) < 90][:programs]
    arrivals = list(workload.at_once(some, len(some), seed=0))
    async with TestServer(application) as server:
        target = Target(name="fake", url=str(server.make_url("/v1")), model="m", exact=is_exact)
        profile = cost_model.load("a100-80g-llama-3.1-8b")
        replay = Replay(target, profile, Waits(scale=0.0), answered=answered)
        return await replay.run(arrivals, concurrency=concurrency), arrivals


async def test_every_call_is_sent_once_with_its_length():
    """Prompt lengths are the trace's, children come after parents, ids fit the vocabulary."""
    fake = FakeServer()
    done, arrivals = await replay(fake, "lats", 1)
    wanted = sorted(c.prompt_tokens for a in arrivals for c in a.program.calls)
    assert sorted(len(p) for p in fake.prompts) == wanted
    assert all(0 <= token < 49152 for p in fake.prompts for token in p)
    assert all(p.ended_s is not None and not p.lost_calls for p in done)
    assert fake.most_busy > 1, "siblings run at the same time"


async def test_a_serial_program_shares_its_prefixes():
    """A chat's next prompt begins with its last one, and what was answered to it."""
    fake = FakeServer()
    ((done,), _) = await replay(fake, "chat-sharegpt", 1)
    calls = done.program.calls
    assert len(calls) > 1
    for place, call in enumerate(calls[1:], 1):
        so_far = fake.prompts[place - 1] + fake.said[place - 1]
        shared = min(call.prefix_tokens, len(so_far))
        assert fake.prompts[place][:shared] == so_far[:shared]
        assert shared > len(fake.prompts[place - 1]), "the trace's prefix goes on into the answer"


async def test_answers_are_kept_with_their_prompts_and_how_sure_the_model_was():
    """Whoever asks gets each call's ids, and the gap between the two likeliest tokens."""
    fake, answers = FakeServer(), []
    ((done,), _) = await replay(fake, "chat-sharegpt", 1, answered=answers.append)
    assert [a.prompt for a in answers] == fake.prompts
    assert [a.said for a in answers] == fake.said
    assert [(a.number, a.call) for a in answers] == [(0, c.id) for c in done.program.calls]
    assert all(a.gaps == [0.25] * len(a.said) for a in answers)


async def test_the_same_arrivals_say_the_same_in_whatever_order_their_calls_come():
    """So that two servers' answers can be held together."""
    runs = []
    for concurrency in (None, 1):
        fake, answers = FakeServer(says_ids=False), []
        await replay(fake, "lats", 2, concurrency=concurrency, answered=answers.append)
        runs.append({(a.number, a.call): a.prompt for a in answers})
    together, apart = runs
    assert list(together) != list(apart)
    assert together == apart


async def test_in_a_closed_loop_the_next_begins_when_one_has_ended():
    """So many programs at once, each counted from its own beginning."""
    fake = FakeServer()
    done, _ = await replay(fake, "chat-sharegpt", 6, concurrency=2)
    begun = sorted(p.arrival_s for p in done)
    ended = sorted(p.ended_s for p in done)
    assert all(begun[k + 2] >= ended[k] for k in range(4))


async def test_a_server_that_gives_no_ids_back_gets_the_traces():
    """Then a child shares its parent's prompt, as long as it is."""
    fake = FakeServer(says_ids=False)
    await replay(fake, "chat-sharegpt", 1)
    for earlier, later in zip(fake.prompts, fake.prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier


async def test_a_lost_call_is_named_and_ends_its_program():
    """A failed call is a loss, never a short program."""
    fake = FakeServer(lose=2)
    (done,), _ = await replay(fake, "chat-sharegpt", 1)
    assert done.ended_s is None
    assert "500" in done.lost_calls[0] or "InternalServerError" in done.lost_calls[0]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(len, id="a word is a token"),
        pytest.param(lambda words: 40 + 3 * len(words), id="three tokens, and a long template"),
        pytest.param(lambda words: 9 + sum(1 + (len(w) > 4) for w in words), id="by their length"),
        pytest.param(lambda words: len(words) // 2, id="two words are one token"),
    ],
)
async def test_words_are_as_long_as_the_trace_says(count):
    """Prompts come within 10 % however a server counts, and still begin with what they share."""
    fake = WordServer(count)
    (done,), _ = await replay(fake, "chat-real", 1)
    assert len(done.program.calls) > 2
    for call, text in zip(done.program.calls, fake.texts, strict=True):
        assert fake.count(text.split()) == pytest.approx(call.prompt_tokens, rel=0.1)
    for earlier, later in itertools.pairwise(fake.texts):
        assert later.startswith(earlier)
    assert done.prompt_tokens == sum(fake.count(text.split()) for text in fake.texts)
    assert done.generated_tokens == len(fake.texts), "what the server says, not what was asked"
    assert not done.lost_calls


async def test_words_of_other_programs_are_others():
    """No program finds in the cache what another one said."""
    fake = WordServer(len)
    done, _ = await replay(fake, "chat-sharegpt", 8)
    begun = {tuple(text.split()[:16]) for text in fake.texts if len(text.split()) >= 16}
    long_enough = [p for p in done if p.program.calls[-1].prompt_tokens >= 16]
    assert len(long_enough) > 4
    assert len(begun) == len(long_enough)


async def test_a_server_that_counts_nothing_gets_a_word_a_token():
    """A count that does not grow with the words is no measure."""
    fake = WordServer(lambda _: 0)
    (done,), _ = await replay(fake, "chat-real", 1)
    assert [len(text.split()) for text in fake.texts] == [
        call.prompt_tokens for call in done.program.calls
    ]


def test_a_target_must_be_named():
    """One line says what to write."""
    with pytest.raises(Exception, match="NAME=http"):
        bench_command.main(["--trace", "chat-real", "--url", "localhost:1", "--profile",
                            "a100-80g-llama-3.1-8b"])  # fmt: skip

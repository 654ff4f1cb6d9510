"""Replay of a trace against a live server, through the SDK and the openai client.

Prompts have the trace's token counts and its real shared prefixes, mapped into the model's
vocabulary; parents end before their children start; tools take their time. What a call generates
is the model's own, and a prompt that goes on behind it has the very ids that the server gave back
(vLLM's ``return_token_ids``), so that a child finds its parent's answer in the cache too. Where a
server gives none back, the trace's ids stand there, and a child finds only the parent's prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .content import ProgramContent, Prompt, Segments, segment_tokens
from .cost_model import Profile
from .run_state import ProgramFacts
from .trace import Call, Program
from .words import Scale, scale_of, text
from .workload import Arrival, Waits

RESERVED_IDS = 512  # a vocabulary's first ids are often control tokens
PROBE_WORDS = (50, 450)  # of the two prompts that show how a server counts words


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server to replay against.

    Attributes:
        name: The arm.
        url: Its OpenAI base, such as ``http://127.0.0.1:8000/v1``.
        model: As the server calls it.
        api_key: Sent as it is.
        vocabulary: Of the model; prompts are token ids below it.
        exact: The server is vLLM: it takes token ids and generates exactly as many tokens as
            asked. Otherwise prompts are words, as many as the server counts about the same tokens
            in, and an answer may end early.
    """

    name: str
    url: str
    model: str
    api_key: str = "none"
    vocabulary: int = 49152
    exact: bool = True


@dataclass(slots=True)
class ReplayedProgram:
    """What the metrics want to know of a program (see ``run_state.ProgramRun``).

    From outside an engine nobody sees a call wait: ``wait_s`` is the time to the calls' first
    tokens, prefill included, and ``service_s`` the time after them.
    """

    program: Program
    number: int
    arrival_s: float
    alone_s: float
    ended_s: float | None = None
    service_s: float = 0.0
    wait_s: float = 0.0
    tool_s: float = 0.0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    lost_calls: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What one call was asked and what it generated, to hold two servers' answers together.

    Attributes:
        number: Of the program.
        call: Its id in the program.
        prompt: Token ids.
        said: Token ids.
        gaps: Between the log-probabilities of the two likeliest tokens, at each of ``said``.
    """

    number: int
    call: int
    prompt: list[int]
    said: list[int]
    gaps: list[float]


class Answers:
    """What a server really generated in one program, by the segment that it stands in.

    Args:
        to_id: From a token of a segment to one of the model's.
    """

    def __init__(self, to_id: Callable[[int], int]) -> None:
        self._to_id = to_id
        self._said: dict[int, tuple[int, list[int]]] = {}  # segment → (output's start, ids)

    def put(self, prompt: Prompt, ids: list[int]) -> None:
        """Keep what the call with this prompt generated."""
        if ids:
            self._said[prompt.segment] = (prompt.output_start, ids)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's ids: what was said where it goes on behind it, else the trace's."""
        left = len(prompt.tokens)
        ids: list[int] = []
        for segment, start, count in prompt.pieces:
            stop = start + min(count, left)
            output_start, said = self._said.get(segment, (stop, []))
            plain_stop = min(stop, max(start, output_start))
            ids += map(self._to_id, segment_tokens(segment, start, plain_stop))
            answer = said[plain_stop - output_start : stop - output_start]
            ids += answer
            ids += map(self._to_id, segment_tokens(segment, plain_stop + len(answer), stop))
            left -= stop - start
        return ids


class Replay:
    """Replays arrivals against one target: the same arrivals say the same in whatever order.

    Args:
        target: The server.
        profile: Gives the time alone, for slowdown.
        waits: How tool times are replayed.
        timeout_s: Of one call; a call that takes longer is lost, and the run fails.
        progress: Called after each call.
        seed: Keeps the prompts of one round apart from those of another.
        answered: Called with each answer; the server is asked for log-probabilities then. For
            servers that are ``exact``.
    """

    def __init__(
        self,
        target: Target,
        profile: Profile,
        waits: Waits,
        *,
        timeout_s: float = 600.0,
        progress: Callable[[], None] = lambda: None,
        seed: int = 0,
        answered: Callable[[Answered], None] | None = None,
    ) -> None:
        from openai import AsyncOpenAI

        self._target = target
        self._profile = profile
        self._waits = waits
        self._progress = progress
        self._seed = seed
        self._answered = answered
        self._segments = Segments(profile.block_tokens)
        self._scale = Scale()
        self._client = AsyncOpenAI(
            base_url=target.url, api_key=target.api_key, timeout=timeout_s, max_retries=0
        )

    async def run(
        self, arrivals: Sequence[Arrival], *, concurrency: int | None = None
    ) -> list[ReplayedProgram]:
        """Replay and return every program, over or not, in the order of arrival.

        Args:
            arrivals: The programs and when they come.
            concurrency: Programs at once at most; one more begins when one has ended.
        """
        places = asyncio.Semaphore(len(arrivals) if concurrency is None else concurrency)
        contents = [ProgramContent(arrival.program, self._segments) for arrival in arrivals]
        for content in contents:
            content.lay_down()
        try:
            if not self._target.exact:
                self._scale = await self._measured_scale()
            start_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._program(arrival, content, start_s, places))
                    for arrival, content in zip(arrivals, contents, strict=True)
                ]
        finally:
            await self._client.close()
        return [task.result() for task in tasks]

    async def _measured_scale(self) -> Scale:
        """Return how the server counts words, from two prompts that belong to no program."""
        from openai import OpenAIError

        import autellix

        counts = []
        with autellix.session(f"replay-{self._seed}-words", nested="new"):
            for words in PROBE_WORDS:
                prompt = text(range(words), Scale())
                try:
                    answer = await self._client.chat.completions.create(
                        model=self._target.model,
                        messages=[{"role": "user", "content": prompt}],
                        max_tokens=1,
                    )
                except OpenAIError:
                    return Scale()  # the calls will say themselves what is wrong
                if answer.usage is None:
                    return Scale()
                counts.append((words, answer.usage.prompt_tokens))
        return scale_of(*counts)

    async def _program(
        self, arrival: Arrival, content: ProgramContent, start_s: float, places: asyncio.Semaphore
    ) -> ReplayedProgram:
        await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
        async with places:
            return await self._begun(arrival, content, start_s)

    async def _begun(
        self, arrival: Arrival, content: ProgramContent, start_s: float
    ) -> ReplayedProgram:
        import autellix

        program = arrival.program
        tool_s = [self._waits.before(arrival.number, call) for call in program.calls]
        facts = ProgramFacts(program, self._profile, tool_s)
        begun_s = time.monotonic() - start_s
        done = ReplayedProgram(program, arrival.number, begun_s, facts.alone_s)
        done.tool_s = sum(tool_s)
        answers = Answers(self._id)
        finished = {call.id: asyncio.Event() for call in program.calls}
        with autellix.session(f"replay-{self._seed}-{arrival.number}", nested="new"):
            async with asyncio.TaskGroup() as group:
                for place, call in enumerate(program.calls):
                    group.create_task(
                        self._call(done, content, answers, call, tool_s[place], finished)
                    )
        if not done.lost_calls:
            done.ended_s = time.monotonic() - start_s
        return done

    async def _call(
        self,
        done: ReplayedProgram,
        content: ProgramContent,
        answers: Answers,
        call: Call,
        tool_s: float,
        finished: dict[int, asyncio.Event],
    ) -> None:
        from openai import OpenAIError

        for parent in call.parents:
            await finished[parent].wait()
        if tool_s:
            await asyncio.sleep(tool_s)
        try:
            if not done.lost_calls:
                prompt = content.begin(call)
                said = await self._send(done, call, answers.ids(prompt))
                answers.put(prompt, said)
        except OpenAIError as error:
            done.lost_calls.append(f"program {done.number} call {call.id}: {error!r}"[:300])
        finally:
            finished[call.id].set()
            self._progress()

    def _id(self, token: int) -> int:
        """Return the model's id for a token of a segment; each round has others."""
        return RESERVED_IDS + (token + 31 * self._seed) % (self._target.vocabulary - RESERVED_IDS)

    async def _send(self, done: ReplayedProgram, call: Call, ids: list[int]) -> list[int]:
        """Send one call, count it, and return the ids that it generated, if the server says."""
        sent_s = time.monotonic()
        first_s: float | None = None
        generated = 0
        said: list[int] = []
        gaps: list[float] = []
        async for chunk in await self._stream(call, ids):
            if chunk.choices:
                first_s = first_s or time.monotonic()
                said += (chunk.choices[0].model_extra or {}).get("token_ids") or ()
                gaps += gaps_of(chunk.choices[0].logprobs)
            if chunk.usage is not None:
                generated = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                done.hit_tokens += (details.cached_tokens or 0) if details else 0
                done.prompt_tokens += chunk.usage.prompt_tokens
        done.generated_tokens += generated
        if self._target.exact and generated != call.output_tokens:
            done.lost_calls.append(
                f"program {done.number} call {call.id}: {generated} tokens, not "
                f"{call.output_tokens}"
            )
        if self._answered is not None:
            self._answered(Answered(number=done.number, call=call.id, prompt=ids, said=said,
                                    gaps=gaps))  # fmt: skip
        over_s = time.monotonic()
        first_s = over_s if first_s is None else first_s
        done.first_token_s.append(first_s - sent_s)
        done.wait_s += first_s - sent_s
        done.service_s += over_s - first_s
        return said

    async def _stream(self, call: Call, ids: list[int]) -> Any:
        target = self._target
        options: dict[str, Any] = {
            "model": target.model,
            "max_tokens": call.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.exact:
            extra = {"ignore_eos": True, "return_token_ids": True}
            if self._answered is not None:
                # by id: two tokens of half a letter each have the same text
                extra["return_tokens_as_token_ids"] = True
                options["logprobs"] = 2
            return await self._client.completions.create(prompt=ids, extra_body=extra, **options)
        return await self._client.chat.completions.create(
            messages=[{"role": "user", "content": text(ids, self._scale)}], **options
        )


def gaps_of(logprobs: Any) -> list[float]:
    """Return how far the likeliest token is before the next one, at each token of a chunk."""
    best = [sorted(top.values()) for top in (logprobs.top_logprobs if logprobs else None) or ()]
    return [two[-1] - two[-2] if len(two) > 1 else float("inf") for two in best]

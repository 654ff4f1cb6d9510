"""Replay of a trace against a live server, through the SDK and the openai client.

Prompts have the trace's token counts and its real shared prefixes, mapped into the model's
vocabulary; parents end before their children start; tools take their time. What a call generates
is the model's own, so a child shares its parent's prompt but not its answer with the cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .content import ProgramContent, Segments
from .cost_model import Profile
from .run_state import ProgramFacts
from .trace import Call, Program
from .workload import Arrival, Waits

RESERVED_IDS = 512  # a vocabulary's first ids are often control tokens


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
            asked. Otherwise prompts are words and the count is what the server says.
    """

    name: str
    url: str
    model: str
    api_key: str = "none"
    vocabulary: int = 49152
    exact: bool = True


@dataclass(slots=True)
class ReplayedProgram:
    """What the metrics want to know of a program (see ``run_state.ProgramRun``)."""

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
    lost_calls: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


class Replay:
    """Replays arrivals against one target.

    Args:
        target: The server.
        profile: Gives the time alone, for slowdown.
        waits: How tool times are replayed.
        timeout_s: Of one call; a call that takes longer is lost, and the run fails.
        progress: Called after each call.
        seed: Keeps the prompts of one round apart from those of another.
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
    ) -> None:
        from openai import AsyncOpenAI

        self._target = target
        self._profile = profile
        self._waits = waits
        self._progress = progress
        self._seed = seed
        self._segments = Segments(profile.block_tokens)
        self._client = AsyncOpenAI(
            base_url=target.url, api_key=target.api_key, timeout=timeout_s, max_retries=0
        )

    async def run(self, arrivals: Sequence[Arrival]) -> list[ReplayedProgram]:
        """Replay and return every program, over or not, in the order of arrival."""
        start_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._program(a, start_s)) for a in arrivals]
        finally:
            await self._client.close()
        return [task.result() for task in tasks]

    async def _program(self, arrival: Arrival, start_s: float) -> ReplayedProgram:
        import autellix

        program = arrival.program
        tool_s = [self._waits.before(arrival.number, call) for call in program.calls]
        facts = ProgramFacts(program, self._profile, tool_s)
        await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
        begun_s = time.monotonic() - start_s
        done = ReplayedProgram(program, arrival.number, begun_s, facts.alone_s)
        done.tool_s = sum(tool_s)
        content = ProgramContent(program, self._segments)
        finished = {call.id: asyncio.Event() for call in program.calls}
        with autellix.session(f"replay-{self._seed}-{arrival.number}", nested="new"):
            async with asyncio.TaskGroup() as group:
                for place, call in enumerate(program.calls):
                    group.create_task(self._call(done, content, call, tool_s[place], finished))
        if not done.lost_calls:
            done.ended_s = time.monotonic() - start_s
        return done

    async def _call(
        self,
        done: ReplayedProgram,
        content: ProgramContent,
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
                tokens = content.begin(call).tokens
                await self._send(done, call, tokens)
        except OpenAIError as error:
            done.lost_calls.append(f"program {done.number} call {call.id}: {error!r}"[:300])
        finally:
            finished[call.id].set()
            self._progress()

    async def _send(self, done: ReplayedProgram, call: Call, tokens: list[int]) -> None:
        sent_s = time.monotonic()
        first_s: float | None = None
        generated = 0
        async for chunk in await self._stream(call, tokens):
            if first_s is None and chunk.choices:
                first_s = time.monotonic()
            if chunk.usage is not None:
                generated = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                done.hit_tokens += (details.cached_tokens or 0) if details else 0
                done.prompt_tokens += chunk.usage.prompt_tokens
        if self._target.exact and generated != call.output_tokens:
            done.lost_calls.append(
                f"program {done.number} call {call.id}: {generated} tokens, not "
                f"{call.output_tokens}"
            )
        # From outside an engine, what comes before the first token is waiting and prefill.
        over_s = time.monotonic()
        first_s = over_s if first_s is None else first_s
        done.first_token_s.append(first_s - sent_s)
        done.wait_s += first_s - sent_s
        done.service_s += over_s - first_s

    async def _stream(self, call: Call, tokens: list[int]) -> Any:
        target = self._target
        options: dict[str, Any] = {
            "model": target.model,
            "max_tokens": call.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.exact:
            span = target.vocabulary - RESERVED_IDS
            ids = [RESERVED_IDS + (token + 31 * self._seed) % span for token in tokens]
            return await self._client.completions.create(
                prompt=ids, extra_body={"ignore_eos": True}, **options
            )
        words = " ".join(f"w{token}" for token in tokens)
        return await self._client.chat.completions.create(
            messages=[{"role": "user", "content": words}], **options
        )

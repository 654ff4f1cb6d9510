"""One call of the Python API: begun at once, to be awaited, iterated, or cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Completion:
    """One of the ``n`` answers to a prompt; named as vLLM names it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] = field(default_factory=list)  # as the API gives them, one a chunk
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """What has been generated so far."""

    outputs: list[Completion] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: Any = None
    usage: Mapping[str, Any] | None = None  # at the end
    finished: bool = False

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first answer."""
        return self.outputs[0].token_ids if self.outputs else []

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in an event of a stream, or a whole answer."""
        for choice in event.get("choices") or ():
            self._add_choice(choice)
        if prompt := event.get("prompt_token_ids"):  # chat has it here, completions in a choice
            self.prompt_token_ids = prompt
        if event.get("usage"):
            self.usage = event["usage"]

    def copy(self) -> Output:
        """Return the state of now, which later events do not change."""
        parts = [
            dataclasses.replace(
                part,
                token_ids=list(part.token_ids),
                logprobs=list(part.logprobs),
                tool_calls=[dict(call) for call in part.tool_calls],
            )
            for part in self.outputs
        ]
        return dataclasses.replace(self, outputs=parts)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index", 0)
        while len(self.outputs) <= index:
            self.outputs.append(Completion(len(self.outputs)))
        part = self.outputs[index]
        said = choice.get("delta") or choice.get("message") or {}
        part.text += choice.get("text") or said.get("content") or ""
        part.reasoning += said.get("reasoning") or said.get("reasoning_content") or ""
        for call in said.get("tool_calls") or ():
            _add_tool_call(part.tool_calls, call)
        part.token_ids += choice.get("token_ids") or ()
        if choice.get("logprobs") is not None:
            part.logprobs.append(choice["logprobs"])
        part.finish_reason = choice.get("finish_reason") or part.finish_reason
        if choice.get("stop_reason") is not None:
            part.stop_reason = choice["stop_reason"]
        if choice.get("prompt_token_ids"):
            self.prompt_token_ids = choice["prompt_token_ids"]
        if choice.get("prompt_logprobs") is not None:
            self.prompt_logprobs = choice["prompt_logprobs"]


class Generation:
    """A call under way.

    ``await`` it for the whole answer, or iterate over it: each time there is something new it
    yields everything so far (or, with ``RequestOutputKind.DELTA``, what is new), as vLLM does. A
    reader that is slow misses no text, only steps in between, so nothing piles up. Only one
    iterates at a time; any number may await.

    Attributes:
        output: What there is so far; of a call that failed, what came before.
    """

    def __init__(self, *, deltas: bool = False) -> None:
        self.output = Output()
        self._deltas = deltas
        self._fresh = Output()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def run_as(self, task: asyncio.Task[None]) -> None:
        """Take the task that feeds it; its end is the call's."""
        self._task = task
        task.add_done_callback(lambda _: self._news.set())

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the answer."""
        self.output.add(event)
        if self._deltas:
            self._fresh.add(event)
        self._news.set()

    def finish(self) -> None:
        """The answer is whole."""
        self.output.finished = True
        self._news.set()

    @property
    def done(self) -> bool:
        """Whether the call is over, however it went."""
        return self._task is not None and self._task.done()

    def cancel(self) -> None:
        """End the call; the engine stops generating, and whoever awaits sees a cancellation."""
        if self._task is not None:
            self._task.cancel()

    def __await__(self) -> Generator[Any, None, Output]:
        return self._whole().__await__()

    async def _whole(self) -> Output:
        assert self._task is not None
        await asyncio.shield(self._task)  # whoever gives up waiting does not end it for others
        return self.output

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs until the call is over; leaving early cancels the call."""
        assert self._task is not None
        try:
            last = None
            while last is None or not last.finished:
                await self._news.wait()
                self._news.clear()
                if self._task.done() and not self.output.finished:
                    await self._task  # raises what went wrong
                last = self._next()
                yield last
        finally:
            self.cancel()

    def _next(self) -> Output:
        if not self._deltas:
            return self.output.copy()
        fresh, self._fresh = self._fresh, Output()
        fresh.finished = self.output.finished
        return fresh


def _add_tool_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    """Take in a tool call, or a piece of one."""
    index = part.get("index", len(calls))
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "name": "", "arguments": ""})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["name"] += function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""

"""Running many programs to their end: batches and rollouts, with a bar and the makespan."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from autellix.errors import ConfigError

from .generation import Generation
from .multi_engine import MultiEngine, Prompt

AT_ONCE_MAX: Final = 1024
_BAR_S: Final = 0.2

T = TypeVar("T")


class ProgramEngine:
    """What one program calls: a `MultiEngine` whose calls are all of this program."""

    def __init__(self, engine: MultiEngine, session: str) -> None:
        self.session = session
        self.calls = 0
        self._engine = engine
        self._begun: list[Generation] = []
        self._over_tokens = 0

    def generate(self, prompt: Prompt, sampling_params: Any = None, **fields: Any) -> Generation:
        """Begin a call; see `MultiEngine.generate`."""
        return self._note(
            self._engine.generate(prompt, sampling_params, session=self.session, **fields)
        )

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: Any = None, **fields: Any
    ) -> Generation:
        """Begin a call; see `MultiEngine.chat`."""
        return self._note(
            self._engine.chat(messages, sampling_params, session=self.session, **fields)
        )

    @property
    def tokens(self) -> int:
        """The tokens generated so far."""
        return self._over_tokens + sum(_tokens_of(call) for call in self._begun)

    def cancel_calls(self) -> None:
        """End the calls that nobody waits for any more."""
        for call in self._begun:
            call.cancel()

    def _note(self, call: Generation) -> Generation:
        over = [begun for begun in self._begun if begun.done]
        self._over_tokens += sum(_tokens_of(begun) for begun in over)
        self._begun = [*(begun for begun in self._begun if not begun.done), call]
        self.calls += 1
        return call


#: One run of an agent: a coroutine function that is given its engine.
Program = Callable[[ProgramEngine], Awaitable[T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult(Generic[T]):
    """How one program went."""

    index: int
    value: T | None
    error: Exception | None
    response_s: float  # from its begin to its end
    calls: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramsRun(Generic[T]):
    """How all programs went, in the order they were given."""

    results: tuple[ProgramResult[T], ...]
    makespan_s: float  # from the begin of the first to the end of the last

    @property
    def values(self) -> list[T | None]:
        """What the programs returned; None for one that failed."""
        return [result.value for result in self.results]

    @property
    def failed(self) -> list[ProgramResult[T]]:
        """The programs that raised."""
        return [result for result in self.results if result.error is not None]

    @property
    def calls(self) -> int:
        """Calls of all programs."""
        return sum(result.calls for result in self.results)

    @property
    def tokens(self) -> int:
        """Generated tokens of all programs."""
        return sum(result.tokens for result in self.results)


async def run_on(
    engine: MultiEngine,
    programs: Iterable[Program[T]],
    *,
    name: str = "program",
    at_once: int = AT_ONCE_MAX,
    progress: bool = True,
) -> ProgramsRun[T]:
    """Run programs on an engine that is there; return when the last one is over.

    Args:
        engine: A `MultiEngine`, entered.
        programs: Taken one by one, as others end.
        name: Sessions are called ``name-0``, ``name-1`` …
        at_once: So many programs run at the same time, at most.
        progress: Whether to draw a bar on standard error.

    An error in one program is in its result, and the others go on.

    Raises:
        ConfigError: ``at_once`` is below 1.
    """
    if at_once < 1:
        raise ConfigError(f"at_once: {at_once} is not allowed; allowed is a number from 1")
    numbered = enumerate(programs)
    results: dict[int, ProgramResult[T]] = {}
    state = _State()
    began_s = time.monotonic()

    async def work() -> None:
        for index, program in numbered:
            state.running += 1
            results[index] = await _run_one(engine, program, index, f"{name}-{index}")
            state.note(results[index])

    total = len(programs) if isinstance(programs, Sequence) else None
    workers = at_once if total is None else min(at_once, total)
    async with _bar(state, total, progress), asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    ordered = tuple(results[index] for index in sorted(results))
    return ProgramsRun(results=ordered, makespan_s=time.monotonic() - began_s)


def run_programs(
    model: str | None,
    programs: Iterable[Program[T]],
    *,
    name: str = "program",
    at_once: int = AT_ONCE_MAX,
    progress: bool = True,
    **engine_arguments: Any,
) -> ProgramsRun[T]:
    """Start engines, run programs to their end, stop the engines: see `run_on`.

    The makespan begins when an engine is ready. Further arguments are those of `MultiEngine`. Not
    for use inside of a running event loop.
    """

    async def main() -> ProgramsRun[T]:
        async with MultiEngine(model, **engine_arguments) as engine:
            return await run_on(engine, programs, name=name, at_once=at_once, progress=progress)

    return asyncio.run(main())


async def _run_one(
    engine: MultiEngine, program: Program[T], index: int, session: str
) -> ProgramResult[T]:
    own = ProgramEngine(engine, session)
    began_s = time.monotonic()
    value, failure = None, None
    try:
        value = await program(own)
    except Exception as error:  # noqa: BLE001 - it is the program's, and handed to the caller
        failure = error
    finally:
        tokens = own.tokens
        own.cancel_calls()
        await engine.end_session(session)
    return ProgramResult(
        index=index,
        value=value,
        error=failure,
        response_s=time.monotonic() - began_s,
        calls=own.calls,
        tokens=tokens,
    )


class _State:
    """What the bar shows."""

    def __init__(self) -> None:
        self.running = self.over = self.failed = self.calls = self.tokens = 0

    def note(self, result: ProgramResult[Any]) -> None:
        """Count a program that is over."""
        self.running -= 1
        self.over += 1
        self.failed += result.error is not None
        self.calls += result.calls
        self.tokens += result.tokens


@contextlib.asynccontextmanager
async def _bar(state: _State, total: int | None, shown: bool) -> AsyncIterator[None]:
    """Draw the bar while the block runs."""
    if not shown:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), Elapsed(),
               TextColumn("{task.fields[more]}"))  # fmt: skip
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        bar = progress.add_task("programs", total=total, more="")

        def draw() -> None:
            failed = f", {state.failed} failed" if state.failed else ""
            more = f"{state.calls} calls, {state.tokens} tokens{failed}"
            progress.update(bar, completed=state.over, more=more)

        async def keep() -> None:
            while True:
                draw()
                await asyncio.sleep(_BAR_S)

        drawing = asyncio.create_task(keep(), name="progress bar")
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
            draw()


def _tokens_of(call: Generation) -> int:
    """Return how many tokens a call has generated so far."""
    made = sum(len(part.token_ids) for part in call.output.outputs)
    usage = call.output.usage or {}
    return int(usage.get("completion_tokens") or made)

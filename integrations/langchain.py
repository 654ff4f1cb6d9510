"""LangChain runnables: each invocation is one program.

For chains that are not graphs: a graph has an adapter of its own, and a single call needs none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from inspect import ismethod
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase

import autellix

if TYPE_CHECKING:
    from autellix.program import SessionScope


class ProgramRunnable(RunnableBindingBase[Any, Any]):
    """A runnable each of whose invocations is a session of its own, or joins the one it is in.

    What else the runnable has can be reached through this one; a runnable that it makes of itself,
    as a model's ``bind_tools`` does, is wrapped like it.
    """

    program_name: str | None = None
    nested: str = "join"
    batch_is: str = "each"
    role: str | None = None
    weight: float | None = None
    deadline_s: float | None = None

    def _session(self) -> SessionScope:
        return autellix.session(
            self.program_name or self.bound.get_name(),
            nested=self.nested,
            role=self.role,
            weight=self.weight,
            deadline_s=self.deadline_s,
            kind=self.program_name or "",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "bound":  # these are not there, or not there yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self.bound, name)
        return self._like_this(found) if ismethod(found) else found

    def _like_this(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` such that a runnable that it returns is wrapped as this one is."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = method(*args, **kwargs)
            return self.model_copy(update={"bound": made}) if isinstance(made, Runnable) else made

        return call

    def _chunks(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the chunks of a stream that begins in a session and ends with it."""

        @self._session()
        def run() -> Iterator[Any]:
            yield from begin()

        chunks: Iterator[Any] = run()
        return chunks

    def _achunks(self, begin: Callable[[], Any]) -> AsyncIterator[Any]:
        """Return the same of an async stream; who leaves early closes what is inside too."""

        @self._session()
        async def run() -> AsyncIterator[Any]:
            chunks = begin()
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                if hasattr(chunks, "aclose"):  # a runnable may return an iterator that has none
                    await chunks.aclose()

        chunks: AsyncIterator[Any] = run()
        return chunks

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Run it once, as one program."""
        with self._session():
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Run it once, as one program."""
        async with self._session():
            return await super().ainvoke(input, config, **kwargs)

    def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Iterator[Any]:
        """Run it once, as one program that ends with the stream."""
        config = self._merge_configs(config)
        return self._chunks(lambda: self.bound.stream(input, config, **{**self.kwargs, **kwargs}))

    def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        """Run it once, as one program that ends with the stream."""
        config = self._merge_configs(config)
        return self._achunks(lambda: self.bound.astream(input, config, **{**self.kwargs, **kwargs}))

    def astream_events(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Run it once, as one program that ends with the events.

        ``version="v3"`` is handed on as it is: what it returns is no stream that ends by itself.
        """
        begin = super().astream_events
        if {**self.kwargs, **kwargs}.get("version") == "v3":
            return begin(input, config, **kwargs)
        return self._achunks(lambda: begin(input, config, **kwargs))

    def transform(self, input: Iterator[Any], config: Any = None, **kwargs: Any) -> Iterator[Any]:
        """Run it once in the stream of a chain: the program begins when its input is whole."""
        # So that the steps before it, which run as its input is read, are not part of it.
        return Runnable.transform(self, input, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[Any], config: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Run it once in the async stream of a chain, as `transform` does."""
        whole, is_first = None, True
        async for part in input:
            try:
                whole = part if is_first else whole + part
            except TypeError:  # of parts that do not add up the last is the whole, as in LangChain
                whole = part
            is_first = False
        if is_first:
            return
        chunks: Any = self.astream(whole, config, **kwargs)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """Run it for each input: one program each, or one for all."""
        if self.batch_is == "all":
            with self._session():
                return super().batch(inputs, config, **kwargs)
        return Runnable.batch(self, inputs, config, **kwargs)  # by `invoke`, so a program each

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        """Run it for each input: one program each, or one for all."""
        if self.batch_is == "all":
            async with self._session():
                return await super().abatch(inputs, config, **kwargs)
        return await Runnable.abatch(self, inputs, config, **kwargs)

    def batch_as_completed(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        """Run it for each input, the first to end first: one program each, or one for all."""
        if self.batch_is == "all":
            begin = super().batch_as_completed
            return self._chunks(lambda: begin(inputs, config, **kwargs))
        return Runnable.batch_as_completed(self, inputs, config, **kwargs)

    def abatch_as_completed(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        """Run it for each input, the first to end first: one program each, or one for all."""
        if self.batch_is == "all":
            begin = super().abatch_as_completed
            return self._achunks(lambda: begin(inputs, config, **kwargs))
        return Runnable.abatch_as_completed(self, inputs, config, **kwargs)


def wrap(
    runnable: Runnable[Any, Any],
    *,
    name: str | None = None,
    nested: Literal["join", "new"] = "join",
    batch: Literal["each", "all"] = "each",
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
) -> ProgramRunnable:
    """Return ``runnable`` such that each invocation is one program.

    Args:
        runnable: A chain, a model, anything that runs.
        name: The program's name; by default the runnable's.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.
        batch: Whether a batch is a program for ``each`` item, or one for ``all``.
        role: What it is for: ``interactive``, ``delegated`` or ``background``.
        weight: How much it counts beside others, 0.01 to 100.
        deadline_s: Seconds from its begin by which it should be over.

    Returns:
        A `ProgramRunnable`, also of a chat model: its methods are there, ``bind_tools`` among them,
        but it is no ``BaseChatModel``. To what asks for one, as agents do, give the model itself
        and wrap the agent.
    """
    return ProgramRunnable(
        bound=runnable, program_name=name, nested=nested, batch_is=batch, role=role,
        weight=weight, deadline_s=deadline_s,
    )  # fmt: skip

"""LangChain runnables: each invocation is one program.

For chains that are not graphs: a graph has an adapter of its own, and a single call needs none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase

import autellix

if TYPE_CHECKING:
    from autellix.program import SessionScope


class ProgramRunnable(RunnableBindingBase[Any, Any]):
    """A runnable each of whose invocations is a session of its own, or joins the one it is in."""

    program_name: str | None = None
    nested: str = "join"
    batch_is: str = "each"

    def _session(self) -> SessionScope:
        return autellix.session(self.program_name or self.bound.get_name(), nested=self.nested)

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
        begin = super().stream

        @self._session()
        def run() -> Iterator[Any]:
            yield from begin(input, config, **kwargs)

        chunks: Iterator[Any] = run()
        return chunks

    async def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        """Run it once, as one program that ends with the stream."""
        begin = super().astream

        @self._session()
        async def run() -> AsyncIterator[Any]:
            async for chunk in begin(input, config, **kwargs):
                yield chunk

        async for chunk in run():
            yield chunk

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


def wrap(
    runnable: Runnable[Any, Any],
    *,
    name: str | None = None,
    nested: Literal["join", "new"] = "join",
    batch: Literal["each", "all"] = "each",
) -> ProgramRunnable:
    """Return ``runnable`` such that each invocation is one program.

    Args:
        runnable: A chain, a model, anything that runs.
        name: The program's name; by default the runnable's.
        nested: Inside another session: ``join`` it, or open a ``new`` one whose parent it is.
        batch: Whether a batch is a program for ``each`` item, or one for ``all``.
    """
    return ProgramRunnable(bound=runnable, program_name=name, nested=nested, batch_is=batch)

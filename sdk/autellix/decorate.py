"""Makes a decorator of a block: for functions, coroutines, generators and async generators.

A generator is left and entered again at each step, by values and never by tokens, so that its
caller's context stays clean, and so that it may be stepped from another task or thread, or in a
fresh copy of the context each time, as web frameworks do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from .branches import current_owner
from .context import Scope, scope_var

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Block(Generic[T]):
    """Something to run code in, by ``with`` or ``async with``; a new one for each run."""

    def __enter__(self) -> T:
        """Begin."""
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        raise NotImplementedError

    async def __aenter__(self) -> T:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)


class Within(Block[None]):
    """A block in which ``scope`` is in force, and after which is what was before."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        self._before = scope_var.get()
        scope_var.set(self._scope._replace(outer=self._before))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope_var.set(self._before)


def decorate(fn: F, make: Callable[[], Block[Any]]) -> F:
    """Return ``fn`` so that each run of it is in a block of its own; same kind, same signature."""
    import inspect

    # An object may be called like any of them.
    forms = (fn, getattr(type(fn), "__call__", fn))  # noqa: B004 - looked at, not called
    if any(map(inspect.isasyncgenfunction, forms)):
        return cast("F", _async_generator(fn, make))
    if any(map(inspect.isgeneratorfunction, forms)):
        return cast("F", _generator(fn, make))
    if any(map(inspect.iscoroutinefunction, forms)):

        @wraps(fn)
        async def in_block_async(*args: Any, **kwargs: Any) -> Any:
            with make():
                return await fn(*args, **kwargs)

        return cast("F", in_block_async)

    @wraps(fn)
    def in_block(*args: Any, **kwargs: Any) -> Any:
        block = make()
        with block:
            result = fn(*args, **kwargs)
        # A lambda gives a coroutine that has not begun; a scope can be put in force once more.
        if isinstance(block, Within) and inspect.iscoroutine(result):
            return _within(make(), result)
        return result

    return cast("F", in_block)


async def _within(block: Block[Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    with block:
        return await coroutine


class _Steps:
    """The block of one generator: begun and ended with it, and in force during its steps only."""

    def __init__(self, make: Callable[[], Block[Any]]) -> None:
        self._block = make()
        self._before: Scope | None = None  # what the maker of the running step had in force

    def __enter__(self) -> _Steps:
        before = scope_var.get()
        self._block.__enter__()
        self._scope = scope_var.get()
        self._is_new = self._scope is not before
        scope_var.set(before)
        self.step = _Step(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = scope_var.get()
        scope_var.set(self._scope)
        try:
            self._block.__exit__(kind, error, trace)
        finally:
            scope_var.set(before)

    def enter(self) -> None:
        """Put the block in force for a step."""
        self._before = scope_var.get()
        scope = self._scope
        if scope is None:
            return  # a block that sets nothing: the caller's scope holds
        if self._is_new:
            # The steps are one after the other, whoever makes them: one thread.
            owner, stand_in = current_owner()
            scope.branch.adopt(stand_in or owner)
        scope_var.set(scope)

    def leave(self) -> None:
        """Put back what was in force before the step."""
        if self._scope is not None:
            self._scope = scope_var.get() or self._scope
        scope_var.set(self._before)


class _Step:
    """One step after the other of a generator; the same object serves for all of them."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        self._steps.enter()

    def __exit__(self, *_: object) -> None:
        self._steps.leave()


def _generator(fn: Callable[..., Any], make: Callable[[], Block[Any]]) -> Callable[..., Any]:
    @wraps(fn)
    def in_steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with _Steps(make) as steps:
            inner = fn(*args, **kwargs)
            step, value = inner.send, None
            while True:
                try:
                    with steps.step:
                        item = step(value)
                except StopIteration as done:
                    return done.value
                try:
                    step, value = inner.send, (yield item)
                except GeneratorExit:
                    with steps.step:
                        inner.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown in by the caller: handed on
                    step, value = inner.throw, error

    return in_steps


def _async_generator(fn: Callable[..., Any], make: Callable[[], Block[Any]]) -> Callable[..., Any]:
    @wraps(fn)
    async def in_steps(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with _Steps(make) as steps:
            inner = fn(*args, **kwargs)
            step, value = inner.asend, None
            while True:
                try:
                    with steps.step:
                        item = await step(value)
                except StopAsyncIteration:
                    return
                try:
                    step, value = inner.asend, (yield item)
                except GeneratorExit:
                    with steps.step:
                        await inner.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown in by the caller: handed on
                    step, value = inner.athrow, error

    return in_steps

"""Makes a decorator of a block: for functions, coroutines, generators and async generators.

A generator is left and entered again at each step, by values and never by tokens, so that its
caller's context stays clean, and so that it may be stepped from another task or thread, or in a
fresh copy of the context each time, as web frameworks do.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from .branches import current_owner
from .context import Scope, scope_var

F = TypeVar("F", bound=Callable[..., Any])


class Block(Protocol):
    """Something to run code in; a new one for each run."""

    def __enter__(self) -> Any:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""


def decorate(fn: F, make: Callable[[], Block]) -> F:
    """Return ``fn`` so that each run of it is in a block of its own; same kind, same signature."""
    import inspect

    if inspect.isasyncgenfunction(fn):
        return cast("F", _async_generator(fn, make))
    if inspect.isgeneratorfunction(fn):
        return cast("F", _generator(fn, make))
    if inspect.iscoroutinefunction(fn):

        @wraps(fn)
        async def in_block_async(*args: Any, **kwargs: Any) -> Any:
            with make():
                return await fn(*args, **kwargs)

        return cast("F", in_block_async)

    @wraps(fn)
    def in_block(*args: Any, **kwargs: Any) -> Any:
        with make():
            return fn(*args, **kwargs)

    return cast("F", in_block)


class _Steps:
    """The block of one generator: in force during a step, and only then."""

    def __init__(self, make: Callable[[], Block]) -> None:
        self._block = make()
        before = scope_var.get()
        self._block.__enter__()
        self._scope = scope_var.get()
        self._is_new = self._scope is not before
        scope_var.set(before)

    def enter(self) -> Scope | None:
        """Put the block in force; returns what was in force before."""
        before = scope_var.get()
        scope = self._scope
        if scope is None:
            return before  # a block that sets nothing: the caller's scope holds
        if self._is_new:
            # The steps are one after the other, whoever makes them: one thread.
            owner, stand_in = current_owner()
            scope.branch.adopt(stand_in or owner)
        scope_var.set(scope)
        return before

    def leave(self, before: Scope | None) -> None:
        """Put back what was in force before the step."""
        if self._scope is not None:
            self._scope = scope_var.get() or self._scope
        scope_var.set(before)

    def end(self, error: BaseException | None) -> None:
        """End the block."""
        before = scope_var.get()
        scope_var.set(self._scope)
        try:
            self._block.__exit__(type(error) if error is not None else None, error, None)
        finally:
            scope_var.set(before)


def _generator(fn: Callable[..., Any], make: Callable[[], Block]) -> Callable[..., Any]:
    @wraps(fn)
    def in_steps(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps, failure = _Steps(make), None
        inner = fn(*args, **kwargs)
        step, value = inner.send, None
        try:
            while True:
                before = steps.enter()
                try:
                    item = step(value)
                except StopIteration as done:
                    return done.value
                finally:
                    steps.leave(before)
                try:
                    step, value = inner.send, (yield item)
                except GeneratorExit:
                    before = steps.enter()
                    try:
                        inner.close()
                    finally:
                        steps.leave(before)
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown in by the caller: handed on
                    step, value = inner.throw, error
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            steps.end(failure)

    return in_steps


def _async_generator(fn: Callable[..., Any], make: Callable[[], Block]) -> Callable[..., Any]:
    @wraps(fn)
    async def in_steps(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps, failure = _Steps(make), None
        inner = fn(*args, **kwargs)
        step, value = inner.asend, None
        try:
            while True:
                before = steps.enter()
                try:
                    item = await step(value)
                except StopAsyncIteration:
                    return
                finally:
                    steps.leave(before)
                try:
                    step, value = inner.asend, (yield item)
                except GeneratorExit:
                    before = steps.enter()
                    try:
                        await inner.aclose()
                    finally:
                        steps.leave(before)
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown in by the caller: handed on
                    step, value = inner.athrow, error
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            steps.end(failure)

    return in_steps

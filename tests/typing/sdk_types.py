"""What mypy and pyright must see through the SDK's decorators; checked, never run."""

# pyright: basic
from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any

from typing_extensions import assert_type

import autellix


@autellix.session
def plain(question: str, *, times: int = 1) -> str:
    return question * times


@autellix.session("named", nested="new")
async def coroutine(question: str) -> int:
    return len(question)


@autellix.session
def generator(count: int) -> Generator[int, str, bool]:
    yield from range(count)
    return True


@autellix.session(conversation="c")
async def async_generator(count: int) -> AsyncGenerator[int, None]:
    for number in range(count):
        yield number


@autellix.thread
def on_a_thread(x: int) -> float:
    return x / 2


@autellix.thread("named")
def on_a_named_thread(x: int) -> float:
    return x / 2


@autellix.tool("search")
async def search(query: str) -> list[str]:
    return [query]


def callback(x: int, y: str) -> bytes:
    return y.encode() * x


async def check() -> None:
    assert_type(plain("a", times=2), str)
    assert_type(await coroutine("a"), int)
    assert_type(generator(1), Generator[int, str, bool])
    assert_type(async_generator(1), AsyncGenerator[int, None])
    assert_type(on_a_thread(1), float)
    assert_type(on_a_named_thread(1), float)
    pending: Coroutine[Any, Any, list[str]] = search("q")
    assert_type(await pending, list[str])
    assert_type(autellix.propagate(callback)(1, "y"), bytes)
    kept: Callable[[int, str], bytes] = autellix.propagate(callback)
    assert_type(kept(1, "y"), bytes)
    with autellix.session() as session:
        assert_type(session, autellix.Session)
        assert_type(session.run(callback, 1, "y"), bytes)
        assert_type(session.bind(callback)(1, "y"), bytes)
        assert_type(session.headers(), dict[str, str])
    async with autellix.session("name") as again:
        assert_type(again.id, str)
    assert_type(autellix.start_session("s"), autellix.Session)
    assert_type(autellix.current_session(), autellix.Session | None)
    assert_type(autellix.current_thread(), autellix.ThreadInfo | None)
    assert_type(autellix.wrap(autellix.Client()), autellix.Client)
    assert_type(autellix.status().tagged, int)
    assert_type(autellix.doctor().is_good, bool)
    with autellix.attach({}) as attached:
        assert_type(attached, autellix.Session | None)


def wrong() -> None:
    plain(1)  # type: ignore[arg-type]
    plain("a", time=2)  # type: ignore[call-arg]
    on_a_thread("x")  # type: ignore[arg-type]
    autellix.propagate(callback)("x", 1)  # type: ignore[arg-type]
    autellix.no_such_name()  # type: ignore[attr-defined]
    autellix.session(nmae="x")  # type: ignore[call-overload]

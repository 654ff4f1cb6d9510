"""A short way to make calls in the tests, and to read what arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

from autellix.testing import FakeServer, RecordedCall

#: For scripts in fresh interpreters: a client that is imported in a tenth of the time.
ASK = (
    "import os, httpx, autellix\n"
    "def ask(text='hi'):\n"
    "    url = os.environ['OPENAI_BASE_URL'] + '/completions'\n"
    "    assert httpx.post(url, json={'prompt': text}).status_code == 200\n"
)


class Talk:
    """An OpenAI client of each kind against one fake server."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.client = openai.OpenAI(max_retries=2)
        self.async_clients: list[openai.AsyncOpenAI] = []

    def ask(self, text: str, **options: Any) -> Any:
        """Make one call."""
        return self.client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": text}], **options
        )

    async def aask(self, text: str, **options: Any) -> Any:
        """Make one call from a coroutine, with a client of this loop."""
        async with openai.AsyncOpenAI(max_retries=2) as client:
            reply = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": text}], **options
            )
            if options.get("stream"):
                return [chunk async for chunk in reply]
            return reply

    def close(self) -> None:
        """Close the client."""
        self.client.close()

    @property
    def calls(self) -> dict[str, RecordedCall]:
        """What arrived, by what was said."""
        return {call.text: call for call in self.server.calls}

    @property
    def sessions(self) -> set[str | None]:
        """The sessions of all calls."""
        return {call.session for call in self.server.calls}

    @property
    def threads(self) -> dict[str, tuple[int | None, int | None]]:
        """Thread and number of each call, by what was said."""
        return {call.text: (call.thread, call.seq) for call in self.server.calls}


def run(coroutine: Any) -> Any:
    """Run a coroutine in a loop of its own, as a script does."""
    return asyncio.run(coroutine)

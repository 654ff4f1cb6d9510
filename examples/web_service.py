"""A FastAPI service that streams: each request is one program, which ends with its stream.

The decorator is on the generator, since a web framework runs a stream's steps each in a fresh
context. Start it with `python examples/web_service.py`, then open /story?about=fox.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from openai import AsyncOpenAI

import autellix

MODEL = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
app = FastAPI()
client = AsyncOpenAI()


@autellix.session("story")
async def tell(about: str) -> AsyncIterator[str]:
    """Yield a title, then a story word by word: two calls of one program."""
    for prompt in (f"A title for a story about a {about}:", f"A short story about a {about}:"):
        chunks = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=32,
            stream=True,
        )
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content
        yield "\n"


@app.get("/story")
async def story(about: str) -> StreamingResponse:
    return StreamingResponse(tell(about), media_type="text/plain")


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8080")), log_level="warning")

"""A process that speaks as vLLM does, without a model: OpenAI's API and our control channel.

Run as a plain file: ``fake_vllm.py --uds PATH`` or ``--host H --port P``. The answer to a call is
``max_tokens`` numbers, one a step. Variables: ``FAKE_STEP_S``, ``FAKE_START_S``, ``FAKE_BUSY_S``
(nobody is served for so long in each step); the rest is what a real engine gets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

from aiohttp import web

from autellix.server import call_tag
from autellix.server.channel import CallReport, Heartbeat, Hello, PolicyWanted
from autellix.server.engine.control import EngineChannel, read_settings

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.002"))
BUSY_S = float(os.environ.get("FAKE_BUSY_S", "0"))
SETTINGS = read_settings(os.environ)


class Engine:
    """The whole engine; all its calls run at once."""

    def __init__(self) -> None:
        self.running = 0
        self.step = 0
        self.policy = "plas"
        self.channel: EngineChannel | None = None

    def hello(self, boot_id: str) -> Hello:
        """Return the first message."""
        return Hello(
            version=1, engine_id=SETTINGS.engine_id, boot_id=boot_id, rank=0, pid=os.getpid(),
            vllm_version="0", scheduler="fake", policy=self.policy, async_scheduling=False,
            slots=256, kv_blocks=1000, block_tokens=16,
        )  # fmt: skip

    def heartbeat(self, boot_id: str, last_seq: int) -> Heartbeat:
        """Return the figures of now."""
        return Heartbeat(
            boot_id=boot_id, last_seq=last_seq, step=self.step, step_age_s=None,
            longest_step_s=STEP_S, running=self.running, waiting=0, kv_blocks_free=1000,
            computed_tokens=self.step, recomputed_tokens=0, preemptions=0, level_waiting=(),
        )  # fmt: skip

    def report(self, request: web.Request, began_s: float, made: int, reason: str) -> None:
        """Say what a call cost."""
        tag = call_tag.find_call(request.headers.get("x-request-id", ""))
        if self.channel is None or tag is None or SETTINGS.key is None:
            return
        self.channel.report(
            CallReport(
                seq=0, call_id=tag.call_id, request_id=tag.call_id, reason=reason,
                program_id=call_tag.unseal_program(
                    request.headers.get("x-session-id"), SETTINGS.key
                ),
                service_s=time.monotonic() - began_s, wait_s=0.0, preemptions=0, swaps=0,
                prompt_tokens=7, hit_tokens=0, output_tokens=made, level=1,
            )
        )  # fmt: skip

    async def call(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion."""
        body = await request.json()
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        began_s, made, reason = time.monotonic(), 0, "abort"
        self.running += 1
        try:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            if body.get("stream"):
                await response.prepare(request)
            for number in range(count):
                await asyncio.sleep(STEP_S)
                time.sleep(BUSY_S)  # noqa: ASYNC251 - that is the point
                self.step += 1
                made += 1
                if body.get("stream"):
                    event = self.chunk(request, body, number, number == count - 1)
                    await response.write(f"data: {json.dumps(event)}\n\n".encode())
            reason = "length"
            if body.get("stream"):
                await response.write(b"data: [DONE]\n\n")
                return response
            return web.json_response(self.whole(request, body, count))
        finally:
            self.running -= 1
            self.report(request, began_s, made, reason)

    def chunk(self, request: web.Request, body: Any, number: int, last: bool) -> Any:
        """Return one event."""
        choices = []
        for index in range(body.get("n") or 1):
            choice: dict[str, Any] = {"index": index, "finish_reason": "length" if last else None}
            if body.get("return_token_ids"):
                choice["token_ids"] = [number]
                if number == 0:
                    choice["prompt_token_ids"] = [1, 2, 3]
            if "chat" in request.path:
                choice["delta"] = {"content": f"{number} "}
            else:
                choice["text"] = f"{number} "
            choices.append(choice)
        return {"id": "x", "object": "chunk", "model": body.get("model"), "choices": choices}

    def whole(self, request: web.Request, body: Any, count: int) -> Any:
        """Return the answer of a call that is not streamed."""
        text = "".join(f"{number} " for number in range(count))
        said = {"message": {"role": "assistant", "content": text}}
        choice = said if "chat" in request.path else {"text": text}
        choices = [
            {"index": index, "finish_reason": "length", **choice}
            for index in range(body.get("n") or 1)
        ]
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        return {"id": "x", "model": body.get("model"), "choices": choices, "usage": usage}

    async def listen(self) -> None:
        """Take what the gateway says, as a scheduler does between two steps."""
        while self.channel is not None:
            while self.channel.inbox:
                message = self.channel.inbox.popleft()
                if isinstance(message, PolicyWanted):
                    self.policy = message.settings["policy"]
                    self.channel.say_hello()
            await asyncio.sleep(0.02)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return the counters that the pool reads."""
        return web.Response(
            text=f"vllm:iteration_tokens_total_count {self.step}\n"
            f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n"
        )


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})


@web.middleware
async def _ask_for_key(request: web.Request, handler: Any) -> web.StreamResponse:
    key = os.environ.get("VLLM_API_KEY")
    is_open = request.path in ("/health", "/metrics")  # as in vLLM
    if key and not is_open and request.headers.get("authorization") != f"Bearer {key}":
        return web.json_response({"error": "Unauthorized"}, status=401)
    return await handler(request)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    await asyncio.sleep(float(os.environ.get("FAKE_START_S", "0")))
    engine = Engine()
    if SETTINGS.endpoint is not None:
        engine.channel = EngineChannel(SETTINGS, engine.hello, engine.heartbeat)
        engine.channel.start()
    app = web.Application(middlewares=[_ask_for_key], client_max_size=1 << 30)
    app.router.add_get("/health", lambda _: _done())
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/v1/completions", engine.call)
    app.router.add_post("/v1/chat/completions", engine.call)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    if options.uds:
        await web.UnixSite(runner, options.uds, backlog=4096).start()
    else:
        await web.TCPSite(runner, options.host, options.port, backlog=4096).start()
    await engine.listen()
    await asyncio.Event().wait()


async def _done() -> web.Response:
    return web.Response()


if __name__ == "__main__":
    asyncio.run(_main())

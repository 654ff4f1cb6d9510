"""The answers of the fake server, in the shapes of the OpenAI and Anthropic APIs."""

from __future__ import annotations

import itertools
import json
from typing import Any

ToolCalls = list[tuple[str, dict[str, Any]]]
Reply = dict[str, Any] | list[str]

_numbers = itertools.count()  # agents refuse a tool call whose id they have seen


def answer_to(path: str, body: dict[str, Any], text: str, tools: ToolCalls) -> Reply:
    """Return the body of an answer, or the chunks of a streamed one."""
    path = path.partition("?")[0]
    model = str(body.get("model") or "fake")
    streams = bool(body.get("stream"))
    if path.endswith("/chat/completions"):
        return _chat_stream(model, text, tools) if streams else _chat(model, text, tools)
    if path.endswith("/completions"):
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        reply = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": model,
                 "choices": [choice], "usage": _usage()}  # fmt: skip
        return [_event(reply), "data: [DONE]\n\n"] if streams else reply
    if path.endswith("/embeddings"):
        wanted = body.get("input")
        count = len(wanted) if isinstance(wanted, list) else 1
        data = [{"object": "embedding", "index": i, "embedding": [0.0, 1.0]} for i in range(count)]
        return {"object": "list", "model": model, "data": data, "usage": _usage()}
    if path.endswith("/responses"):
        return _response_stream(model, text, tools) if streams else _response(model, text, tools)
    if path.endswith("/messages"):
        return {"id": "msg_1", "type": "message", "role": "assistant", "model": model,
                "content": [{"type": "text", "text": text}], "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip
    return {"object": "unknown"}


def _usage() -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _tool_calls(tools: ToolCalls) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{next(_numbers)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for name, arguments in tools
    ]


def _chat(model: str, text: str, tools: ToolCalls) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None if tools else text}
    if tools:
        message["tool_calls"] = _tool_calls(tools)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if tools else "stop",
        "logprobs": None,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": _usage(),
    }


def _chat_stream(model: str, text: str, tools: ToolCalls) -> list[str]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if tools:
        calls = [{"index": i, **call} for i, call in enumerate(_tool_calls(tools))]
        deltas.append({"tool_calls": calls})
    else:
        half = len(text) // 2
        deltas += [{"content": text[:half]}, {"content": text[half:]}]
    chunks = [
        _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        for delta in deltas
    ]
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if tools else "stop"}
    chunks.append(_event({**head, "choices": [last], "usage": _usage()}))
    return [*chunks, "data: [DONE]\n\n"]


def _response(model: str, text: str, tools: ToolCalls) -> dict[str, Any]:
    output: list[dict[str, Any]] = [
        {"type": "function_call", "id": f"fc_{(n := next(_numbers))}",
         "call_id": f"call_{n}", "name": name,
         "arguments": json.dumps(arguments), "status": "completed"}
        for name, arguments in tools
    ]  # fmt: skip
    if not tools:
        part = {"type": "output_text", "text": text, "annotations": []}
        output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                   "content": [part]}]  # fmt: skip
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
             "input_tokens_details": {"cached_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
    return {"id": "resp_1", "object": "response", "created_at": 1, "model": model,
            "status": "completed", "output": output, "parallel_tool_calls": True,
            "tool_choice": "auto", "tools": [], "usage": usage}  # fmt: skip


def _response_stream(model: str, text: str, tools: ToolCalls) -> list[str]:
    done = _response(model, text, tools)
    begun = {**done, "status": "in_progress", "output": []}
    events = [
        {"type": "response.created", "sequence_number": 0, "response": begun},
        {"type": "response.completed", "sequence_number": 1, "response": done},
    ]
    return [f"event: {e['type']}\n" + _event(e) for e in events]


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"

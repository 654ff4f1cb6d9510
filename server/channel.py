"""The messages of the control channel between the gateway and an engine.

One ZeroMQ channel per EngineCore: a DEALER in the engine, a ROUTER in the gateway, one msgpack
message a frame. The channel is advisory: an engine without it still serves, a gateway without it
still routes. Accounting is numbered per boot of the engine (``boot_id``, ``seq``): duplicates are
ignored, and the gateway asks for a gap to be sent again from the engine's ring of recent calls.

Pure: this file moves no byte.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

CHANNEL_VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 1 << 20

# The engine inherits these from whoever starts it; they are no constants of the model, so they must
# not be in vLLM's additional config, which is part of its compile-cache key.
ENV_ENDPOINT: Final = "AUTELLIX_CHANNEL_ENDPOINT"
ENV_ENGINE_ID: Final = "AUTELLIX_ENGINE_ID"
ENV_KEY: Final = "AUTELLIX_CHANNEL_KEY"  # hex; also the key of the program seal


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """The first message of an engine, and the answer to ``HelloWanted``."""

    version: int
    engine_id: str
    boot_id: str
    rank: int  # data-parallel index
    pid: int
    vllm_version: str
    scheduler: str
    policy: str
    async_scheduling: bool
    slots: int
    kv_blocks: int
    block_tokens: int


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one call cost in this engine; sent once, when the call leaves the scheduler."""

    seq: int
    call_id: str | None  # None: the call carries no tag (a foreign client, a Responses call)
    program_id: str | None
    request_id: str
    reason: str  # stop | length | abort | error | ...
    service_s: float
    wait_s: float
    preemptions: int
    swaps: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    level: int


class Accounting(msgspec.Struct, tag="accounting", frozen=True, kw_only=True):
    """Reports with consecutive ``seq``, oldest first."""

    boot_id: str
    reports: tuple[CallReport, ...]


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True, kw_only=True):
    """The state of an engine, a few times a second.

    ``step_age_s`` is how long ago the step under way began, None between steps. A frozen engine
    is one whose ``step`` stands still while calls wait or run.
    """

    boot_id: str
    last_seq: int
    step: int
    step_age_s: float | None
    longest_step_s: float
    running: int
    waiting: int
    kv_blocks_free: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    level_waiting: tuple[int, ...]
    long_step_expected: bool = False


class Bye(msgspec.Struct, tag="bye", frozen=True, kw_only=True):
    """The engine stops in good order; nothing may depend on this message."""

    boot_id: str


class HelloWanted(msgspec.Struct, tag="hello_wanted", frozen=True, kw_only=True):
    """The gateway does not know this peer (it was restarted): say hello again."""


class Resend(msgspec.Struct, tag="resend", frozen=True, kw_only=True):
    """The gateway saw a gap: send the reports from ``first_seq`` to ``last_seq`` again."""

    boot_id: str
    first_seq: int
    last_seq: int


class SessionEnded(msgspec.Struct, tag="session_ended", frozen=True, kw_only=True):
    """These programs are over: forget them when their last call is."""

    program_ids: tuple[str, ...]


class PolicyWanted(msgspec.Struct, tag="policy_wanted", frozen=True, kw_only=True):
    """Order calls by this policy from the next step on; the engine answers with a new hello.

    ``settings`` are those of ``server.policy.config``; absent ones are the defaults. An engine that
    cannot read them keeps its policy.
    """

    settings: dict[str, Any]


UpMessage = Hello | Accounting | Heartbeat | Bye
DownMessage = HelloWanted | Resend | SessionEnded | PolicyWanted

_encoder = msgspec.msgpack.Encoder()
_up_decoder = msgspec.msgpack.Decoder(UpMessage)
_down_decoder = msgspec.msgpack.Decoder(DownMessage)


def encode(message: UpMessage | DownMessage) -> bytes:
    """Return ``message`` as one frame."""
    return _encoder.encode(message)


def decode_up(frame: bytes) -> UpMessage:
    """Return the engine's message in ``frame``.

    Raises:
        msgspec.MsgspecError: the frame is no such message; the peer is to be ignored.
    """
    return _up_decoder.decode(frame)


def decode_down(frame: bytes) -> DownMessage:
    """Return the gateway's message in ``frame``.

    Raises:
        msgspec.MsgspecError: the frame is no such message.
    """
    return _down_decoder.decode(frame)

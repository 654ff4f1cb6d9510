"""The messages of the control channel between the gateway and an engine.

One ZeroMQ channel per EngineCore: a DEALER in the engine, a ROUTER in the gateway, one msgpack
message a frame. The channel is advisory: an engine without it still serves, a gateway without it
still routes. Accounting is numbered per boot of the engine (``boot_id``, ``seq``): duplicates are
ignored, and the gateway asks for a gap to be sent again from the engine's ring of recent calls.

Pure: this file moves no byte.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import msgspec

CHANNEL_VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 1 << 20
EVENTS_MAX: Final = 32  # of one call; 256 full reports are half of the longest message

# The engine inherits these from whoever starts it; they are no constants of the model, so they must
# not be in vLLM's additional config, which is part of its compile-cache key.
ENV_ENDPOINT: Final = "AUTELLIX_CHANNEL_ENDPOINT"
ENV_ENGINE_ID: Final = "AUTELLIX_ENGINE_ID"
ENV_KEY: Final = "AUTELLIX_CHANNEL_KEY"  # hex; also the key of the program seal
ENV_CURVE: Final = "AUTELLIX_CHANNEL_CURVE"  # the three keys of `ChannelCurve`, with spaces between


class ChannelCurve(NamedTuple):
    """CurveZMQ's keys of an engine whose channel crosses a network, each 40 characters of Z85."""

    server_public: str
    public: str
    secret: str


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """The first message of an engine, and the answer to ``HelloWanted`` and ``PolicyWanted``.

    ``settings_digest`` is that of the settings which the engine was sent last and goes by
    (`digest_settings`), empty if it was sent none. The field is of a later build than the others.
    """

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
    settings_digest: str | None = None  # None: not said


class CallEvent(msgspec.Struct, frozen=True, array_like=True):
    """One thing that happened to a call in the engine.

    ``what`` is ``run`` (it begins to run, also again), ``preempt``, ``promote`` or ``demote``.

    ``why`` of a preemption is ``room`` (running calls needed its blocks), ``waiting:LEVEL`` (a call
    of this level took its place) or ``engine`` (vLLM's own choice, for want of blocks), with
    ``+swap`` where its blocks were saved; of a run ``fresh``, ``hit`` (tokens found in the cache),
    ``swap_in`` or ``recompute``.
    """

    at_s: float  # since the call came to the engine
    what: str
    level: int  # from then on
    why: str = ""


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one call cost in this engine; sent once, when the call leaves the scheduler.

    The fields with defaults are of a later build than the others: an engine may leave them out.
    """

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
    first_level: int = 0  # where it came in; 0: not said
    promotions: int = 0
    stay_s: float = 0.0  # from its coming to its leaving
    events: tuple[CallEvent, ...] = ()  # the first EVENTS_MAX
    events_dropped: int = 0


class Accounting(msgspec.Struct, tag="accounting", frozen=True, kw_only=True):
    """Reports with consecutive ``seq``, oldest first."""

    boot_id: str
    reports: tuple[CallReport, ...]


class SwapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has saved to host memory and brought back since its start."""

    swap_outs: int
    swap_ins: int
    out_bytes: int
    in_bytes: int
    out_bytes_s: float | None  # the speed of late; None: not measured
    in_bytes_s: float | None
    pool_full: int
    swap_failed: int
    shelved: int = 0  # programs that were saved between two calls, and calls that took it back
    fetched: int = 0


class RoomFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the adaptive policy holds: programs whose KV is kept together, and those at the door.

    Those at the door have no KV to lose here: an engine with room may take them over.
    """

    programs_inside: int
    programs_at_door: int
    inside_tokens: int
    door_tokens: int
    limit_tokens: int
    pauses: int


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
    swap: SwapFigures | None = None  # nothing is swapped
    room: RoomFigures | None = None  # of the adaptive policy


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
    cannot read them keeps its policy, and its hello says so.
    """

    settings: dict[str, Any]


class ToolNoted(msgspec.Struct, tag="tool", frozen=True, kw_only=True):
    """A program waits for a tool from now on, or for none any more: its next call is near."""

    program_id: str
    tool: str | None


UpMessage = Hello | Accounting | Heartbeat | Bye
DownMessage = HelloWanted | Resend | SessionEnded | PolicyWanted | ToolNoted

_DIGEST_BYTES: Final = 8
_encoder = msgspec.msgpack.Encoder()
_sorted_encoder = msgspec.msgpack.Encoder(order="sorted")
_up_decoder = msgspec.msgpack.Decoder(UpMessage)
_down_decoder = msgspec.msgpack.Decoder(DownMessage)


def digest_settings(settings: dict[str, Any]) -> str:
    """Return what two ends compare instead of the ``settings`` of `PolicyWanted`.

    >>> digest_settings({"beta": 4, "policy": "plas"}) == digest_settings(
    ...     {"policy": "plas", "beta": 4}
    ... )
    True
    """
    text = _sorted_encoder.encode(settings)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()


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

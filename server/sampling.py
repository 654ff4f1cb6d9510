"""vLLM's ``SamplingParams`` as the fields of an OpenAI request that mean the same.

Read by attribute, so that vLLM need not be imported where no engine runs. What has no field in the
request is refused when it is set, never dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from autellix.errors import ConfigError

#: Sent under their own names, whatever their value: the server's defaults are not vLLM's.
_SAME: Final = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "min_p", "ignore_eos", "max_tokens", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
#: Sent if they are set.
_IF_SET: Final = (
    "seed", "stop", "stop_token_ids", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids",
    "bad_words", "watermarking", "thinking_token_budget", "stream_interval",
)  # fmt: skip
#: Set in other words below, or of no meaning outside an engine.
_OTHERWISE: Final = frozenset(
    ("logprobs", "logit_bias", "structured_outputs", "repetition_detection", "extra_args",
     "output_kind", "skip_clone", "output_text_buffer_length")
)  # fmt: skip


def request_fields(params: Any, *, is_chat: bool) -> dict[str, Any]:
    """Return the fields of a request.

    Args:
        params: ``vllm.SamplingParams``, or a mapping of request fields, which is taken as it is;
            None: the server's defaults.
        is_chat: For a chat completion; some fields have other names there.

    Raises:
        ConfigError: a parameter is set that no request can carry.
    """
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    fields = {name: value for name in _SAME if (value := getattr(params, name, None)) is not None}
    fields.update(
        {
            name: value
            for name in _IF_SET
            if (value := getattr(params, name, None)) not in (None, [])
        }
    )
    if (count := getattr(params, "logprobs", None)) is not None:
        fields.update({"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count})
    if bias := getattr(params, "logit_bias", None):
        fields["logit_bias"] = {str(token): value for token, value in bias.items()}
    if extra := getattr(params, "extra_args", None):
        fields["vllm_xargs"] = dict(extra)
    for name in ("structured_outputs", "repetition_detection"):
        if (value := getattr(params, name, None)) is not None:
            fields[name] = _plain(value)
    _refuse_rest(params)
    return fields


def wants_stream(params: Any) -> bool:
    """Return whether somebody may look at the answer before it is whole."""
    return getattr(getattr(params, "output_kind", None), "name", "") != "FINAL_ONLY"


def wants_deltas(params: Any) -> bool:
    """Return whether each output is to hold what is new in it only."""
    return getattr(getattr(params, "output_kind", None), "name", "") == "DELTA"


def _plain(value: Any) -> Any:
    """Return a settings object as a mapping of what is set in it."""
    if isinstance(value, Mapping):
        return dict(value)
    names = (
        [field.name for field in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value)
        else list(getattr(value, "__struct_fields__", ()))
    )
    return {
        name: part
        for name in names
        if not name.startswith("_") and (part := getattr(value, name)) is not None
    }


def _refuse_rest(params: Any) -> None:
    """Raise if a field that cannot be sent differs from its default."""
    default = type(params)()
    for name in getattr(params, "__struct_fields__", ()):
        is_sent = name in _SAME or name in _IF_SET or name in _OTHERWISE
        if is_sent or name.startswith("_"):
            continue
        if (value := getattr(params, name)) != getattr(default, name):
            raise ConfigError(
                f"sampling_params.{name}: {value!r} is not allowed; allowed is "
                f"{getattr(default, name)!r}, since no request can carry it"
            )

"""Turns a Llama model in one GGUF file into the folder of files that vLLM loads.

A GGUF file holds quantised weights, the vocabulary and a few figures. The folder holds the same
model as float32 safetensors, with ``config.json`` and a tokenizer. Two things differ in substance:
tensor names, and the order of rows in the query and key projections. GGUF stores the two halves of
each head's rotary dimensions interleaved; the Hugging Face layout keeps them apart.

This file knows no package index and no checksum; ``server/model.py`` does. It needs ``gguf`` and
``safetensors``, which it imports when it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

_WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight\Z")
_CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL

# The model's own template, and for tools the format that vLLM's "hermes" parser reads back.
CHAT_TEMPLATE: Final = """\
{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- '\\n\\nYou can call these functions:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nTo call one, answer with its name and arguments as JSON, like this:\\n' -}}
{{- '<tool_call>\\n{"name": "...", "arguments": {}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function -%}
{{- '\\n<tool_call>\\n{"name": ' + (f.name | tojson) + ', "arguments": ' -}}
{{- (f.arguments if f.arguments is string else f.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tensor_name(name: str) -> str:
    """Return the Hugging Face name of the GGUF tensor ``name``.

    Raises:
        ValueError: no Llama model has such a tensor.

    >>> tensor_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.match(name)
    if match is None or match[2] not in _OF_LAYER:
        raise ValueError(f"unknown tensor {name!r}: this is no plain Llama model")
    return f"model.layers.{match[1]}.{_OF_LAYER[match[2]]}.weight"


def unpermute(
    rows: np.ndarray[Any, Any],
    heads: int,
) -> np.ndarray[Any, Any]:
    """Return the rows of a query or key projection in Hugging Face order.

    Args:
        rows: (heads × head size, width); GGUF interleaves the two rotary halves of each head.
        heads: How many heads these rows hold: the key projection has fewer than the query's.
    """
    half = rows.shape[0] // heads // 2
    assert rows.shape[0] == heads * half * 2, f"{rows.shape[0]} rows do not fill {heads} heads"
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` for a model with these GGUF fields."""
    heads = fields["llama.attention.head_count"]
    width = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "head_dim": width // heads,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def tokenizer_files(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tokenizer's files, by name, for a byte-level BPE vocabulary.

    Raises:
        ValueError: the vocabulary is split in a way that is not SmolLM's (digits one by one).
    """
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError("only SmolLM's byte-level BPE tokenizer is known")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    special = [i for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = [{"id": i, "content": tokens[i], "special": True, **flags} for i in special]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre = [{"type": "Digits", "individual_digits": True}, {**byte_level, "use_regex": True}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(i): {"content": tokens[i], "special": True, **flags} for i in special
        },
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model in ``source`` into ``folder``, which exists and is empty.

    Args:
        source: A GGUF file of a Llama model whose embeddings are tied.
        folder: Gets ``config.json``, ``generation_config.json``, ``model.safetensors`` and the
            tokenizer's two files. On an error it is left half full: the caller removes it.
        progress: Called with a line for people.

    Raises:
        ValueError: the file holds another kind of model.
    """
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"a {fields['general.architecture']} model, not a Llama model")
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind]).copy()
        tensors[tensor_name(tensor.name)] = values
        if len(tensors) % 90 == 0:
            progress(f"  {len(tensors)} of {len(reader.tensors)} tensors")
    config = model_config(fields)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes it for its owner only
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    files = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ids},
        **tokenizer_files(fields),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")

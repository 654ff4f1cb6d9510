"""A random Llama of a few hundred thousand weights with SmolLM2's tokenizer, made on demand.

It answers nonsense at once, starts faster than a real model and needs little memory: for tests of
faults, where what the model says does not matter.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOKENIZER_SOURCE = ROOT / "models" / "smollm2"
TINY_FOLDER = ROOT / "models" / "tiny"

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def make_tiny_model(folder: Path = TINY_FOLDER, tokenizer: Path = TOKENIZER_SOURCE) -> Path:
    """Return the folder of the tiny model, made unless it is there.

    Args:
        folder: Where it is to be.
        tokenizer: A folder with SmolLM2's tokenizer files, as `autellix model get smollm2` leaves.

    Raises:
        FileNotFoundError: the tokenizer is not there.
    """
    if (folder / "model.safetensors").exists():
        return folder
    if not (tokenizer / "tokenizer.json").exists():
        raise FileNotFoundError(f"no tokenizer in {tokenizer}: run `autellix model get smollm2`")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    # Made beside, then moved: a half-made model is never found, nor is one made twice at a time.
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.making-"))
    making.chmod(0o755)
    LlamaForCausalLM(config).save_pretrained(making)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, making / name)
    try:
        making.rename(folder)
    except OSError:  # there is one, of another process or half a one of an old version
        if not (folder / "model.safetensors").exists():
            raise
        shutil.rmtree(making)
    return folder

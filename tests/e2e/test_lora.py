"""An adapter (LoRA) on real vLLM is a model like any other to the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve_process import ServeProcess, serving

pytestmark = [pytest.mark.live, pytest.mark.heavy, pytest.mark.timeout(420)]

RANK, HIDDEN, LAYERS = 8, 64, 2


def make_adapter(folder: Path) -> Path:
    """Write an adapter of random weights for the tiny model's query and value projections."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
            weights[f"{place}.lora_B.weight"] = torch.randn(HIDDEN, RANK)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 64,
              "target_modules": ["q_proj", "v_proj"], "bias": "none",
              "base_model_name_or_path": "tiny"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory) -> Iterator[ServeProcess]:
    """The tiny model with an adapter."""
    folder = tmp_path_factory.mktemp("lora")
    adapter = make_adapter(folder / "adapter")
    with serving(
        folder / "log", str(tiny_model), "--pool-drain-s", "2", "--", "--enable-lora",
        "--max-lora-rank", str(RANK), "--lora-modules", f"poet={adapter}",
    ) as running:  # fmt: skip
        yield running


def say(server: ServeProcess, model: str) -> Any:
    """Return what a model says."""
    body = {"model": model, "prompt": "one two", "max_tokens": 8, "temperature": 0}
    reply = server.ask("POST", "/v1/completions", body, {"X-Autellix-Session": f"s-{model}"})
    return reply.status, reply.json


def test_an_adapters_name_passes(server: ServeProcess):
    """It is listed, answers as itself and not as its base, and an unknown name is a 404."""
    names = [row["id"] for row in server.ask("GET", "/v1/models").json["data"]]
    assert names == ["tiny", "poet"]
    status, base = say(server, "tiny")
    assert status == 200
    status, poet = say(server, "poet")
    assert status == 200
    assert poet["model"] == "poet"
    assert poet["choices"][0]["text"] != base["choices"][0]["text"]
    status, answer = say(server, "painter")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")

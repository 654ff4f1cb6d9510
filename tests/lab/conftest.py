"""What the lab's tests share: a quiet vLLM, a small engine, and runs that are made once."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def small_profile():
    """An 8B engine with little memory, so that short runs have a queue and preemptions."""
    from autellix.server.lab import cost_model

    profile = cost_model.load("a100-80g-llama-3.1-8b")
    return replace(profile, kv_tokens=24_000, slots=12, context_tokens_max=20_000)

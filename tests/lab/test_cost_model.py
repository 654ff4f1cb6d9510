"""Step times: monotone, in the right place, and a fit that finds what it was made from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from autellix.server.lab import cost_model
from autellix.server.lab.cost_model import CONSTANTS, ProfileError, Work


@pytest.mark.parametrize("name", cost_model.names())
def test_every_shipped_profile_loads_and_more_work_takes_longer(name: str):
    """No profile lets a bigger step be shorter."""
    profile = cost_model.load(name)
    small, big = Work(1, 1000, 1000, 1), Work(2048, 300_000, 2048 * 9000, 64)
    assert 0 < profile.step_s(small) < profile.step_s(big)
    assert profile.blocks * profile.block_tokens <= profile.kv_tokens


def test_8b_on_an_a100_decodes_and_prefills_at_known_speeds():
    """A lone decode is near 70 to 100 tokens/s, a full chunk near 10 k tokens/s."""
    profile = cost_model.load("a100-80g-llama-3.1-8b")
    assert 50 < 1 / profile.step_s(Work(1, 1000, 1000, 1)) < 100
    assert 8_000 < 2048 / profile.step_s(Work(2048, 2048, 2048 * 1024, 1)) < 15_000


def test_attention_grows_with_context():
    """Prefill at 116 k context costs several times prefill at none (Llama-3.1-8B)."""
    profile = cost_model.load("a100-80g-llama-3.1-8b")
    near = profile.step_s(Work(2048, 2048, 2048 * 1024, 1))
    far = profile.step_s(Work(2048, 118_000, 2048 * 117_000, 1))
    assert 3.5 < far / near < 6


def test_alone_time_is_close_to_the_sum_of_its_steps():
    """The closed form for a call on an idle engine matches adding up its steps."""
    profile = cost_model.load("a100-80g-llama-3.1-8b")
    context, new, output = 3000, 5000, 200
    total_s, done, left = 0.0, context, new
    while left:
        chunk = min(left, profile.chunk_tokens)
        total_s += profile.step_s(Work(chunk, done, chunk * (done + chunk // 2), 1))
        done, left = done + chunk, left - chunk
    for place in range(output - 1):
        total_s += profile.step_s(Work(1, done + place, done + place, 1))
    assert profile.alone_s(context, new, output) == pytest.approx(total_s, rel=1e-3)


def test_the_linear_fit_finds_the_constants_it_was_made_from():
    """Noise-free steps give their constants back."""
    truth = {"gap_s": 0.02, "flop_s_per_token": 2e-3, "kv_s_per_token": 3e-6, "per_call_s": 4e-3}
    randomness = random.Random(1)
    steps = []
    for _ in range(60):
        tokens, calls = randomness.randint(1, 500), randomness.randint(1, 8)
        work = Work(tokens, randomness.randint(10, 9000), randomness.randint(10, 10**6), calls)
        seconds = truth["gap_s"] + truth["flop_s_per_token"] * tokens
        seconds += truth["kv_s_per_token"] * work.context_tokens + truth["per_call_s"] * calls
        steps.append((work, seconds))
    fitted = cost_model.fit_linear(steps)
    for name, value in truth.items():
        assert fitted[name] == pytest.approx(value, rel=1e-6), name
    assert fitted["attention_s_per_pair"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_constant_can_be_moved(constant: str):
    """A sensitivity run changes one constant and nothing else."""
    profile = cost_model.load("a100-80g-llama-3.1-8b")
    moved = profile.scaled(constant, 1.3)
    assert getattr(moved, constant) == pytest.approx(1.3 * getattr(profile, constant))
    assert moved.scaled(constant, 1 / 1.3).step_s(Work(9, 99, 999, 2)) == pytest.approx(
        profile.step_s(Work(9, 99, 999, 2))
    )


def test_a_bad_profile_is_named(tmp_path: Path):
    """A missing value is an error with the file's name."""
    path = tmp_path / "mine.toml"
    path.write_text('form = "roofline"\n[engine]\n[host]\n')
    with pytest.raises(ProfileError, match=r"mine\.toml.*model"):
        cost_model.load(str(path))
    with pytest.raises(ProfileError, match="no profile 'nothing'"):
        cost_model.load("nothing")

"""How long an engine's step takes: a roofline of weights, KV and FLOPs, with the host's share.

A profile is a TOML file in ``profiles/``; every number there names its source. ``roofline`` is for
GPUs: the slower of memory traffic and arithmetic, attention counted by context. ``linear`` is for
a machine where both are hidden behind per-token overheads: it is fitted to measured steps.

Seconds are the model's only output; the rest of the lab never sees a byte or a FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import tomllib

FOLDER = Path(__file__).parent / "profiles"
#: The constants that a sensitivity run moves by ± 30 %, one at a time.
CONSTANTS: Final = (
    "weight_s", "kv_s_per_token", "flop_s_per_token", "attention_s_per_pair", "gap_s",
    "schedule_fixed_s", "schedule_per_call_s", "turnaround_s",
)  # fmt: skip


class ProfileError(ValueError):
    """A profile does not exist or lacks a value."""


class Work(NamedTuple):
    """What one step computes."""

    tokens: int  # new tokens in the batch, prefill and decode
    context_tokens: int  # KV tokens that its calls read
    pairs: int  # sum over calls of new tokens x mean context: what attention multiplies
    calls: int
    swap_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """An engine: its limits, and what a step costs on it. Seconds, tokens and bytes.

    Attributes:
        form: ``roofline``: the slower of memory and arithmetic; ``linear``: their sum.
        weight_s: Reading the weights once.
        kv_s_per_token: Reading one token's keys and values of all layers.
        flop_s_per_token: The weights' arithmetic for one token.
        attention_s_per_pair: The arithmetic of one token attending to one token.
        swap_s_per_byte: The host link.
        gap_s: What every step costs besides the model: launch, sampling, output.
        schedule_fixed_s: The scheduler's own time per step, measured.
        schedule_per_call_s: The same, per call in the batch.
        turnaround_s: From a call's last token until the program's next call is at the engine, apart
            from the tool: the way to the client and back. In that time the engine decides without
            it, so that a waiting call takes its blocks.
        kv_tokens: Room of the KV cache.
        chunk_tokens: Most tokens of a step (vLLM's max_num_batched_tokens).
        batches_in_flight: 2 where vLLM schedules a step while the last one runs.
    """

    name: str
    form: str
    weight_s: float
    kv_s_per_token: float
    flop_s_per_token: float
    attention_s_per_pair: float
    swap_s_per_byte: float
    gap_s: float
    schedule_fixed_s: float
    schedule_per_call_s: float
    turnaround_s: float
    kv_tokens: int
    block_tokens: int
    slots: int
    chunk_tokens: int
    context_tokens_max: int
    batches_in_flight: int
    kv_bytes_per_token: int

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache; vLLM keeps one of them as its null block."""
        return self.kv_tokens // self.block_tokens

    def step_s(self, work: Work) -> float:
        """Return the duration of one step, the scheduler's own time included.

        With two batches in flight the scheduler works while the model runs, so only the longer
        of the two counts.
        """
        memory_s = self.weight_s + work.context_tokens * self.kv_s_per_token
        arithmetic_s = work.tokens * self.flop_s_per_token + work.pairs * self.attention_s_per_pair
        if self.form == "linear":
            model_s = memory_s + arithmetic_s
        else:
            model_s = max(memory_s, arithmetic_s)
        model_s += work.swap_bytes * self.swap_s_per_byte
        host_s = self.schedule_fixed_s + work.calls * self.schedule_per_call_s
        if self.batches_in_flight > 1:
            return self.gap_s + max(model_s, host_s)
        return self.gap_s + model_s + host_s

    def alone_s(self, context_tokens: int, new_tokens: int, output_tokens: int) -> float:
        """Return how long a call takes on an idle engine, without summing over its steps.

        Args:
            context_tokens: What it finds in the cache.
            new_tokens: What it must compute of its prompt.
            output_tokens: What it generates; the first one comes with the prompt's last step.
        """
        total_s = 0.0
        done = context_tokens
        left = max(1, new_tokens)
        while left > 0:
            chunk = min(left, self.chunk_tokens)
            total_s += self.step_s(Work(chunk, done, chunk * (done + chunk // 2), 1))
            done += chunk
            left -= chunk
        steps = output_tokens - 1
        middle = done + steps // 2
        return total_s + steps * self.step_s(Work(1, middle, middle, 1))

    def work_s(self, context_tokens: int, new_tokens: int, output_tokens: int) -> float:
        """Return the call's share of a full engine: what the clairvoyant arms order by."""
        held = context_tokens + new_tokens + output_tokens
        batch = max(1.0, min(self.slots, self.kv_tokens / max(1, held)))
        middle = context_tokens + new_tokens + output_tokens // 2
        pairs_s = self.attention_s_per_pair * (context_tokens + new_tokens // 2)
        decode_s = (self.weight_s + self.gap_s) / batch + middle * self.kv_s_per_token
        return new_tokens * (self.flop_s_per_token + pairs_s) + output_tokens * decode_s

    def scaled(self, constant: str, factor: float) -> Profile:
        """Return the profile with one of ``CONSTANTS`` multiplied."""
        assert constant in CONSTANTS, constant
        return replace(self, **{constant: getattr(self, constant) * factor})


def names() -> tuple[str, ...]:
    """Return the names of the profiles that ship."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name_or_path: str) -> Profile:
    """Return a profile that ships, or one from a TOML file.

    Raises:
        ProfileError: there is none, or a value is missing or unknown.
    """
    shipped = FOLDER / f"{name_or_path}.toml"
    path = shipped if shipped.is_file() else Path(name_or_path)
    if not path.is_file():
        raise ProfileError(f"no profile {name_or_path!r}: neither a file nor one of {names()}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return _profile(path.stem, table)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ProfileError(f"{path.name}: {error!r}") from error


def _profile(name: str, table: dict[str, Any]) -> Profile:
    engine, host = table["engine"], table["host"]
    if table["form"] == "roofline":
        model, device = table["model"], table["device"]
        bytes_per_s = device["count"] * device["memory_bytes_per_s"] * device["memory_share"]
        flops_per_s = device["count"] * device["flops_per_s"] * device["flops_share"]
        costs = {
            "weight_s": model["weight_bytes"] / bytes_per_s,
            "kv_s_per_token": model["kv_bytes_per_token"] / bytes_per_s,
            "flop_s_per_token": 2 * model["parameters"] / flops_per_s,
            "attention_s_per_pair": 4 * model["layers"] * model["heads_width"] / flops_per_s,
            "swap_s_per_byte": 1 / (device["count"] * device["host_link_bytes_per_s"]),
        }
    else:
        costs = dict(table["linear"])
    values: dict[str, Any] = {k: float(v) for k, v in (costs | host).items()}
    values |= {k: int(v) for k, v in engine.items()}
    kv_bytes = int(table["model"]["kv_bytes_per_token"])
    return Profile(name=name, form=str(table["form"]), kv_bytes_per_token=kv_bytes, **values)


def fit_linear(steps: Sequence[tuple[Work, float]]) -> dict[str, float]:
    """Return the linear form's constants that fit measured steps best, none below zero.

    Least squares on relative errors, so that short steps count as much as long ones. A constant
    that would be negative is put to zero and the rest is fitted again.

    Args:
        steps: What steps computed, and the seconds they took; at least four different ones.
    """
    import numpy as np

    columns = ("gap_s", "flop_s_per_token", "kv_s_per_token", "attention_s_per_pair", "per_call_s")
    rows = np.array([[1, w.tokens, w.context_tokens, w.pairs, w.calls] for w, _ in steps], float)
    seconds = np.array([s for _, s in steps])
    free = list(range(len(columns)))
    while True:
        weighted = rows[:, free] / seconds[:, None]
        found, *_ = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)
        if (found >= 0).all() or len(free) == 1:
            break
        free.pop(int(found.argmin()))
    fitted = dict.fromkeys(columns, 0.0)
    fitted.update(
        {columns[place]: float(max(0.0, v)) for place, v in zip(free, found, strict=True)}
    )
    return fitted

"""How many tokens a prompt has, before an engine has counted them."""

from __future__ import annotations

from typing import Final

MODELS_MAX: Final = 64
BYTES_PER_TOKEN: Final = 4.0  # until an engine has said better
_KEEP: Final = 0.98  # of what was learned, per call


class PromptLength:
    """Tokens from a request's bytes, by a ratio learned for each model.

    The ratio is of sums, so long prompts count for what they are; both sums fade.
    """

    def __init__(self) -> None:
        self._sums: dict[str | None, tuple[float, float]] = {}  # model → (bytes, tokens)

    def estimate(self, model: str | None, size_bytes: int) -> int:
        """Return about how many tokens a request of so many bytes has."""
        return round(size_bytes / self.ratio(model))

    def ratio(self, model: str | None) -> float:
        """Return the bytes per token of a model's requests."""
        total_bytes, tokens = self._sums.get(model, (BYTES_PER_TOKEN, 1.0))
        return total_bytes / tokens

    def learn(self, model: str | None, size_bytes: int, tokens: int) -> None:
        """Take in what an engine counted."""
        if tokens <= 0 or size_bytes <= 0:
            return
        before = self._sums.get(model)
        if before is None:
            if len(self._sums) >= MODELS_MAX:
                return
            before = (BYTES_PER_TOKEN, 1.0)
        self._sums[model] = (before[0] * _KEEP + size_bytes, before[1] * _KEEP + tokens)

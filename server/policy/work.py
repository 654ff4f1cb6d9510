"""Whose work a step was: its seconds, shared out by what each call took of the engine.

A step is bound by arithmetic when it is full of prompt tokens, and by memory traffic, which grows
with the context that is read, when it only decodes. So the seconds are shared by tokens as far as
the step's token budget is used, and by context otherwise. All shares add up to the step: a
program's *work* is what it would take of an engine that it had for itself, batch and all, while its
*service* is how long it was in a batch, however large.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def rates(
    tokens: int, context: int, calls: int, seconds: float, budget_tokens: int
) -> tuple[float, float]:
    """Return the seconds that one token and one token of context cost in a step.

    Args:
        tokens: Computed in the step.
        context: Tokens whose keys and values were read.
        calls: In the batch.
        seconds: That it took.
        budget_tokens: The most tokens of a step.

    >>> rates(2048, 2048, 1, 1.0, 2048)
    (0.00048828125, 0.0)
    """
    if not tokens:
        return 0.0, 0.0
    full = min(1.0, max(0, tokens - calls) / max(1, budget_tokens - calls))
    if full > 0.99 or not context:
        return seconds / tokens, 0.0
    return seconds * full / tokens, seconds * (1 - full) / context


def shares(parts: Sequence[tuple[int, int]], seconds: float, budget_tokens: int) -> list[float]:
    """Return each call's share of a step, given its (tokens, context)."""
    tokens = sum(part[0] for part in parts)
    context = sum(part[1] for part in parts)
    token_s, context_s = rates(tokens, context, len(parts), seconds, budget_tokens)
    return [own * token_s + held * context_s for own, held in parts]

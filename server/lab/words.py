"""Prompts for servers that take no token ids: words, and about as many tokens as a trace says.

Each token id stands for a word that is one token in common vocabularies. Where a server counts
otherwise, words are left out or said twice at fixed places, so that two prompts that begin with the
same ids begin with the same words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

_WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)
_TABLE_WORDS: Final = 1 << 17  # ids beyond it begin again


class Scale(NamedTuple):
    """How a server counts a message of words.

    Attributes:
        tokens_per_word: Above 0.
        frame_tokens: What stands around the words: the chat template.
    """

    tokens_per_word: float = 1.0
    frame_tokens: float = 0.0

    def words(self, tokens: int) -> int:
        """Return how many words have about so many tokens with their frame.

        >>> Scale(2.0, 10.0).words(30)
        10
        """
        return int(max(0.0, tokens - self.frame_tokens) / self.tokens_per_word + 0.5)


def scale_of(short: tuple[int, int], long: tuple[int, int]) -> Scale:
    """Return the scale that two prompts show, each as words sent and tokens counted.

    A server whose count does not grow with the words has shown nothing: then a word is a token.

    >>> scale_of((10, 30), (110, 230))
    Scale(tokens_per_word=2.0, frame_tokens=10.0)
    """
    per_word = (long[1] - short[1]) / (long[0] - short[0])
    return Scale(per_word, max(0.0, short[1] - per_word * short[0])) if per_word > 0 else Scale()


def text(ids: Sequence[int], scale: Scale) -> str:
    """Return words of about as many tokens as there are ids; at least one."""
    table = _table()
    said: list[str] = []
    for place, token in enumerate(ids):
        said += [table[token % _TABLE_WORDS]] * (scale.words(place + 1) - len(said))
    return " ".join(said or [table[0]])


@cache
def _table() -> list[str]:
    """Return a word for each id, in no order: segments that count up alike still differ."""
    return random.Random("words").choices(_WORDS.split(), k=_TABLE_WORDS)

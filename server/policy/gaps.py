"""How long to keep the KV of a program that waits for a tool or a human.

Keeping it saves its prefill when the program returns, which takes the engine C seconds; it costs
the room that others could use. A program that holds the share f of the KV cache for t seconds takes
f · t engine-seconds of room away. C is f times the time T that it takes to compute a whole cache
full anew, so f drops out: keep it as long as the chance to return, per second, is above 1 ÷ T,
looking ahead as far as pays best. That is the index of ``hazard.py`` again, of gaps this time.

Gaps are learned by the name of the tool if the client tells it, else by the kind of program.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .hazard import BOUNDS_S, Hazard, bucket_of

KEYS_MAX: Final = 256
KNOWN: Final = 8  # gaps seen before a key is believed; until then all gaps together answer
SHORT_S: Final = 2.0  # kept in any case: the next call of a program without tools is under way


class Gaps:
    """What is known of gaps."""

    def __init__(self) -> None:
        self._all = Hazard()
        self._by_key: OrderedDict[str, Hazard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def returned(self, key: str | None, gap_s: float) -> None:
        """A program has come back after so long."""
        self._learn(key, gap_s, ended=True)

    def given_up(self, key: str | None, gap_s: float) -> None:
        """A program has not come back for so long, and nobody looks any longer."""
        self._learn(key, gap_s, ended=False)

    def keep_s(self, key: str | None, whole_cache_s: float) -> float:
        """Return how long to keep the KV of a program whose gap begins now.

        Args:
            key: What it waits for.
            whole_cache_s: T, the time to compute (or load) a whole cache full anew.
        """
        hazard = self._of(key)
        keep_s = 0.0
        for bound_s in BOUNDS_S:
            if bound_s > SHORT_S and hazard.left_s(keep_s) > whole_cache_s:
                break
            keep_s = bound_s
        return max(SHORT_S, keep_s)

    def _of(self, key: str | None) -> Hazard:
        known = self._by_key.get(key) if key is not None else None
        return known if known is not None and known.endings >= KNOWN else self._all

    def _learn(self, key: str | None, gap_s: float, *, ended: bool) -> None:
        bucket = bucket_of(gap_s)
        hazards = [self._all]
        if key is not None:
            hazard = self._by_key.pop(key, None) or Hazard()
            self._by_key[key] = hazard  # the latest used at the end
            if len(self._by_key) > KEYS_MAX:
                self._by_key.popitem(last=False)
            hazards.append(hazard)
        for hazard in hazards:
            hazard.passed(0, bucket)
            if ended:
                hazard.ended(bucket)

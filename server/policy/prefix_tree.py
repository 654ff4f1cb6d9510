"""The engine that has seen the longest beginning of a prompt, if that is worth its load.

The rule that Preble is known for, as an arm to compare with: a prompt whose known beginning is the
larger part goes where it is known (exploit), another one to the least loaded engine (explore), and
so does the first when the engine that knows it has far more calls than the least loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from .placement import CallFacts, EngineView, Plain, least_loaded

NODES_MAX: Final = 262_144


class PrefixTree(Plain):
    """See the module.

    The tree is a map from the hash of a beginning to the engines that have seen it: a hash is
    chained, so it stands for the whole path from the root. The node used longest ago goes first.

    Args:
        exploit_share: A known beginning counts if it is more than this share of the prompt.
        excess: An engine is overloaded with more than so many times the calls of the least loaded
        slack_calls: … and so many calls besides.
        nodes_max: Bound of the tree.
    """

    wants_prefix = True

    def __init__(
        self,
        *,
        exploit_share: float = 0.5,
        excess: float = 1.5,
        slack_calls: int = 16,
        nodes_max: int = NODES_MAX,
    ) -> None:
        self._share = exploit_share
        self._excess = excess
        self._slack = slack_calls
        self._nodes_max = nodes_max
        self._nodes: OrderedDict[int, set[str]] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        """Return how many nodes the tree has."""
        return len(self._nodes)

    def choose(self, call: CallFacts, engines: Sequence[EngineView], now_s: float) -> str:  # noqa: ARG002
        """Return the engine that knows the most of the prompt, or the least loaded one."""
        self._turn += 1
        idle = least_loaded(engines, self._turn)
        chosen = idle
        depth, knowing = self._longest(call.prefix, engines)
        if depth and depth > self._share * len(call.prefix):
            best = least_loaded(knowing, self._turn)
            if best.calls <= self._excess * idle.calls + self._slack:
                chosen = best
        self._grow(call.prefix, chosen.engine_id)
        return chosen.engine_id

    def forget_engine(self, engine_id: str) -> None:
        """Take the engine off every node."""
        for engine_ids in self._nodes.values():
            engine_ids.discard(engine_id)

    def _longest(
        self, prefix: Sequence[int], engines: Sequence[EngineView]
    ) -> tuple[int, list[EngineView]]:
        """Return how many chunks are known somewhere, and the engines that know them."""
        depth, knowing = 0, list(engines)
        for chunk in prefix:
            engine_ids = self._nodes.get(chunk, ())
            still = [engine for engine in knowing if engine.engine_id in engine_ids]
            if not still:
                break
            depth, knowing = depth + 1, still
        return depth, knowing

    def _grow(self, prefix: Sequence[int], engine_id: str) -> None:
        for chunk in reversed(prefix):  # the root is used last, so it stays longest
            self._nodes.setdefault(chunk, set()).add(engine_id)
            self._nodes.move_to_end(chunk)
        while len(self._nodes) > self._nodes_max:
            self._nodes.popitem(last=False)

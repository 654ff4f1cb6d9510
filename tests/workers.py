"""Which worker runs which tests, when there are several (``pytest --numprocesses``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent
LIVE = "live"


class LiveTogether(LoadFileScheduling):  # type: ignore[misc]
    """One worker for all files with tests of real engines: two engines are too much at once."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        root = TESTS.parent
        self._live = {
            path.relative_to(root).as_posix()
            for path in TESTS.rglob("test_*.py")
            if "mark.live" in path.read_text()
        }

    def _split_scope(self, nodeid: str) -> str:
        """Return what has to stay together with this test."""
        file = nodeid.partition("::")[0]
        return LIVE if file in self._live else file

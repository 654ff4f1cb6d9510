"""Which programs have changed: remembered once for the journal, and again for whoever watches.

Pure.
"""

from __future__ import annotations


class Changes(dict[str, None]):
    """The ids of changed programs, oldest first; taken and cleared by the journal.

    Attributes:
        watcher: A second such list, of somebody with another rhythm; None: nobody watches.
    """

    watcher: dict[str, None] | None = None

    def __setitem__(self, program_id: str, value: None) -> None:
        """Note that a program has changed."""
        super().__setitem__(program_id, value)
        if self.watcher is not None:
            self.watcher[program_id] = value

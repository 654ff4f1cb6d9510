"""An engine core ends when the API server that started it does, however that ends.

vLLM leaves the engine core and the worker alive, with all their memory, when the API server is
killed.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal

logger = logging.getLogger("vllm.autellix.lifetime")

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> int | None:
    """Have the kernel kill this process when its parent ends.

    Only in a process that ``multiprocessing`` started, which vLLM's engine core is: whoever runs
    the scheduler in his own process keeps that process.

    Returns:
        The parent to watch as well, since the kernel goes by the parent's thread; None: not ours.
    """
    if multiprocessing.parent_process() is None:
        return None
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        logger.warning("autellix: prctl(PR_SET_PDEATHSIG) failed; the parent is only watched")
    if os.getppid() != parent:  # it went away just now
        os.kill(os.getpid(), signal.SIGKILL)
    return parent

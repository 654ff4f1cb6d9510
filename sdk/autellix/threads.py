"""The thread patch: work handed to a thread runs in the context of who handed it over.

asyncio copies the context into tasks and ``to_thread``, but ``ThreadPoolExecutor.submit``,
``loop.run_in_executor`` and ``threading.Thread`` lose it. A pool's job *always* gets a copy of the
submitter's context, also without a session: its worker may have been born inside somebody's session
and would otherwise keep it for ever. For the same reason a pool's workers themselves get none.
"""

from __future__ import annotations

import sys
import threading
import weakref
from contextvars import Context, copy_context
from functools import wraps
from typing import Any, Final

from .branches import Job, current_owner, running

#: Threads that live for many jobs of many owners: pinned to none of them.
_WORKER_MODULES: Final = ("multiprocessing.dummy", "anyio._backends._asyncio")

_plain_start = threading.Thread.start


def start_plain(thread: threading.Thread) -> None:
    """Start ``thread`` outside every session."""
    Context().run(_plain_start, thread)


def _run_job(context: Context, starter: Any, fn: Any, args: Any, kwargs: Any) -> Any:
    job, before = Job(), (running.job, running.starter)
    running.job, running.starter = job, starter
    try:
        return context.run(fn, *args, **kwargs)
    finally:
        running.job, running.starter = before
        job.finish()


def _owner_here() -> weakref.ref[object] | None:
    try:
        owner, stand_in = current_owner()
        return weakref.ref(stand_in or owner)
    except Exception:  # noqa: BLE001 - a task of some other kind: its threads start all the same
        return None


def wrap_submit(original: Any) -> Any:
    """Return ``ThreadPoolExecutor.submit`` such that the job runs in the caller's context."""

    @wraps(original)
    def submit(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        interpreters = sys.modules.get("concurrent.futures.interpreter")
        if interpreters is not None and isinstance(self, interpreters.InterpreterPoolExecutor):
            return original(self, fn, *args, **kwargs)  # another interpreter has no such context
        outer, running.in_submit = running.in_submit, True
        try:
            return original(self, _run_job, copy_context(), _owner_here(), fn, args, kwargs)
        finally:
            running.in_submit = outer

    return submit


def wrap_start(original: Any) -> Any:
    """Return ``Thread.start`` such that ``run`` runs in the caller's context."""

    @wraps(original)
    def start(self: threading.Thread) -> None:
        if running.in_submit or type(self).__module__ in _WORKER_MODULES or "run" in vars(self):
            original(self)
            return
        context, starter, run = copy_context(), _owner_here(), self.run

        def run_in_context() -> None:
            del vars(self)["run"]
            running.starter = starter
            context.run(run)

        vars(self)["run"] = run_in_context
        try:
            original(self)
        except BaseException:
            vars(self).pop("run", None)
            raise

    return start

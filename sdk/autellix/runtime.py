"""What the hooks share: the settings in force, the live sessions, the counters, and the tags.

The path of a call runs through ``tag``. It does no I/O, and its callers catch whatever it raises.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from . import wire
from .config import Config, Origin, Origins, from_environment
from .context import Scope, scope_var
from .dialects import DYNAMO, note_request
from .sessions import Counters, Session, new_id
from .tags import tags_of

HANDLES_MAX: Final = 1024
ENDED_MAX: Final = 1024


class Status(NamedTuple):
    """What the SDK has done in this process so far; a snapshot."""

    enabled: bool
    tagged: int
    untagged: int  # calls to an allowed origin for which no session was found
    late: int  # calls of a session that had ended
    foreign: int  # calls to an origin that gets no tags
    errors: int  # our own failures; the calls went out untagged
    by_hook: dict[str, int]
    hooks: dict[str, str]  # what each hook is attached to, or why it is not
    sessions: int  # open in this process
    server: dict[str, str]  # origin → unknown, ok, plain, denied or unreachable
    dropped: int  # lifecycle messages that were given up


class Found(NamedTuple):
    """The session of the running code, and which rung of the ladder found it."""

    session: Session
    scope: Scope | None
    source: str


class Runtime:
    """One life of the SDK in one process, from arming to ``uninstall``."""

    def __init__(self, config: Config) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.hooks: dict[str, str] = {}
        self.live: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        self.handles: dict[str, Session] = {}  # of start_session, until they end
        self._ended: dict[str, Counters] = {}  # of sessions whose id the user gave
        self.process: Session | None = None
        self.saw_explicit = False
        self.configure(config)
        self.last_untagged: Callable[[], Any] = _nothing
        self._lock = threading.Lock()
        self._lifecycle: Any = None
        self._warned: set[str] = set()

    # -- settings ---------------------------------------------------------------------------------

    def configure(self, config: Config) -> None:
        """Put other settings in force."""
        self.config = config
        self.origins = Origins(config)
        self.is_off = not config.enabled
        self.is_dynamo = config.dialect == DYNAMO
        mark = wire.DYNAMO_SESSION if self.is_dynamo else wire.SESSION
        self.mark = mark.lower().encode()  # the header that a tagged request has

    @property
    def lifecycle(self) -> Any:
        """The background sender; made when first needed, since it loads the HTTP client."""
        with self._lock:
            if self._lifecycle is None:
                from .lifecycle import Lifecycle

                self._lifecycle = Lifecycle(self)
            return self._lifecycle

    @property
    def lifecycle_if_any(self) -> Any:
        """The background sender, or None if nothing was ever sent."""
        return self._lifecycle

    def after_fork(self) -> None:
        """Forget, in a forked child, the threads and locks that only the parent has."""
        self._lock = threading.Lock()
        if self._lifecycle is not None:
            self._lifecycle.disown()
        self._lifecycle = None
        self.counts = defaultdict(int)
        self._ended = dict.fromkeys(self._ended, Counters(0, 0, is_open=True))  # the parent's
        for session in list(self.live.values()):
            session._lock = threading.Lock()

    # -- sessions ---------------------------------------------------------------------------------

    def new_session(self, name: str | None = None, **options: Any) -> Session:
        """Return a new explicit session of this process; nothing is sent yet."""
        id = options.pop("id", None)
        id = None if id is None else str(id)
        if id is not None and not wire.is_valid_id(id):
            id = self._safe_id(id)
        live = self.live.get(id) if id is not None else None
        earlier = self._ended.get(id) if id is not None and live is None else None
        if live is not None:
            earlier = live.counters
        session = Session(self, name, id=id, earlier=earlier, **options)
        self.live[session.id] = session
        if not session.is_implicit:
            self.saw_explicit = True
        return session

    def note_open(self, session: Session, origin: Origin) -> None:
        """A session made its first call to a server."""
        if self.config.lifecycle and not self.is_dynamo:
            self.lifecycle.open(session, origin)

    def note_end(self, session: Session, reason: str) -> None:
        """A session ended."""
        if session.is_named_by_user:  # its id may come again
            self._ended.pop(session.id, None)
            self._ended[session.id] = session.counters
            if len(self._ended) > ENDED_MAX:
                self._ended.pop(next(iter(self._ended), ""), None)
        if self.live.get(session.id) is session:
            self.live.pop(session.id, None)
        if self.handles.get(session.id) is session:
            self.handles.pop(session.id, None)
        if self.process is session:
            self.process = None
        if self.config.lifecycle and session.peers:
            self.lifecycle.end(session, reason)

    def find(self) -> Found | None:
        """Return the session of the running code, by the fallback ladder, or None."""
        scope = scope_var.get()
        if scope is not None:
            session = scope.session
            if session._runtime is self and not _is_over(session):
                return Found(session, scope, self.source_of(session))
        if self.config.scope == "explicit":
            return None
        if self.handles:
            handle = self._only_handle()
            if handle is not None:
                return Found(handle, None, "process")
        process = self._process_session()
        if process is not None:
            return Found(process, None, "process")
        if len(self.live) == 1:
            only = next(iter(self.live.values()), None)
            if only is not None and only.is_own and only.state == "open":
                return Found(only, None, "single")
        return None

    def peek(self) -> Session | None:
        """Return the session of the running code, but open none."""
        scope = scope_var.get()
        if scope is not None and scope.session.runtime is self and not _is_over(scope.session):
            return scope.session
        if self.config.scope == "explicit":
            return None
        return self._only_handle() or self.process

    def _only_handle(self) -> Session | None:
        """Return the one session of ``start_session``; other threads may end it meanwhile."""
        handles = list(self.handles.values())
        return handles[0] if len(handles) == 1 else None

    def add_handle(self, session: Session) -> None:
        """Remember a session of ``start_session`` until it ends."""
        if len(self.handles) < HANDLES_MAX:
            self.handles[session.id] = session

    def source_of(self, session: Session) -> str:
        """Return how a call of ``session`` is marked."""
        if session._state == "ended":
            return "late"
        return "process" if session.is_implicit else "ctx"

    def _process_session(self) -> Session | None:
        carrier = os.environ.get("AUTELLIX_SESSION")
        wanted = self.config.scope == "process" or carrier or not self.saw_explicit
        if not wanted:
            return None
        with self._lock:
            if self.process is not None:
                return self.process
        from .carrier import adopt

        process = adopt(self, carrier) if carrier else None
        if process is None:
            if carrier and self.saw_explicit and self.config.scope != "process":
                return None
            name = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else None  # noqa: PTH119 - pathlib is not loaded
            process = self.new_session(name, is_implicit=True, anchor=threading.main_thread())
        with self._lock:
            chosen = self.process = self.process or process
        if chosen is not process:  # another thread was quicker
            self.live.pop(process.id, None)
        return chosen

    def _safe_id(self, id: str) -> str:
        import hashlib

        self.warn("id", f"session id {id[:40]!r} has characters that no header may carry; hashed")
        return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:32]

    # -- the path of a call -----------------------------------------------------------------------

    def tag(
        self,
        origin: Origin,
        call_id: str | None,
        hook: str,
        headers: Mapping[str, str] | None,
        *,
        is_retry: bool = False,
        request: Any = None,
    ) -> list[wire.Tag] | None:
        """Return the headers of one call to an allowed origin, or None if it stays untagged.

        Args:
            origin: Where the call goes.
            call_id: Equal for all attempts of a call, if the client has such a thing.
            hook: Who asks; only counted.
            headers: The call's own; the lifecycle messages use its authorization again.
            is_retry: Whether it is a later attempt; see ``tags_of``.
            request: The HTTP client's request; only Dynamo's dialect looks at it.
        """
        scope = scope_var.get()
        if (
            scope is not None
            and scope.session._runtime is self
            and scope.session._state == "open"
            and not scope.session.is_implicit
        ):
            session, source = scope.session, "ctx"  # the short way through `find`
        else:
            found = self.find()
            if found is None:
                self.count("untagged")
                self.warn("untagged", "a call was made outside every session; it goes out untagged")
                return None
            session, scope, source = found
        if call_id is None or not wire.is_valid_id(call_id):
            call_id = new_id()
        tags = tags_of(session, scope, call_id, source, is_retry=is_retry)
        if origin not in session._peers:
            session.touch(origin, headers.get("authorization") if headers is not None else None)
        if self.is_dynamo and request is not None:
            note_request(session, request)
        self.counts["tagged"] += 1
        self.counts[hook] += 1
        if source == "late":
            self.count("late")
        return tags

    # -- counting and complaining -----------------------------------------------------------------

    def count(self, what: str) -> None:
        """Count an event; approximate when threads collide, which a statistic may be."""
        self.counts[what] += 1

    def warn(self, cause: str, text: str, level: str = "warning") -> None:
        """Log ``text`` once per cause."""
        if cause in self._warned or len(self._warned) > 64:
            return
        self._warned.add(cause)
        import logging

        logger = logging.getLogger("autellix")
        if not logger.handlers:
            wanted = os.environ.get("AUTELLIX_LOG", "").upper()
            if wanted in ("DEBUG", "INFO", "WARNING", "ERROR"):
                logger.addHandler(logging.StreamHandler())
                logger.setLevel(wanted)
            else:
                logger.addHandler(logging.NullHandler())
        getattr(logger, level)(text)

    def note_error(self, where: str, error: Exception) -> None:
        """A hook failed; the call went out as the user made it."""
        self.count("errors")
        self.warn(f"error:{where}", f"{where} failed, calls go out untagged: {error!r}")

    def status(self) -> Status:
        """Return a snapshot of the counters."""
        counts = self.counts
        sender = self._lifecycle
        return Status(
            enabled=not self.is_off,
            tagged=counts.get("tagged", 0),
            untagged=counts.get("untagged", 0),
            late=counts.get("late", 0),
            foreign=counts.get("foreign", 0),
            errors=counts.get("errors", 0),
            by_hook={h: counts.get(h, 0) for h in ("openai", "httpx", "event")},
            hooks=dict(self.hooks),
            sessions=sum(1 for ref in self.live.valuerefs() if _is_open(ref())),
            server=sender.peer_states() if sender is not None else {},
            dropped=sender.dropped if sender is not None else 0,
        )


def _nothing() -> None:
    return None


def _is_open(session: Session | None) -> bool:
    return session is not None and session.state == "open"


def _is_over(session: Session) -> bool:
    """Return whether this is a process session that was shut down: nobody is late for it."""
    return session.is_implicit and session._state == "ended"


_runtime: Runtime | None = None


def get_runtime() -> Runtime:
    """Return the runtime in force; makes one from the environment if there is none."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime(from_environment())
    return _runtime


def set_runtime(runtime: Runtime | None) -> None:
    """Put another runtime in force."""
    global _runtime
    _runtime = runtime

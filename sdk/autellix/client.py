"""``init`` and its opposites: put settings in force, flush, shut down, take everything away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import arming
from .config import HOOKS, Config, check, from_environment
from .runtime import Runtime, Status, get_runtime, set_runtime
from .sessions import Session


class Client:
    """What ``init`` returns: the SDK of this process. There is only one."""

    @property
    def config(self) -> Config:
        """The settings in force."""
        return get_runtime().config

    def status(self) -> Status:
        """Return what the SDK has done so far."""
        return status()

    def flush(self, timeout: float = 2.0) -> bool:
        """Return whether every session message was sent within ``timeout`` seconds."""
        return flush(timeout)

    def shutdown(self) -> None:
        """End the sessions of this process and its background thread."""
        shutdown()


_client = Client()


def init(
    base_url: str | None = None,
    *,
    api_key: str | None = None,
    enabled: bool | None = None,
    scope: str | None = None,
    origins: Iterable[str] | str | None = None,
    threads: bool | None = None,
    patch: Iterable[str] | None = None,
    lifecycle: bool | None = None,
    timeout: float | None = None,
    dialect: str | None = None,
    role: str | None = None,
    weight: float | None = None,
    deadline_s: float | None = None,
) -> Client:
    """Put settings in force; importing ``autellix`` alone uses the environment. Idempotent.

    Args:
        base_url: The server, such as ``http://host:8000``. Then only it gets tags; without it,
            every local server does. Your client's own base URL is yours to set.
        api_key: For session messages; by default they use that of your calls.
        enabled: False turns all off. ``AUTELLIX_ENABLED=0`` wins over True.
        scope: ``auto``: a script without a session gets one at its first call; ``process``: always
            one for the whole process; ``explicit``: only blocks count.
        origins: More servers that get tags; ``*`` for all.
        threads: Whether threads and pools inherit the session of who starts them.
        patch: Which hooks to put in place, of ``openai`` and ``httpx``.
        lifecycle: Whether start, heartbeat and end are sent.
        timeout: Seconds for each of these messages.
        dialect: ``autellix``; or ``dynamo``: NVIDIA Dynamo's headers are sent instead of ours.
        role: What the sessions of this process are for unless they say it themselves.
        weight: How much each of them counts beside other programs, unless it says so itself.
        deadline_s: Seconds from the opening of each of them by which it should be over, likewise.

    Raises:
        ConfigError: A setting cannot be meant.
    """
    runtime = get_runtime()
    changes: dict[str, Any] = {
        "base_url": base_url, "api_key": api_key, "enabled": enabled, "scope": scope,
        "origins": None if origins is None else _texts(origins),
        "threads": threads, "lifecycle": lifecycle, "timeout_s": timeout, "dialect": dialect,
        "patch": None if patch is None else _texts(patch),
        "role": role, "weight": weight, "deadline_s": deadline_s,
    }  # fmt: skip
    config = runtime.config._replace(**{k: v for k, v in changes.items() if v is not None})
    if not from_environment().enabled:
        config = config._replace(enabled=False)
    config = check(config)
    narrower = not config.threads or set(config.patch) != set(HOOKS)
    if narrower or not config.enabled:
        arming.disarm()
    runtime.configure(config)
    if config.enabled:
        arming.arm()
    return _client


def _texts(value: Iterable[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def status() -> Status:
    """Return what the SDK has done in this process so far."""
    return get_runtime().status()


def flush(timeout: float = 2.0) -> bool:
    """Return whether every session message was sent within ``timeout`` seconds."""
    sender = get_runtime().lifecycle_if_any
    return True if sender is None else bool(sender.flush(timeout))


def shutdown(timeout: float = 2.0) -> None:
    """End the sessions that this process opened, send what waits, end the background thread."""
    runtime = get_runtime()
    sessions: list[Session] = list(runtime.live.values())
    for session in sessions:
        session.end()
    sender = runtime.lifecycle_if_any
    if sender is not None:
        sender.stop(timeout)


def uninstall() -> None:
    """Take every hook away and forget everything; ``init`` puts it in place again."""
    shutdown(0.5)
    arming.disarm()
    get_runtime().is_off = True
    set_runtime(Runtime(from_environment()._replace(enabled=False)))

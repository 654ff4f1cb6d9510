"""The settings: from arguments, else the environment, else by default; and which origins count.

Tags name a program, so they go only where the user wants them: to configured origins, or, when
nothing is configured, to hosts that cannot be a public provider (loopback, private networks, and
single-label names such as a service in a cluster).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from . import wire
from .errors import ConfigError

DIALECTS: Final = ("autellix", "dynamo")
SCOPES: Final = ("auto", "process", "explicit")
HOOKS: Final = ("openai", "httpx")
TIMEOUT_S: Final = 2.0
ORIGINS_MAX: Final = 256
_PORTS: Final = {"http": 80, "https": 443}
_FALSE: Final = ("0", "false", "no", "off")


class Origin(NamedTuple):
    """Where a request goes; the lower-case scheme and host, and the port that is really used."""

    scheme: str
    host: str
    port: int


class Config(NamedTuple):
    """The settings in force; immutable, replaced as a whole."""

    base_url: str | None = None
    api_key: str | None = None
    enabled: bool = True
    scope: str = "auto"
    origins: tuple[str, ...] = ()
    threads: bool = True
    patch: tuple[str, ...] = HOOKS
    lifecycle: bool = True
    timeout_s: float = TIMEOUT_S
    dialect: str = "autellix"
    role: str | None = None
    weight: float | None = None
    deadline_s: float | None = None


def from_environment(environ: Mapping[str, str] | None = None) -> Config:
    """Return the settings that the environment asks for; a bad value counts as absent.

    ``import autellix`` reads this, so nothing here may raise.
    """
    env = os.environ if environ is None else environ
    scope = env.get("AUTELLIX_SCOPE", "auto").lower()
    dialect = env.get("AUTELLIX_DIALECT", "autellix").lower()
    role = env.get("AUTELLIX_ROLE", "").lower()
    return Config(
        base_url=env.get("AUTELLIX_BASE_URL") or None,
        api_key=env.get("AUTELLIX_API_KEY", "").strip() or None,
        enabled=env.get("AUTELLIX_ENABLED", "1").strip().lower() not in _FALSE,
        scope=scope if scope in SCOPES else "auto",
        origins=tuple(o.strip() for o in env.get("AUTELLIX_ORIGINS", "").split(",") if o.strip()),
        dialect=dialect if dialect in DIALECTS else "autellix",
        role=role if role in wire.ROLES else None,
        weight=_number_in(env, "AUTELLIX_WEIGHT", "weight"),
        deadline_s=_number_in(env, "AUTELLIX_DEADLINE_S", "deadline_s"),
    )


def wrong_number(field: str, value: object) -> str | None:
    """Return what is wrong with a ``weight`` or ``deadline_s``, with what is allowed; or None.

    >>> wrong_number("weight", 2), wrong_number("deadline_s", 0.5)
    (None, None)
    >>> wrong_number("weight", float("nan"))
    'weight=nan: allowed is a number from 0.01 to 100'
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field == "weight":
        good = is_number and wire.WEIGHT_MIN <= value <= wire.WEIGHT_MAX  # type: ignore[operator]
        allowed = f"a number from {wire.WEIGHT_MIN:g} to {wire.WEIGHT_MAX:g}"
    else:
        good = is_number and 0 < value <= wire.DEADLINE_S_MAX  # type: ignore[operator]
        allowed = f"a number of seconds above 0, up to {wire.DEADLINE_S_MAX:.0f}"
    return None if good else f"{field}={value!r}: allowed is {allowed}"


def _number_in(env: Mapping[str, str], name: str, field: str) -> float | None:
    try:
        value = float(env.get(name, ""))
    except ValueError:
        return None
    return None if wrong_number(field, value) else value


def check(config: Config) -> Config:
    """Return ``config``, its API key without the newline that a key file ends with.

    Raises:
        ConfigError: A field cannot be meant; it is named with what is allowed.
    """
    if config.scope not in SCOPES:
        raise ConfigError(f"scope={config.scope!r}: allowed are {', '.join(SCOPES)}")
    if config.dialect not in DIALECTS:
        raise ConfigError(f"dialect={config.dialect!r}: allowed are {', '.join(DIALECTS)}")
    if config.role is not None and config.role not in wire.ROLES:
        raise ConfigError(f"role={config.role!r}: allowed are {', '.join(wire.ROLES)}")
    for field, value in (("weight", config.weight), ("deadline_s", config.deadline_s)):
        if value is not None and (wrong := wrong_number(field, value)):
            raise ConfigError(wrong)
    for hook in config.patch:
        if hook not in HOOKS:
            raise ConfigError(f"patch={hook!r}: allowed are {', '.join(HOOKS)}")
    if not config.timeout_s > 0:
        raise ConfigError(f"timeout={config.timeout_s!r}: a number of seconds above 0")
    for url in (config.base_url, *config.origins):
        if url is not None and url != "*" and origin_of(url) is None:
            raise ConfigError(f"{url!r} is no URL such as http://host:8000")
    return config._replace(api_key=(config.api_key or "").strip() or None)


def origin_of(url: str) -> Origin | None:
    """Return the origin of ``url``, or None if it has no scheme and host we know.

    >>> origin_of("http://Host:8000/v1/models")
    Origin(scheme='http', host='host', port=8000)
    """
    scheme, found, rest = url.partition("://")
    scheme = scheme.lower()
    if not found or scheme not in _PORTS:
        return None
    netloc = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
    host, port = netloc, ""
    if netloc.startswith("["):
        host, _, port = netloc[1:].partition("]")
        port = port.lstrip(":")
    elif ":" in netloc:
        host, _, port = netloc.rpartition(":")
    if not host or (port and not (port.isascii() and port.isdigit())):
        return None
    return Origin(scheme, host.lower(), int(port) if port else _PORTS[scheme])


def default_port(scheme: str) -> int:
    """Return the port of a URL that names none."""
    return _PORTS.get(scheme, 0)


def base_url_of(config: Config) -> str | None:
    """Return where the user's server is: our own setting, else the OpenAI client's."""
    return config.base_url or os.environ.get("OPENAI_BASE_URL") or None


class Origins:
    """Decides which origins get tags; a decision is made once per origin."""

    def __init__(self, config: Config) -> None:
        wanted: Iterable[str] = config.origins
        self._all = "*" in config.origins
        named = [origin_of(o) for o in wanted if o != "*"]
        if config.base_url is not None:
            named.append(origin_of(config.base_url))
        self._named = frozenset(o for o in named if o is not None)
        self._local_too = config.base_url is None
        self.known: dict[tuple[str, str, int | None], Origin | None] = {}

    def allow(self, scheme: str, host: str, port: int | None) -> Origin | None:
        """Return the origin if a request there may carry tags, else None.

        ``port`` None means the scheme's own.
        """
        key = (scheme, host, port)
        if key in self.known:
            return self.known[key]
        origin = Origin(scheme, host.lower(), port or default_port(scheme))
        known = origin if self._decide(origin) else None
        if len(self.known) < ORIGINS_MAX:
            self.known[key] = known
        return known

    def _decide(self, origin: Origin) -> bool:
        if self._all or origin in self._named:
            return True
        return self._local_too and is_local(origin.host)


def is_local(host: str) -> bool:
    """Return whether ``host`` is loopback, a private address or a single-label name.

    >>> [is_local(h) for h in ("127.0.0.1", "10.1.2.3", "vllm", "api.openai.com", "8.8.8.8")]
    [True, True, True, False, False]
    """
    if not host:
        return False
    if ":" in host or host.replace(".", "").isdigit():
        import ipaddress

        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return address.is_loopback or address.is_private or address.is_link_local
    return "." not in host.rstrip(".") or host.endswith((".localhost", ".local", ".internal"))

"""The server's settings, and the one way they are read: file, environment, flags, in rising order.

A setting is a field of a frozen dataclass and nothing else: flags, variables and the keys of the
TOML file are made from the fields. The settings of a section ``[pool]`` are ``--pool-NAME`` and
``AUTELLIX_SERVER_POOL_NAME``; those of ``[serve]`` go without its name. Fields that follow
from others are named in the section's metadata, ``derived``, and are no settings.

Validation does no I/O. What the settings mean is documented where they are used.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from autellix.errors import ConfigError

from .engine.launch import Policy
from .ownership import COUNT_MAX

ENV_PREFIX: Final = "AUTELLIX_SERVER_"
MAIN_SECTION: Final = "serve"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})

ConfigT = TypeVar("ConfigT")


def setting(
    default: Any,
    help_text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    is_secret: bool = False,
) -> Any:
    """Return a dataclass field with its help and its range, both ends included.

    A secret one is never printed.
    """
    return field(
        default=default,
        metadata={
            "help": help_text,
            "minimum": minimum,
            "maximum": maximum,
            "is_secret": is_secret,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What ``autellix serve`` is asked for most."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: a free one", minimum=0, maximum=65535)
    policy: Policy = setting("adaptive", "who goes first; see docs/operations.md")
    balancer: str = setting("locality", "which engine gets a call; see docs/balancer.md")
    gateways: int = setting(
        1, "gateway processes, for when one core is full", minimum=1, maximum=COUNT_MAX
    )
    replicas: int = setting(1, "engines to start", minimum=0, maximum=64)
    launcher: typing.Literal["local", "ray"] = setting(
        "local", "who starts the engines: this process, or a Ray cluster"
    )
    engine_url: tuple[str, ...] = setting((), "http://HOST:PORT of engines that run elsewhere")
    engine_api_key: str = setting(
        "", "key of the engines that run elsewhere, if they want one", is_secret=True
    )
    state: str = setting(
        "",
        "where sessions are remembered: a file, :memory:, redis://HOST:PORT/DB; empty: a file of "
        "this address in the user's state folder",
    )
    keys: str = setting("", "file of API keys, tenant:sha256[:handicap_ms] a line")
    tls_certificate: str = setting("", "file of the certificate chain, PEM; empty: no TLS")
    tls_key: str = setting("", "file of the certificate's private key, PEM")
    log_level: typing.Literal["debug", "info", "warning", "error"] = setting(
        "info", "how much to say"
    )
    log_format: typing.Literal["text", "json"] = setting("text", "how an event is written")
    log_calls: bool = setting(False, "write a line for each call that is over")
    engine_log: bool = setting(False, "pass on what the engines print")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How engines are looked after. Times are seconds."""

    start_timeout_s: float = setting(900.0, "limit of one start", minimum=1)
    stagger_s: float = setting(2.0, "between the starts of two engines", minimum=0)
    probe_period_s: float = setting(1.0, "between two looks at an engine", minimum=0.05)
    probe_deadline_s: float = setting(4.0, "limit of one probe", minimum=0.1, maximum=10)
    frozen_floor_s: float = setting(
        15.0, "least silence that counts as frozen", minimum=0.5, maximum=3600
    )
    frozen_cap_s: float = setting(
        25.0, "longest silence that does not count as frozen", minimum=0.5, maximum=3600
    )
    frozen_kill_s: float = setting(60.0, "a frozen engine is killed after", minimum=0)
    restart_limit: int = setting(
        5, "starts in a row that may fail before an engine is given up", minimum=1
    )
    healthy_after_s: float = setting(60.0, "a life this long clears the failures", minimum=0)
    backoff_s_min: float = setting(1.0, "first wait before a restart", minimum=0.01)
    backoff_s_max: float = setting(30.0, "longest wait before a restart", minimum=0.01)
    stop_grace_s: float = setting(8.0, "time an engine has to end in good order", minimum=0)
    ray_address: str = setting("auto", "of the Ray cluster, for --launcher ray")
    ray_cpus: float = setting(1.0, "of the cluster's CPUs, for each engine", minimum=0)
    drain_s: float = setting(30.0, "time running calls have to end at a stop", minimum=0)
    kv_cache_gib: int = setting(1, "KV cache of an engine on the CPU, GiB", minimum=1)
    swap_mib: int = setting(
        0, "host memory of an engine for preempted calls' KV, MiB; 0: recompute it", minimum=0
    )


def load(
    config_type: type[ConfigT],
    *,
    document: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
) -> ConfigT:
    """Return the settings; flags win over the environment, the environment over the document.

    Args:
        config_type: A dataclass whose fields are sections, each a dataclass of settings.
        document: The parsed TOML file, empty if there is none.
        environ: The process's environment; only ``AUTELLIX_SERVER_*`` is looked at.
        flags: What `add_flags` put into the namespace; None: not given.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed.
    """
    sections = _sections(config_type)
    _refuse_unknown("section", document, sections)
    variables = {
        _variable(section, name): (section, name)
        for section, (_, items) in sections.items()
        for name in items
    }
    _refuse_unknown("variable", (k for k in environ if k.startswith(ENV_PREFIX)), variables)
    values: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for section, table in document.items():
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{section}: {table!r} is not allowed; allowed is a table of settings"
            )
        _refuse_unknown(f"setting in [{section}]", table, sections[section].items)
        values[section].update(table)
    for variable, (section, name) in variables.items():
        if variable in environ:
            values[section][name] = _FromText(environ[variable])
    for section, (_, items) in sections.items():
        for name in items:
            if (value := flags.get(_dest(section, name))) is not None:
                values[section][name] = value
    return config_type(**{name: _build(sections[name], name, values[name]) for name in sections})


def checked(section_type: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of one section, given in Python, as `load` would check them.

    Raises:
        ConfigError: an unknown name, or a value that is not allowed.
    """
    items = {f.name: f for f in dataclasses.fields(section_type)}
    _refuse_unknown("setting", values, items)
    hints = _hints(section_type)
    return {n: _checked(n, value, hints[n], items[n].metadata) for n, value in values.items()}


def add_flags(parser: argparse.ArgumentParser, config_type: type) -> None:
    """Give ``parser`` a flag for every setting; values stay text, `load` checks them."""
    for section, (section_type, items) in _sections(config_type).items():
        group = parser.add_argument_group(section)
        hints = _hints(section_type)
        for item in items.values():
            flag = "--" + _dest(section, item.name).replace("_", "-")
            shown = _shown(item.default)
            # argparse formats the help text with %
            text = f"{item.metadata.get('help', '')} (default {shown})".strip().replace("%", "%%")
            kind = _without_none(hints[item.name])
            if kind is bool:
                group.add_argument(
                    flag, action=argparse.BooleanOptionalAction, default=None, help=text
                )
            elif typing.get_origin(kind) is tuple:
                group.add_argument(flag, nargs="+", action="extend", default=None, help=text)
            else:
                group.add_argument(
                    flag, type=_FromText, default=None, help=text, metavar=_metavar(kind)
                )


def describe(config: Any) -> str:
    """Return the effective settings as TOML; keys are not shown."""
    lines = []
    for section, (_, items) in _sections(type(config)).items():
        lines.append(f"[{section}]")
        part = getattr(config, section)
        for item in items.values():
            value = getattr(part, item.name)
            is_secret = bool(value) and item.metadata.get("is_secret", False)
            lines.append(f"{item.name} = {_shown('(hidden)' if is_secret else value)}")
    return "\n".join(lines)


class _FromText(str):
    """A value from a flag or a variable: to be read as the field's type."""

    __slots__ = ()


class _Section(typing.NamedTuple):
    """A section's dataclass, and its fields that are settings of their own."""

    kind: type
    items: Mapping[str, dataclasses.Field[Any]]


def _sections(config_type: type) -> dict[str, _Section]:
    """Return section name → what is in it."""
    hints = _hints(config_type)
    sections = {}
    for outer in dataclasses.fields(config_type):
        derived = outer.metadata.get("derived", ())
        kind = hints[outer.name]
        items = {f.name: f for f in dataclasses.fields(kind) if f.name not in derived}
        sections[outer.name] = _Section(kind, items)
    return sections


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _dest(section: str, name: str) -> str:
    """Return the setting's name outside of its section."""
    return name if section == MAIN_SECTION else f"{section}_{name}"


def _variable(section: str, name: str) -> str:
    return ENV_PREFIX + _dest(section, name).upper()


def _metavar(kind: Any) -> str:
    """Return what a flag's help calls its value."""
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _refuse_unknown(what: str, given: Any, known: Any) -> None:
    """Raise if a given name is none of the known ones, and say which is the nearest."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; allowed are {', '.join(known)}"
            raise ConfigError(f"unknown {what} {name!r}{hint}")


def _build(section_type: _Section, section: str, values: Mapping[str, Any]) -> Any:
    """Return the section with its values read and checked."""
    hints = _hints(section_type.kind)
    checked = {}
    for name, value in values.items():
        label = name if section == MAIN_SECTION else f"{section}.{name}"
        checked[name] = _checked(label, value, hints[name], section_type.items[name].metadata)
    return section_type.kind(**checked)


def _checked(label: str, value: Any, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """Return ``value`` as ``kind``, or say what is allowed."""
    is_list = typing.get_origin(_without_none(kind)) is tuple
    if isinstance(value, _FromText) and is_list and value.strip().lower() != "none":
        value = [part.strip() for part in value.split(",") if part.strip()]
    result, allowed = _read(value, kind)
    low, high = metadata.get("minimum"), metadata.get("maximum")
    if (
        result is not _BAD
        and result is not None
        and ((low is not None and result < low) or (high is not None and result > high))
    ):
        result = _BAD
    if low is not None or high is not None:
        allowed += f" from {low}" if low is not None else ""
        allowed += f" up to {high}" if high is not None else ""
    if result is _BAD:
        shown = str(value) if isinstance(value, _FromText) else repr(value)
        raise ConfigError(f"{label}: {shown} is not allowed; allowed is {allowed}")
    return result


_BAD: Final = object()


def _read(value: Any, kind: Any) -> tuple[Any, str]:
    """Return (the value as ``kind`` or `_BAD`, what is allowed in words)."""
    if (inner := _without_none(kind)) is not kind:
        if isinstance(value, str) and value.strip().lower() == "none":
            return None, ""
        result, allowed = _read(value, inner)
        return result, f"{allowed}, or none"
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        plain = str(value) if isinstance(value, str) else value
        return (plain if plain in choices else _BAD), f"one of {', '.join(map(str, choices))}"
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        if not isinstance(value, Sequence) or isinstance(value, str):
            return _BAD, "a list"
        parts = [_read(_FromText(v) if isinstance(v, str) else v, inner)[0] for v in value]
        return (_BAD if _BAD in parts else tuple(parts)), f"a list of {inner.__name__}"
    if kind is bool:
        return _read_bool(value), "true or false"
    if kind in (int, float):
        return _read_number(value, kind), "a whole number" if kind is int else "a number"
    return (str(value) if isinstance(value, str) else _BAD), "text"


def _without_none(kind: Any) -> Any:
    """Return ``X`` for ``X | None``, and any other type as it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(kind) if arg is not type(None))
    return kind


def _read_bool(value: Any) -> Any:
    if isinstance(value, _FromText):
        word = value.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else _BAD
    return value if isinstance(value, bool) else _BAD


def _read_number(value: Any, kind: type) -> Any:
    """Return a finite number of the kind; true is none, and 1.5 is no whole number."""
    if isinstance(value, _FromText):
        try:
            value = kind(value)
        except ValueError:
            return _BAD
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value or value in (float("inf"), float("-inf")):
        return _BAD
    if kind is int and not isinstance(value, int):
        return _BAD
    return kind(value)


def _shown(value: Any) -> str:
    """Return a value as TOML writes it."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else str(value)

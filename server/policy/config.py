"""The settings of a policy: levels, quanta, ageing, windows; parsed once, with clear errors.

They travel as ``--additional-config '{"autellix": {…}}'``, so they are constants: vLLM makes them
part of its compile-cache key. The paper publishes none of these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from autellix.errors import ConfigError

PolicyName = Literal["fcfs", "mlfq", "plas", "atlas", "adaptive"]
Order = Literal["program", "call"]
Charge = Literal["batch", "share"]

LEVELS_MAX: Final = 32
#: On GPUs a call takes longer than on the bundled small model, so that levels are wider.
GPU_LEVEL_BOUNDS_S: Final = (5.0, 20.0, 80.0)
_LEVELED: Final = ("level_bounds_s", "quanta_s", "beta", "order")
_ADAPTIVE: Final = ("ageing", "displace", "kv_fill", "kv_most", "elders")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """How calls are ordered. Levels are counted from 1, the most urgent.

    Attributes:
        policy: ``fcfs``: by arrival; ``mlfq``: by the call's own service; ``plas``: by the sum of
            the program's service; ``atlas``: by its longest path of service; ``adaptive``:
            by what programs have left, as many at once as their KV fits (docs/policy.md).
        level_bounds_s: Upper bounds of all levels but the last, in seconds of attained service,
            growing. K levels have K - 1 bounds.
        quanta_s: Service that a call may use in a level before it is demoted, one for each level
            but the last; None: the width of the level.
        beta: A waiting call is promoted to level 1 once wait ÷ service of program and call
            together reaches this; None: never.
        order: Inside a level by arrival of the ``program`` or of the ``call``.
        window_steps: Preemption for waiting calls is reconsidered every so many steps, and at once
            when a call of a higher level arrives.
        charge: A call is charged the whole ``batch``'s step, or its ``share`` of it by tokens.
        first_step_s: Service that a program is taken to have before its first step, so that
            wait ÷ service is defined.
        cooldown_steps: A call that was preempted is no victim again for this many steps after its
            return, twice as many after each further time, up to 8 ×; 0: no protection.
        skip_steps: A waiting call that does not fit is passed over by smaller ones for at most this
            many steps; then nothing passes it until it runs.
        programs_max: Programs remembered; the longest idle ones are forgotten first.
        ageing: ``adaptive``: a program is due at the time it came plus so many times what it has
            left to run beside the others; nobody who comes later than that goes before it.
        displace: ``adaptive``: a program inside gives way to one at the door that is due earlier by
            more than so many times what that one has left, times ``ageing``, and what giving way
            costs; large: hardly ever.
        kv_fill: ``adaptive``: programs enter as long as they hold at most this share of the KV
            cache.
        kv_most: ``adaptive``: the same, with those counted who are about to give way; above it
            programs inside have to.
        elders: ``adaptive``: share of the KV cache for the programs that came first of those whom
            newcomers go before; 0: none.
        keep_gaps: ``adaptive``: a program keeps its seat while it waits for a tool, for as long as
            pays.
    """

    policy: PolicyName = "adaptive"
    level_bounds_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    quanta_s: tuple[float, ...] | None = None
    beta: float | None = 8.0
    order: Order = "program"
    window_steps: int = 4
    charge: Charge = "batch"
    first_step_s: float = 0.05
    cooldown_steps: int = 8
    skip_steps: int = 64
    programs_max: int = 100_000
    ageing: float = 8.0
    displace: float = 6.0
    kv_fill: float = 0.9
    kv_most: float = 1.0
    elders: float = 0.25
    keep_gaps: bool = True

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: names the field, the value and what is allowed.
        """
        _one_of("policy", self.policy, get_args(PolicyName))
        _one_of("order", self.order, get_args(Order))
        _one_of("charge", self.charge, get_args(Charge))
        bounds = self.level_bounds_s
        if len(bounds) >= LEVELS_MAX:
            raise ConfigError(f"level_bounds_s has {len(bounds)} bounds; at most {LEVELS_MAX - 1}")
        if list(bounds) != sorted(set(bounds)) or (bounds and bounds[0] <= 0):
            raise ConfigError(f"level_bounds_s = {bounds}: must be positive and growing (seconds)")
        if self.quanta_s is not None:
            if len(self.quanta_s) != len(bounds):
                raise ConfigError(
                    f"quanta_s has {len(self.quanta_s)} quanta for {len(bounds)} level bounds; "
                    "one for each level but the last"
                )
            if any(quantum <= 0 for quantum in self.quanta_s):
                raise ConfigError(f"quanta_s = {self.quanta_s}: must be positive (seconds)")
        if self.beta is not None and self.beta <= 0:
            raise ConfigError(f"beta = {self.beta}: must be positive, or null for no promotion")
        _at_least("window_steps", self.window_steps, 1)
        _at_least("cooldown_steps", self.cooldown_steps, 0)
        _at_least("skip_steps", self.skip_steps, 0)
        _at_least("programs_max", self.programs_max, 1)
        if self.first_step_s <= 0:
            raise ConfigError(f"first_step_s = {self.first_step_s}: must be positive (seconds)")
        for name in ("ageing", "displace"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must not be negative")
        if not 0 < self.kv_fill <= self.kv_most <= 1:
            raise ConfigError(
                f"kv_fill = {self.kv_fill}, kv_most = {self.kv_most}: must be above 0, at most 1, "
                "and kv_fill not above kv_most"
            )
        if not 0 <= self.elders <= 1:
            raise ConfigError(f"elders = {self.elders}: must be from 0 to 1")

    @property
    def levels(self) -> int:
        """K, the number of levels; 1 under ``fcfs``, 2 under ``adaptive``: inside, at the door."""
        if self.policy == "adaptive":
            return 2
        return 1 if self.policy == "fcfs" else len(self.level_bounds_s) + 1


def parse_config(values: Mapping[str, Any] | None) -> PolicyConfig:
    """Return the settings in ``values``, as they come out of JSON; absent ones are the defaults.

    Raises:
        ConfigError: an unknown name, a value of the wrong kind, one that makes no sense, or
            settings of levels without the policy that they are for.

    >>> parse_config({"policy": "atlas", "level_bounds_s": [1, 10]}).levels
    3
    """
    known = {field.name for field in fields(PolicyConfig)}
    values = dict(values or {})
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"unknown scheduler setting {unknown[0]!r}; known: {sorted(known)}")
    for name, value in values.items():
        values[name] = _parse(name, value)
    config = PolicyConfig(**values)
    unread = [name for name in _LEVELED if name in values]
    if unread and "policy" not in values:
        raise ConfigError(
            f"{unread[0]} without a policy: say which, as in "
            f'{{"policy": "plas", "{unread[0]}": ...}}; {config.policy} has no levels'
        )
    return config


def _parse(name: str, value: Any) -> Any:
    if name in ("level_bounds_s", "quanta_s"):
        if value is None and name == "quanta_s":
            return None
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} = {value!r}: must be a list of seconds")
        return tuple(_number(name, part) for part in value)
    if name in ("policy", "order", "charge"):
        return value
    if name == "beta" and value is None:
        return None
    if name == "keep_gaps":
        if not isinstance(value, bool):
            raise ConfigError(f"keep_gaps = {value!r}: must be true or false")
        return value
    if name in ("beta", "first_step_s", *_ADAPTIVE):
        return _number(name, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r}: must be a whole number")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ConfigError(f"{name}: {value!r} is not a number")
    return float(value)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(map(str, allowed))}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value}: must be at least {least}")

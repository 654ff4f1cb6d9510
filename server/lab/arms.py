"""The arms that the lab compares: vLLM's own policies, ours, and references.

Baselines are vLLM's own code. Whatever vLLM does not have is a waiting queue of the lab's
(``lab_queue``, ``clairvoyant``) under vLLM's scheduler, or AutellixScheduler with its policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from ..clock import ManualClock
from .coarse_engine import ORDERS
from .content import BlockHasher
from .cost_model import Profile
from .run_state import CallRun
from .virtual_engine import Seat

#: The members of the clairvoyant reference; see clairvoyant.py.
CLAIRVOYANT: Final = ("srpt", "srpt-smith", "srpt-admit", "pfcfs-admit")

#: Settings of an arm that are not the scheduler's: the host pool of the swap.
SWAP_SETTINGS: Final = ("swap_gib", "swap_always")
SWAP_GIB_LEAST: Final = 0.1  # some blocks of any model


class UnknownArmError(ValueError):
    """There is no arm of that name."""


class StockSeat:
    """vLLM's scheduler with one of vLLM's policies.

    Args:
        profile: Its limits.
        policy: ``fcfs`` or ``priority``; the latter gets the program's attained service in
            milliseconds as priority, as the gateway sends it to an engine without our scheduler.
        caching: Whether prefix caching is on.
    """

    promotions = 0

    def __init__(self, profile: Profile, *, policy: str = "fcfs", caching: bool = True) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        self.scheduler = scheduler_of(profile, AsyncScheduler, policy=policy, caching=caching)
        self._make = RequestMaker(profile.block_tokens)
        self._priority = policy == "priority"

    def add(self, run: CallRun, now_s: float) -> None:
        """Hand the call over."""
        priority = int(run.program.service_s * 1000) if self._priority else 0
        self.scheduler.add_request(self._make(run, now_s, priority))

    def tell(self, now_s: float) -> None:
        """Do nothing: stock vLLM's scheduler decides without a clock."""

    def before_step(self, now_s: float) -> None:
        """Do nothing: stock."""

    def after_finish(self, run: CallRun, now_s: float) -> None:
        """Do nothing: stock."""


class AutellixSeat:
    """AutellixScheduler with one of its policies, on a virtual clock.

    Args:
        profile: Its limits.
        settings: The scheduler's settings (``policy.config.PolicyConfig``), and of the swap:
            ``swap_gib``, host memory for swapped KV, and ``swap_always``, whatever it costs.
    """

    def __init__(self, profile: Profile, settings: Mapping[str, Any]) -> None:
        from ..engine.scheduler import AutellixScheduler

        self._clock = ManualClock()
        own = dict(settings)
        swap = {name: own.pop(name) for name in SWAP_SETTINGS if name in own}
        self.scheduler = scheduler_of(
            profile, AutellixScheduler, policy="priority", settings=json.dumps(own),
            swap=json.dumps(swap),
        )  # fmt: skip
        self.scheduler.clock = self._clock
        self.promotions = 0
        self._promote = self.scheduler.autellix.promote
        self.scheduler.autellix.promote = self._counted
        self._make = RequestMaker(profile.block_tokens)

    def _counted(self, now_s: float) -> list[Any]:
        promoted: list[Any] = self._promote(now_s)
        # The adaptive policy returns whoever has another place, promoted or not.
        self.promotions += sum(call.promoted for call in promoted)
        return promoted

    def add(self, run: CallRun, now_s: float) -> None:
        """Hand the call over with its program and no figure: the engine keeps its own."""
        self.tell(now_s)
        self.scheduler.add_request(self._make(run, now_s, session_id=str(run.program.number)))

    def tell(self, now_s: float) -> None:
        """Move the scheduler's clock."""
        self._clock.advance(max(0.0, now_s - self._clock.now_s()))

    def before_step(self, now_s: float) -> None:
        """Do nothing: it preempts by itself."""

    def after_finish(self, run: CallRun, now_s: float) -> None:  # noqa: ARG002
        """Say that a program is over, as the gateway does; the rest it accounts by itself."""
        if run.program.calls_left == 1:  # this call; it is taken off after us
            self.scheduler.forget((str(run.program.number),))


def scheduler_of(
    profile: Profile,
    scheduler_class: type[Any],
    *,
    policy: str = "fcfs",
    caching: bool = True,
    settings: str | None = None,
    swap: str = "{}",
) -> Any:
    """Return a scheduler with the profile's limits and no model under it."""
    from ..engine.build import build_scheduler

    config = _config(profile, policy=policy, caching=caching, settings=settings, swap=swap)
    return build_scheduler(scheduler_class, config=config)


@cache
def _config(
    profile: Profile, *, policy: str, caching: bool, settings: str | None, swap: str
) -> Any:
    from ..engine.build import build_config

    return build_config(
        kv_blocks=profile.blocks,
        block_tokens=profile.block_tokens,
        slots=profile.slots,
        step_tokens=profile.chunk_tokens,
        max_model_tokens=profile.context_tokens_max,
        prefix_caching=caching,
        async_scheduling=profile.batches_in_flight > 1,
        priority=policy == "priority",
        policy_config=None if settings is None else json.loads(settings),
        kv_transfer_config=_transfer_config(profile, **json.loads(swap)),
    )


def _transfer_config(
    profile: Profile, swap_gib: float = 0, swap_always: bool = False
) -> dict[str, Any] | None:
    from ..engine.connector_config import swap_transfer_config
    from .virtual_link import pool_bytes

    if not swap_gib:
        return None
    return swap_transfer_config(pool_bytes(profile, swap_gib), always=swap_always)


class RequestMaker:
    """Makes vLLM requests of calls."""

    def __init__(self, block_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._request = Request
        self._params = SamplingParams
        self._block_tokens = block_tokens

    def __call__(
        self, run: CallRun, now_s: float, priority: int = 0, session_id: str | None = None
    ) -> Any:
        """Return the request of a call and note it there."""
        run.request = self._request(
            request_id=run.request_id,
            prompt_token_ids=run.prompt.tokens,
            sampling_params=self._params(max_tokens=run.call.output_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=now_s,
            priority=priority,
            session_id=session_id,
            block_hasher=BlockHasher(self._block_tokens, run.prompt.known_hashes),
        )
        if run.program.content is not None:
            run.program.content.made(run.call, run.request.block_hashes)
        return run.request


Maker = Callable[[Profile], Seat]


def _program_fcfs(profile: Profile) -> Seat:
    from .clairvoyant import program_order
    from .lab_queue import OrderedSeat

    return OrderedSeat(profile, program_order, preempts=False)


def _admission(profile: Profile) -> Seat:
    from .clairvoyant import program_order, seen_working_set
    from .lab_queue import AdmittingSeat

    return AdmittingSeat(
        profile, program_order, door=lambda p: (p.arrival_s,), room=seen_working_set
    )


def _continuum(profile: Profile) -> Seat:
    from .agent_arms import ContinuumSeat

    return ContinuumSeat(profile)


def _thunder(profile: Profile) -> Seat:
    from .agent_arms import ThunderSeat

    return ThunderSeat(profile)


def _clairvoyant(name: str) -> Maker:
    def make(profile: Profile) -> Seat:
        from .clairvoyant import seat

        return seat(name, profile)

    return make


ARMS: Final[dict[str, Maker]] = {
    "fcfs": lambda profile: StockSeat(profile),
    "fcfs-nocache": lambda profile: StockSeat(profile, caching=False),
    "vllm-priority": lambda profile: StockSeat(profile, policy="priority"),
    "mlfq": lambda profile: AutellixSeat(profile, {"policy": "mlfq"}),
    "plas": lambda profile: AutellixSeat(profile, {"policy": "plas"}),
    "atlas": lambda profile: AutellixSeat(profile, {"policy": "atlas"}),
    "plas-paper": lambda profile: AutellixSeat(profile, {"policy": "plas", "order": "call"}),
    "atlas-paper": lambda profile: AutellixSeat(profile, {"policy": "atlas", "order": "call"}),
    "adaptive": lambda profile: AutellixSeat(profile, {"policy": "adaptive"}),
    "pfcfs": _program_fcfs,
    "admit": _admission,
    "continuum": _continuum,
    "thunder": _thunder,
    **{name: _clairvoyant(name) for name in CLAIRVOYANT},
}


def names() -> tuple[str, ...]:
    """Return the arms there are."""
    return tuple(ARMS)


def build(name: str, profile: Profile) -> Seat:
    """Return a fresh seat of an arm.

    Args:
        name: One of ``names()``, or ``POLICY:SETTING=VALUE;...`` for our scheduler with other
            settings, such as ``plas:beta=null;order="call"``.
        profile: The engine.

    Raises:
        UnknownArmError: there is none of that name.
    """
    if name in ARMS:
        return ARMS[name](profile)
    policy, colon, settings = name.partition(":")
    if not colon or policy not in ("mlfq", "plas", "atlas", "adaptive"):
        raise UnknownArmError(
            f"no policy {name!r}; there are {', '.join((*ARMS, *ORDERS))}, "
            "clairvoyant (the best of those that know the future), and POLICY:SETTING=VALUE"
        )
    chosen = _settings(name, settings)
    size, always = chosen.get("swap_gib", 1), chosen.get("swap_always", False)
    number = isinstance(size, int | float) and not isinstance(size, bool)
    if not number or not SWAP_GIB_LEAST <= size < 2**20:
        raise UnknownArmError(
            f"{name!r}: swap_gib = {json.dumps(size)}; it is host memory in GiB, "
            f"from {SWAP_GIB_LEAST} on"
        )
    if not isinstance(always, bool) or (always and "swap_gib" not in chosen):
        raise UnknownArmError(
            f"{name!r}: swap_always = {json.dumps(always)}; it is true or false, beside swap_gib"
        )
    return AutellixSeat(profile, {"policy": policy, **chosen})


def _settings(name: str, text: str) -> dict[str, Any]:
    try:
        return {
            key: json.loads(value)
            for key, _, value in (part.partition("=") for part in text.split(";") if part)
        }
    except json.JSONDecodeError as error:
        raise UnknownArmError(f"{name!r}: a value is not JSON: {error.msg}") from None

"""Taking an engine's pulse: probes it, reads its counters, and asks the progress watch.

Used for engines of every kind; what it finds is only an opinion, and the engine's owner acts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from ..clock import Clock
from ..types import EngineAddress
from .probe import ask, counters
from .progress import ProgressLimits, ProgressWatch

_STEPS: Final = "vllm:iteration_tokens_total_count"
_QUEUES: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Pulse(NamedTuple):
    """An engine's step counter as its control channel reports it."""

    step: float
    is_busy: bool
    age_s: float  # since the message came
    longest_step_s: float
    long_step_expected: bool


class Vitals:
    """The pulse of one engine.

    Args:
        limits: When silence counts as frozen.
        clock: Monotonic time.
        period_s: Between two looks.
        deadline_s: Of one probe; a busy front end may be slow to answer.
        pulse: The control channel's latest figures, None while there is no channel.
        in_flight: How many calls the gateway has with this engine now.
        heard: How many bytes each of those calls has had, by call; a front end too busy to answer
            a probe in time is alive as long as it sends any.
    """

    def __init__(
        self,
        limits: ProgressLimits,
        clock: Clock,
        *,
        period_s: float,
        deadline_s: float,
        pulse: Callable[[], Pulse | None],
        in_flight: Callable[[], int],
        heard: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._period_s = period_s
        self._deadline_s = deadline_s
        self._pulse = pulse
        self._in_flight = in_flight
        self._heard = heard
        self._heard_before: Mapping[str, int] | None = None  # at the last look without an answer
        self._watch = ProgressWatch(limits, now_s=clock.now_s())
        self._wanted = asyncio.Event()
        self._seen_step = -1.0

    def begin(self) -> None:
        """The engine is ready as of now: forget what was before."""
        self._watch = ProgressWatch(self._limits, now_s=self._clock.now_s())

    def look_now(self) -> None:
        """Cut the wait for the next look short."""
        self._wanted.set()

    async def look(self, address: EngineAddress, api_key: str | None) -> str | None:
        """Wait until the next look is due, look; return why the engine is frozen, None: it is not.

        A probe has a deadline, so this returns within ``period_s + 4 × deadline_s``.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wanted.wait(), self._period_s)
        self._wanted.clear()
        answer = await ask(address, "/health", api_key=api_key, deadline_s=self._deadline_s)
        is_well = answer is not None and answer.status == 200
        if is_well or (answer is None and self._is_heard()):
            self._watch.note_answer(now_s=self._clock.now_s())
        if is_well:
            self._heard_before = None
        if not self._note_pulse() and answer is not None:
            await self._note_metrics(address, api_key)
        return self._watch.frozen_reason(now_s=self._clock.now_s())

    def _is_heard(self) -> bool:
        """Return whether a call has had bytes since the last look that got no answer either."""
        before, now = self._heard_before, self._heard()
        self._heard_before = now
        return before is not None and any(count > before.get(c, 0) for c, count in now.items())

    def _note_pulse(self) -> bool:
        """Note the control channel's figures; return whether there are any.

        Figures that stopped coming count as a step counter that stands still: a channel that once
        spoke says nothing only when its engine core does nothing.
        """
        pulse = self._pulse()
        if pulse is None:
            return False
        self._watch.note_steps(
            pulse.step,
            is_busy=pulse.is_busy or pulse.age_s > self._limits.floor_s / 3,
            now_s=self._clock.now_s(),
            longest_step_s=pulse.longest_step_s,
            long_step_expected=pulse.long_step_expected,
        )
        return True

    async def _note_metrics(self, address: EngineAddress, api_key: str | None) -> None:
        """Note the step counter of a stock engine; its queues as it sees them, or as we do."""
        answer = await ask(address, "/metrics", api_key=api_key, deadline_s=self._deadline_s)
        if answer is None or answer.status != 200:
            return
        figures = counters(answer.body)
        step = figures.get(_STEPS, 0.0)
        queued = sum(figures.get(name, 0.0) for name in _QUEUES)
        # An idle engine, and an engine core that stopped before a call reached it, look the same
        # from here. So does a client that is slow to read its answer, hence a call of our own.
        is_idle = queued == 0 and step == self._seen_step
        is_suspect = is_idle and self._in_flight() > 0
        self._seen_step = step
        if is_suspect and await self._try_call(address, api_key):
            is_suspect = False
        self._watch.note_steps(step, is_busy=queued > 0 or is_suspect, now_s=self._clock.now_s())

    async def _try_call(self, address: EngineAddress, api_key: str | None) -> bool:
        """Ask for one token; return whether anything but silence came of it."""
        models = await ask(address, "/v1/models", api_key=api_key, deadline_s=self._deadline_s)
        if models is None or models.status != 200:
            return False
        try:
            name = json.loads(models.body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            return True  # it answers, in a language of its own
        call = json.dumps({"model": name, "prompt": "a", "max_tokens": 1}).encode()
        answer = await ask(
            address, "/v1/completions", api_key=api_key, deadline_s=self._deadline_s, body=call
        )
        return answer is not None

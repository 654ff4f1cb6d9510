"""Books of calls kept beside the scheduler in the plainest way, to compare its reports with."""

from __future__ import annotations

from typing import Any

from autellix.server.channel import CallReport
from autellix.server.engine.harness import Pipeline, WrongRun


class Books:
    """Service, wait and preemptions of every call, by the rules and from outside.

    Make it before the first call comes. The duration of a step is its output's time less the later
    of the output before it and its own scheduling; each call in the batch is charged all of it, or
    its share by tokens if the scheduler is set so at that moment. A call waits from when it comes,
    and from when it is no longer in ``running``, until it is there.

    Attributes:
        reports: What the scheduler reported, in its order.
        came: Every call that came.
        service_s: Seconds charged, by call.
        wait_s: Seconds waited, by call, without the wait under way.
        preemptions: vLLM's own count, by call.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._scheduler: Any = pipeline.scheduler
        self._clock = pipeline.clock
        self.reports: list[CallReport] = []
        self.came: list[str] = []
        self.service_s: dict[str, float] = {}
        self.wait_s: dict[str, float] = {}
        self.preemptions: dict[str, int] = {}
        self._waits_since_s: dict[str, float] = {}
        self._begun_s: list[float] = []
        self._last_s = 0.0
        self._scheduler.accounts.on_report = self.reports.append
        theirs = self._theirs = {}
        for name, ours in (
            ("add_request", self._add),
            ("schedule", self._schedule),
            ("update_from_output", self._update),
            ("reset_prefix_cache", self._reset),
            ("_free_request", self._free),
        ):
            theirs[name] = getattr(self._scheduler, name)
            setattr(self._scheduler, name, ours)

    def check(self, names: list[str] | None = None) -> None:
        """Compare the reports with the books.

        Args:
            names: The calls that must have been reported, once each; None: all that came.

        Raises:
            WrongRun: a call was not reported once, or with other figures.
        """
        names = self.came if names is None else names
        if sorted(report.request_id for report in self.reports) != sorted(names):
            raise WrongRun("a call was not reported exactly once")
        for report in self.reports:
            name = report.request_id
            for what, figure, right in (
                ("service", report.service_s, self.service_s.get(name, 0.0)),
                ("wait", report.wait_s, self.wait_s.get(name, 0.0)),
                ("preemptions", report.preemptions, self.preemptions[name]),
            ):
                if abs(figure - right) > 1e-6 * (1.0 + right):
                    raise WrongRun(f"{name}: {what} {figure}, not {right}")

    def _add(self, request: Any) -> None:
        if request.request_id not in self._scheduler.requests:
            self.came.append(request.request_id)
            self._waits_since_s[request.request_id] = self._clock.now_s()
        self._theirs["add_request"](request)

    def _schedule(self, *args: Any) -> Any:
        self._begun_s.append(self._clock.now_s())
        output = self._theirs["schedule"](*args)
        self._look()
        return output

    def _reset(self, *args: Any, **kwargs: Any) -> Any:
        result = self._theirs["reset_prefix_cache"](*args, **kwargs)
        self._look()
        return result

    def _update(self, output: Any, model_output: Any) -> Any:
        now_s = self._clock.now_s()
        seconds = now_s - max(self._last_s, self._begun_s.pop(0))
        self._last_s = now_s
        by_share = self._scheduler.config.charge == "share"
        for name, tokens in output.num_scheduled_tokens.items():
            if name in self._scheduler.requests:
                share = tokens / output.total_num_scheduled_tokens if by_share else 1.0
                self.service_s[name] = self.service_s.get(name, 0.0) + seconds * share
        return self._theirs["update_from_output"](output, model_output)

    def _free(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._run(request.request_id)
        self.preemptions[request.request_id] = request.num_preemptions
        return self._theirs["_free_request"](request, *args, **kwargs)

    def _look(self) -> None:
        """See who runs now and who does not."""
        running = {request.request_id for request in self._scheduler.running}
        for name in self._scheduler.requests:
            if name in running:
                self._run(name)
            else:
                self._waits_since_s.setdefault(name, self._clock.now_s())

    def _run(self, name: str) -> None:
        since_s = self._waits_since_s.pop(name, None)
        if since_s is not None:
            self.wait_s[name] = self.wait_s.get(name, 0.0) + self._clock.now_s() - since_s

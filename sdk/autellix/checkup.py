"""``autellix doctor``: proves, with one call per installed SDK, that calls carry their tags."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

from . import wire
from .config import base_url_of, origin_of
from .program import session
from .runtime import Runtime, get_runtime, set_runtime

PROBE_S: Final = 2.0


class Finding(NamedTuple):
    """What was found about one SDK."""

    package: str
    version: str
    hook: str  # the one that worked, or "none"
    carried: str  # the tags of the call, or why there are none

    @property
    def is_good(self) -> bool:
        """Whether its calls are tagged."""
        return self.hook != "none"


class Report(NamedTuple):
    """What ``doctor`` found; prints as a table."""

    enabled: bool
    findings: tuple[Finding, ...]
    server_url: str | None
    server: str

    @property
    def is_good(self) -> bool:
        """Whether every installed SDK is tagged."""
        return self.enabled and all(f.is_good for f in self.findings)

    def __str__(self) -> str:
        rows = [("SDK", "version", "hook", "what its call carried"), *self.findings]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows]
        if not self.findings:
            lines.append("no LLM client is installed here")
        lines.append("")
        lines.append(f"hooks   {'on' if self.enabled else 'off (AUTELLIX_ENABLED=0)'}")
        lines.append(f"server  {self.server_url or 'not configured'}: {self.server}")
        return "\n".join(lines)


def _call_openai(base_url: str, module: Any) -> None:
    client = module.OpenAI(base_url=base_url, api_key="doctor", max_retries=0)
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hello"}])
    client.close()


def _call_anthropic(base_url: str, module: Any) -> None:
    url = base_url.removesuffix("/v1")
    client = module.Anthropic(base_url=url, api_key="doctor", max_retries=0)
    message = {"role": "user", "content": "hello"}
    client.messages.create(model="fake", max_tokens=1, messages=[message])
    client.close()


def _call_http(base_url: str, module: Any) -> None:
    with module.Client(trust_env=False) as client:
        client.post(f"{base_url}/chat/completions", json={"messages": []})


_SDKS: Final[dict[str, Callable[[str, Any], None]]] = {
    "openai": _call_openai,
    "anthropic": _call_anthropic,
    "httpx": _call_http,
    "httpx2": _call_http,
}


def doctor(base_url: str | None = None) -> Report:
    """Send one call per installed SDK to a server in this process, and look at what it carried.

    Args:
        base_url: The real server to look for; by default the configured one. It gets one GET.
    """
    from .arming import arm
    from .testing import FakeServer

    before = get_runtime()
    url = base_url or base_url_of(before.config)
    findings = []
    with FakeServer() as fake:
        config = before.config._replace(base_url=fake.url, lifecycle=False)
        probe = Runtime(config)
        set_runtime(probe)
        try:
            if config.enabled:
                arm()
            for package, call in _SDKS.items():
                try:
                    installed = version(package)
                except PackageNotFoundError:
                    continue
                fake.clear()
                findings.append(_look(package, installed, call, fake, probe))
        finally:
            set_runtime(before)
    return Report(config.enabled, tuple(findings), url, _look_at_server(url, before))


def _look(package: str, installed: str, call: Any, fake: Any, probe: Runtime) -> Finding:
    counted = dict(probe.counts)
    try:
        module = import_module(package)
        with session(f"doctor-{package}") as probe_session:
            call(fake.base_url, module)
    except Exception as error:  # noqa: BLE001 - a broken SDK is a finding, not our failure
        return Finding(package, installed, "none", f"{type(error).__name__}: {error}"[:90])
    hooks = [h for h in ("openai", "httpx") if probe.counts.get(h, 0) > counted.get(h, 0)]
    calls = list(fake.calls)
    if not calls or calls[0].session != probe_session.id:
        return Finding(package, installed, "none", "no tags")
    names = [n for n in wire.REQUEST_HEADERS if n.lower() in calls[0].headers]
    short = " ".join(name.removeprefix("X-Autellix-").lower() for name in names)
    return Finding(package, installed, "+".join(hooks) or "none", short)


def _look_at_server(url: str | None, runtime: Runtime) -> str:
    origin = origin_of(url) if url else None
    if origin is None:
        return "set AUTELLIX_BASE_URL or OPENAI_BASE_URL"
    if not runtime.origins.allow(origin.scheme, origin.host, origin.port):
        return "gets no tags: it is neither local nor configured"
    import http.client

    secure = origin.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(origin.host, origin.port, timeout=PROBE_S)
    try:
        connection.request("GET", f"{wire.API_PREFIX}/info")
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"not reachable ({error})"
    finally:
        connection.close()
    if response.status == 200:
        return "an autellix server"
    if response.status in (401, 403):
        return "asks for a key"
    return f"reachable, but knows no sessions (HTTP {response.status}): tags only"


def main(arguments: Sequence[str]) -> int:
    """Print the report; returns 0 if every installed SDK is tagged."""
    report = doctor()
    if "--json" in arguments:
        found = [f._asdict() for f in report.findings]
        text = json.dumps({**report._asdict(), "findings": found})
    else:
        text = str(report)
    sys.stdout.write(text + "\n")
    return 0 if report.is_good else 1

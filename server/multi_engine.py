"""The Python API: the server's engines, table and balancer inside a Python program.

There is no second way to an engine: a call goes over a private unix socket to the same gateway that
`autellix serve` runs, in this process, so it is counted, placed, retried and charged as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import resource
import shutil
import tempfile
import types
from collections.abc import AsyncIterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import autellix
from autellix import wire
from autellix.errors import ConfigError

from .clock import SystemClock
from .config import ServeConfig, checked
from .engine.launch import check_vllm_args
from .fleet import Fleet
from .gateway.app import make_runner
from .gateway.client import CallError as CallError
from .gateway.client import GatewayClient, LocalGateway
from .generation import Generation
from .pool.restarts import EngineFailedError
from .sampling import request_fields, wants_deltas, wants_stream
from .server_config import ServerConfig, effective, resolve_model

CALLS_MAX: Final = 100_000
IN_FLIGHT_MAX: Final = 4096
_FILES_A_CALL: Final = 3  # both ends to the gateway, and one to the engine
_FILES_OTHERWISE: Final = 512
_CONNECT_S: Final = 60.0  # a batch comes all at once; an engine that is gone refuses at once
_SESSION: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")

Prompt = str | Sequence[int]


class TooManyCallsError(Exception):
    """So many calls are under way that another one is not taken."""


class MultiEngine:
    """Several vLLM engines behind one object; see docs/python-api.md.

    ``async with`` it: entering starts the engines and returns when one is ready, leaving ends the
    calls under way and the engines. It belongs to the event loop it was entered in.

    Args:
        model: A folder, a hub name, or as ``autellix model`` has; None: only ``engine_urls``.
        replicas: Engines to start on this machine.
        policy: Who goes first, as after ``autellix serve --policy``.
        balancer: Which engine a call goes to; None: as ``autellix serve`` has it.
        engine_urls: ``http://HOST:PORT`` of engines that run elsewhere.
        vllm_args: vLLM's own arguments for our engines.
        config: All further settings; ``model``, ``replicas``, ``policy``, ``balancer`` and
            ``engine_urls`` win over its ``serve``.
        calls_max: Calls under way at most; one more is refused with `TooManyCallsError`.
        in_flight_max: So many of them are with the engines; the others wait their turn here. None:
            4096, or fewer where the process may not open files enough.

    Raises:
        ConfigError: the arguments cannot be meant.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        replicas: int = 1,
        policy: str = "adaptive",
        balancer: str | None = None,
        engine_urls: Sequence[str] = (),
        vllm_args: Sequence[str] = (),
        config: ServerConfig | None = None,
        calls_max: int = CALLS_MAX,
        in_flight_max: int | None = None,
    ) -> None:
        check_vllm_args(tuple(vllm_args))
        if model is None and not engine_urls:
            raise ConfigError("model: nothing to run; allowed is a model, engine_urls, or both")
        for name, value in (("calls_max", calls_max), ("in_flight_max", in_flight_max)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not allowed; allowed is a number from 1")
        config = config or ServerConfig()
        in_flight_max = min(calls_max, in_flight_max or min(IN_FLIGHT_MAX, _in_flight_allowed()))
        serve = _serve_config(config.serve, replicas, policy, balancer, engine_urls)
        gateway = dataclasses.replace(
            config.gateway,
            calls_max=in_flight_max,
            calls_per_key_max=in_flight_max,
            connections_max=2 * in_flight_max,
            # its one client is this process, whose calls are bounded already
            body_bytes_total_max=in_flight_max * config.gateway.body_bytes_max,
            connect_s=max(config.gateway.connect_s, _CONNECT_S),
        )
        self._config = effective(dataclasses.replace(config, serve=serve, gateway=gateway), model)
        self._model = model
        self._model_name = resolve_model(model)[1] if model is not None else None
        self._vllm_args = tuple(vllm_args)
        self._calls_max = calls_max
        self._in_flight_max = in_flight_max
        self._calls: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(in_flight_max)
        self._stack = contextlib.AsyncExitStack()
        self._fleet: Fleet | None = None
        self._client: GatewayClient | None = None

    async def __aenter__(self) -> MultiEngine:
        """Start the engines; return when one is ready.

        Raises:
            EngineFailedError: none becomes ready.
            ConfigError: the model is not there, or files may not be opened in the number needed.
        """
        _allow_files(self._in_flight_max)
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="autellix-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            fleet = Fleet(self._config, folder, self._model, self._vllm_args, SystemClock())
            gateway = LocalGateway(make_runner(fleet.create_app()), folder / "gateway.sock")
            stack.push_async_callback(fleet.stop)
            stack.push_async_callback(gateway.stop)
            await gateway.start(self._in_flight_max)
            client = GatewayClient(folder / "gateway.sock", self._in_flight_max)
            stack.push_async_callback(client.close)
            await client.open()
            stack.push_async_callback(self._end_calls)
            await fleet.start()
            await _until_ready(fleet)
            self._fleet, self._client = fleet, client
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        """End the calls under way, then the engines."""
        try:
            await self._stack.aclose()
        finally:
            self._fleet = self._client = None

    @property
    def fleet(self) -> Fleet:
        """The engines, table and balancer: to look at, to add and remove engines, to switch.

        Raises:
            RuntimeError: outside of ``async with``.
        """
        self._entered()
        assert self._fleet is not None
        return self._fleet

    @property
    def calls_under_way(self) -> int:
        """How many calls have been begun and are not over."""
        return len(self._calls)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Any = None,
        *,
        session: str | autellix.Session | None = None,
        thread: int | None = None,
        **fields: Any,
    ) -> Generation:
        """Begin a call on a text or token ids, and return it without waiting for anything.

        Args:
            prompt: A text, or token ids.
            sampling_params: ``vllm.SamplingParams``; None: the model's own defaults.
            session: The program it belongs to. None: the `autellix.session` around, and without
                one the call is a program of its own.
            thread: The program's thread, for programs with parallel calls.
            fields: Further fields of vLLM's completion request, such as ``cache_salt``.

        Raises:
            ConfigError: an argument cannot be meant.
            TooManyCallsError: ``calls_max`` calls are under way.
        """
        text = prompt if isinstance(prompt, str) else list(prompt)
        document = {"prompt": text, **request_fields(sampling_params, is_chat=False), **fields}
        return self._begin("/v1/completions", document, sampling_params, _tags(session, thread))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Any = None,
        *,
        session: str | autellix.Session | None = None,
        thread: int | None = None,
        **fields: Any,
    ) -> Generation:
        """Begin a call on chat messages, as `generate`; ``tools`` and the like are ``fields``."""
        document = {
            "messages": list(messages),
            **request_fields(sampling_params, is_chat=True),
            **fields,
        }
        return self._begin(
            "/v1/chat/completions", document, sampling_params, _tags(session, thread)
        )

    async def end_session(self, session: str) -> None:
        """Say that a program is over, so that the engines may forget it.

        Without this its lease runs out after a minute without calls.
        """
        client = self._entered()
        with contextlib.suppress(CallError):  # there was no call of it
            await client.whole("DELETE", f"{wire.API_PREFIX}/sessions/{session}", None, {})

    def _entered(self) -> GatewayClient:
        if self._client is None:
            raise RuntimeError("MultiEngine is used outside of its `async with`")
        return self._client

    def _begin(
        self, path: str, document: dict[str, Any], params: Any, tags: Mapping[str, str]
    ) -> Generation:
        client = self._entered()
        if len(self._calls) >= self._calls_max:
            raise TooManyCallsError(
                f"calls_max: {self._calls_max} calls are under way, which is the most allowed"
            )
        document.setdefault("model", self._model_name)
        document.setdefault("return_token_ids", True)
        if document.setdefault("stream", wants_stream(params)):
            document.setdefault("stream_options", {"include_usage": True})
        generation = Generation(deltas=wants_deltas(params))
        task = asyncio.create_task(self._call(generation, client, path, document, tags))
        self._calls.add(task)
        task.add_done_callback(self._note_end)
        generation.run_as(task)
        return generation

    async def _call(
        self,
        generation: Generation,
        client: GatewayClient,
        path: str,
        document: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        """Feed a call's answer into its generation."""
        async with self._turn:
            if document.get("stream"):
                events = client.events(path, document, tags)
                async with contextlib.aclosing(_generator(events)):
                    async for event in events:
                        generation.feed(event)
            else:
                generation.feed(await client.whole("POST", path, document, tags))
            generation.finish()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # whoever awaits the call sees it; nobody has to

    async def _end_calls(self) -> None:
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


def _generator(events: AsyncIterable[Any]) -> Any:
    """Return an async generator as something that can be closed, which its type does not say."""
    return events


def _serve_config(
    serve: ServeConfig, replicas: int, policy: str, balancer: str | None, urls: Sequence[str]
) -> ServeConfig:
    """Return the settings of ``[serve]`` with the arguments of `MultiEngine`, checked."""
    values: dict[str, Any] = {"replicas": replicas, "policy": policy, "engine_url": tuple(urls)}
    if balancer is not None:
        values["balancer"] = balancer
    return dataclasses.replace(serve, **checked(ServeConfig, values))


def _tags(session: str | autellix.Session | None, thread: int | None) -> dict[str, str]:
    """Return the headers that name a call's program.

    Raises:
        ConfigError: a name that no header can carry, or a thread without a program.
    """
    if session is None and autellix.current_session() is not None:
        tags = autellix.headers()
    elif session is None:
        tags = {}
    elif isinstance(session, str):
        if not _SESSION.match(session):
            raise ConfigError(
                f"session: {session[:140]!r} is not allowed; allowed are 1 to 128 letters, "
                "digits and . _ : -"
            )
        tags = {wire.SESSION: session}
    else:
        tags = session.headers()
    if thread is not None:
        if not tags or not 0 <= thread <= 999_999_999:
            raise ConfigError(
                f"thread: {thread} is not allowed; allowed is a number from 0, of a session"
            )
        tags = {**tags, wire.THREAD: str(thread)}
    return tags


async def _until_ready(fleet: Fleet) -> None:
    """Return once an engine is ready.

    Raises:
        EngineFailedError: every engine has been given up.
    """
    ready = asyncio.create_task(fleet.pool.first_ready())
    failed = asyncio.create_task(fleet.pool.failed())
    try:
        await asyncio.wait((ready, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise EngineFailedError(failed.result())
    finally:
        ready.cancel()
        failed.cancel()


def _in_flight_allowed() -> int:
    """Return for how many calls there are files, if this process raises its own limit.

    They may all connect to the gateway in the same moment, so its queue has to hold them too.
    """
    queue = int(Path("/proc/sys/net/core/somaxconn").read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return min(IN_FLIGHT_MAX, queue)
    return max(1, min(queue, (hard - _FILES_OTHERWISE) // _FILES_A_CALL))


def _allow_files(in_flight_max: int) -> None:
    """Raise this process's limit of open files as far as so many calls need.

    Raises:
        ConfigError: it may not be raised so far.
    """
    if in_flight_max > (allowed := _in_flight_allowed()) and allowed < IN_FLIGHT_MAX:
        raise ConfigError(
            f"in_flight_max: {in_flight_max} is not allowed; allowed is up to {allowed} where "
            "`ulimit -Hn` and net.core.somaxconn are as here, since each call needs three files"
        )
    needed = in_flight_max * _FILES_A_CALL + _FILES_OTHERWISE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

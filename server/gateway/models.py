"""Which engine serves which models, so that one gateway can stand before engines of several.

Where there is more than one engine, each is asked for its ``/v1/models`` when it becomes ready and
every few seconds from then on, since adapters may be loaded while it runs. A call goes to the
engines that serve its model. A model that no engine has named goes to any: its answer is the error
that clients know. An engine that has not answered yet is taken to serve everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from autellix import wire

from ..pool import probe
from ..types import Engine, EngineAddress, Engines, EngineState

PERIOD_S: Final = 1.0
FRESH_S: Final = 5.0
DEADLINE_S: Final = 4.0
NAMES_MAX: Final = 4096  # of one engine
ENGINES_MAX: Final = 1024


class Served(NamedTuple):
    """What one engine has said."""

    address: EngineAddress
    asked_s: float
    models: dict[str, Any]  # name → as the engine shows it; empty: it did not say


class ModelIndex:
    """The models of all engines; `run` it, ask `serving`."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._served: dict[str, Served] = {}

    async def run(self) -> None:
        """Ask the engines until cancelled."""
        while True:
            await self.refresh(asyncio.get_running_loop().time())
            await asyncio.sleep(PERIOD_S)

    async def refresh(self, now_s: float) -> None:
        """Ask every ready engine that has not said lately what it serves."""
        engines = self._engines.all()
        known = {engine.engine_id for engine in engines}
        for engine_id in [i for i in self._served if i not in known]:
            del self._served[engine_id]
        if len(engines) < 2:
            return
        stale = [e for e in engines[:ENGINES_MAX] if self._is_stale(e, now_s)]
        await asyncio.gather(*(self._ask(engine, now_s) for engine in stale))

    def serving(self, model: object, engines: Sequence[Engine]) -> list[Engine]:
        """Return those of ``engines`` that may get a call of a model."""
        if not isinstance(model, str) or not any(
            model in served.models for served in self._served.values()
        ):
            return list(engines)
        return [e for e in engines if model in (models := self._of(e)) or not models]

    @property
    def is_mixed(self) -> bool:
        """Whether some engines serve other models than others do."""
        return len({frozenset(s.models) for s in self._served.values() if s.models}) > 1

    def merged(self) -> list[Any]:
        """Return every model once, as the first engine shows it."""
        models: dict[str, Any] = {}
        for engine in self._engines.all():
            if engine.state is EngineState.READY:
                for name, row in self._of(engine).items():
                    models.setdefault(name, row)
        return list(models.values())

    def _of(self, engine: Engine) -> dict[str, Any]:
        served = self._served.get(engine.engine_id)
        return served.models if served is not None else {}

    def _is_stale(self, engine: Engine, now_s: float) -> bool:
        if engine.state is not EngineState.READY:
            return False
        served = self._served.get(engine.engine_id)
        if served is None or served.address != engine.address:
            return True
        return now_s - served.asked_s >= (FRESH_S if served.models else PERIOD_S)

    async def _ask(self, engine: Engine, now_s: float) -> None:
        address = engine.address
        answer = await probe.ask(
            address, "/v1/models", api_key=engine.api_key, deadline_s=DEADLINE_S
        )
        models = _models_in(answer.body) if answer is not None and answer.status == 200 else {}
        before = self._served.get(engine.engine_id)
        if not models and before is not None and before.address == address:
            models = before.models  # a busy engine serves what it served
        self._served[engine.engine_id] = Served(address, now_s, models)


def _models_in(body: bytes) -> dict[str, Any]:
    try:
        rows = orjson.loads(body)["data"]
        return {row["id"]: row for row in rows[:NAMES_MAX] if isinstance(row["id"], str)}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}


def answer_merged(index: ModelIndex) -> web.Response:
    """Return the list of models of all engines in OpenAI's form."""
    return web.Response(
        body=orjson.dumps({"object": "list", "data": index.merged()}),
        content_type="application/json",
        headers={wire.VERSION: str(wire.PROTOCOL_VERSION)},
    )

"""Several models behind one gateway: each call goes to an engine that serves its model."""

from __future__ import annotations

from pathlib import Path

from autellix.server.gateway.models import ModelIndex
from autellix.server.gateway.state import GATEWAY
from autellix.server.types import EngineState

from .conftest import Rig, running, until
from .fake_engine import FakePool, fake_engines


def tell(rig: Rig, *models: list[str]) -> None:
    """Give each engine its models."""
    for engine, names in zip(rig.engines, models, strict=True):
        engine.models = names


async def known(rig: Rig, name: str) -> None:
    """Wait until the gateway has heard of a model."""
    index = rig.app[GATEWAY].models
    await until(lambda: any(row["id"] == name for row in index.merged()), 8.0)


async def test_calls_go_to_engines_of_their_model_and_lists_are_merged():
    """Chat, tokenize and one model's card; LoRA names are names; an unknown one is the 404."""
    async with running(3) as rig:
        tell(rig, ["big", "big-lora"], ["small", "small-lora"], ["small", "small-lora"])
        await known(rig, "small-lora")
        await known(rig, "big-lora")
        for name, owners in (("big", "e0"), ("big-lora", "e0"), ("small-lora", "e1 e2")):
            for _ in range(4):
                status, headers, _ = await rig.chat(model=name)
                assert status == 200
                assert headers["X-Autellix-Engine"] in owners
            body = {"model": name, "prompt": "hi"}
            async with rig.client.post(f"{rig.url}/tokenize", json=body) as answer:
                assert answer.status == 200
            async with rig.client.get(f"{rig.url}/v1/models/{name}") as answer:
                assert answer.status == 200
        paths = {e.engine_id: {s.path for s in e.seen} for e in rig.engines}
        assert "/v1/models/big" in paths["e0"]
        assert "/v1/models/big" not in paths["e1"] | paths["e2"]
        async with rig.client.get(f"{rig.url}/v1/models") as answer:
            rows = (await answer.json())["data"]
        assert [row["id"] for row in rows] == ["big", "big-lora", "small", "small-lora"]
        status, _, answer = await rig.chat(model="nobody's")
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert answer["error"]["param"] == "model"
        await rig.settled()


async def test_a_model_whose_engines_are_away_is_a_503_not_a_404():
    """It will be back; no other engine is asked for it."""
    async with running(2) as rig:
        tell(rig, ["big"], ["small"])
        await known(rig, "small")
        await known(rig, "big")
        rig.engines[0].state = EngineState.DEAD
        status, headers, answer = await rig.chat(model="big")
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "Retry-After" in headers
        assert rig.engines[1].seen == []
        assert (await rig.chat(model="small"))[0] == 200


async def test_engines_of_one_model_answer_for_their_list_themselves():
    """Then the bytes are an engine's, and nothing is put together."""
    async with running(2) as rig:
        tell(rig, ["m"], ["m"])
        await known(rig, "m")
        async with rig.client.get(f"{rig.url}/v1/models") as answer:
            assert [r["owned_by"] for r in (await answer.json())["data"]] == ["e0"]
        assert rig.engines[0].seen[-1].path == "/v1/models"


async def test_the_index_follows_loads_restarts_and_silence(tmp_path: Path):
    """A new adapter is seen; a busy engine serves what it served; a removed one is forgotten."""
    async with fake_engines(tmp_path, 2) as engines:
        pool = FakePool(engines)
        index = ModelIndex(pool)
        engines[0].models, engines[1].models = ["a"], ["b"]
        await index.refresh(0.0)
        assert index.is_mixed
        assert index.serving("a", engines) == [engines[0]]
        engines[0].models.append("a-lora")
        await index.refresh(1.0)
        assert index.serving("a-lora", engines) == engines, "not asked again yet: any may do"
        await index.refresh(6.0)
        assert index.serving("a-lora", engines) == [engines[0]]
        engines[0].models = []
        await index.refresh(12.0)
        assert index.serving("a", engines) == [engines[0]]
        pool.engines = [engines[1]]
        await index.refresh(18.0)
        assert [row["id"] for row in index.merged()] == ["b"]
        assert not index.is_mixed


async def test_an_engine_that_has_not_said_its_models_may_serve_any(tmp_path: Path):
    """Calls do not wait for the list."""
    async with fake_engines(tmp_path, 2) as engines:
        index = ModelIndex(FakePool(engines))
        engines[0].models = ["a"]
        await index.refresh(0.0)
        assert index.serving("a", engines) == engines
        assert index.serving("other", engines) == engines

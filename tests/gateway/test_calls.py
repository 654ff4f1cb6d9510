"""``GET /autellix/v1/calls/{id}``: each decision about a call, in words and fields."""

from __future__ import annotations

import asyncio
import hashlib

from autellix.server.channel import CallEvent

from .conftest import Rig, running
from .test_receipts import tell

EVENTS = (
    CallEvent(0.5, "run", 1, "fresh"),
    CallEvent(1.0, "demote", 2),
    CallEvent(1.5, "preempt", 2, "waiting:1+swap"),
    CallEvent(2.5, "promote", 1),
    CallEvent(3.0, "run", 1, "swap_in"),
)


async def get(rig: Rig, path: str, key: str | None = None) -> tuple[int, dict]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with rig.client.get(f"{rig.url}/autellix/v1/calls{path}", headers=headers) as response:
        return response.status, await response.json()


async def test_every_decision_is_explained(rig_of_two: Rig):
    """Why this engine, why preempted, why promoted: words, and the fields they are made of."""
    rig = rig_of_two
    _, first, _ = await rig.chat({"X-Autellix-Session": "s", "X-Autellix-Node": "plan"})
    tell(rig, events=EVENTS, first_level=1, promotions=1, stay_s=4.0)
    _, second, _ = await rig.chat({"X-Autellix-Session": "s"})
    status, call = await get(rig, f"/{first['X-Autellix-Call-Id']}")
    assert status == 200
    assert (call["node"], call["path"], call["outcome"]) == ("plan", "/v1/chat/completions", "ok")
    told = [(d["what"], d["why"]) for d in call["decisions"]]
    assert told[0] == ("place", "first")
    assert told[1:] == [
        ("enter", ""), ("run", "fresh"), ("demote", ""), ("preempt", "waiting:1+swap"),
        ("promote", ""), ("run", "swap_in"),
    ]  # fmt: skip
    preempted = call["decisions"][4]
    assert (preempted["for_level"], preempted["swapped"]) == (1, True)
    assert "a ready call of level 1" in preempted["words"]
    assert "preempted once, promoted once" in call["summary"]
    assert "sent to e0" in call["decisions"][0]["words"]
    _, call = await get(rig, f"/{second['X-Autellix-Call-Id']}")
    assert call["decisions"][0]["why"] in ("home", "moved")
    assert call["summary"].endswith("the engine has reported nothing")


async def test_a_call_that_went_elsewhere_says_so(rig_of_two: Rig):
    """The engine that refused and the one that took it are both there."""
    rig = rig_of_two
    await rig.engines[0].stop()
    _, headers, _ = await rig.chat()
    _, call = await get(rig, f"/{headers['X-Autellix-Call-Id']}")
    assert [(c["engine"], c["why"]) for c in call["choices"]] == [("e0", "first"), ("e1", "next")]
    assert "took no connection" in call["decisions"][1]["words"]


async def test_a_call_in_flight_is_explained_too(rig: Rig):
    """A call that hangs is the one that somebody asks about."""
    rig.engine.stall_at = 0
    asking = asyncio.create_task(rig.chat())
    await rig.engine.arrived.wait()
    _, listed = await get(rig, "?limit=1")
    assert [c["outcome"] for c in listed["calls"]] == [None]
    _, call = await get(rig, f"/{listed['calls'][0]['call']}")
    assert call["summary"] == "in flight, with engine e0"
    assert call["intervals"][-1]["state"] == "engine"
    rig.engine.go.set()
    await asking


async def test_a_key_sees_its_own_calls_only():
    """A call of another key is not known; the list has none of it."""
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob")}
    async with running(api_keys=tuple(f"{n}:{h}" for n, h in keys.items())) as rig:
        _, headers, _ = await rig.chat({"authorization": "Bearer ann"})
        path = f"/{headers['X-Autellix-Call-Id']}"
        assert (await get(rig, path, "ann"))[0] == 200
        assert (await get(rig, path, "bob"))[0] == 404
        assert (await get(rig, path))[0] == 401
        assert (await get(rig, "", "bob"))[1]["calls"] == []
        assert len((await get(rig, "", "ann"))[1]["calls"]) == 1


async def test_what_is_asked_wrongly_is_said(rig: Rig):
    """An unknown id, a limit that is none, and a server that keeps no book."""
    assert (await get(rig, "/0123"))[0] == 404
    assert (await get(rig, "?limit=0"))[0] == 400
    async with running(calls_remembered=0) as other:
        assert (await get(other, "/0123"))[0] == 404

"""From ``session(role=…)`` in an agent to the order of the scheduler: a role only lowers."""

from __future__ import annotations

import asyncio

import openai
import pytest

import autellix
from autellix.server.policy.base import Arrival
from autellix.server.policy.config import PolicyConfig
from autellix.server.policy.leveled import make_policy
from autellix.testing import autellix_server

from .conftest import Rig, running

__all__ = ["autellix_server"]


async def priority_of(rig: Rig, **options: object) -> int:
    """Return the priority with which the engine gets the first call of a session."""
    async with autellix.session(**options) as session:  # type: ignore[call-overload]
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="sk", max_retries=0)
        async with client:
            await client.completions.create(model="m", prompt="hi")
    program = next(p for p in rig.table.programs() if p.session == session.id)
    assert program.account.service_s < 4.0, "a role is no service that was had"
    return int(rig.engine.seen[-1].headers["x-vllm-priority"])


@pytest.mark.usefixtures("autellix_server")
async def test_a_role_reaches_the_scheduler_and_only_lowers():
    """Untagged and interactive alike, delegated behind them, background last, by the policy."""
    async with running() as rig:
        plain = await priority_of(rig)
        sent = {role: await priority_of(rig, role=role) for role in autellix.wire.ROLES}
        async with autellix.session(role="background"):
            inner = await priority_of(rig, nested="new")
        await rig.settled()
        assert await asyncio.to_thread(autellix.flush, 5)
    assert plain == sent["interactive"] == 0
    assert sent["delegated"] == 4_000
    assert sent["background"] == inner == 32_000

    policy = make_policy(PolicyConfig(policy="plas"))
    levels = {}
    for role, milliseconds in {"plain": plain, **sent}.items():
        call = policy.arrive(Arrival(role, role, service_s=milliseconds / 1000), 0.0)
        levels[role] = call.level
    assert levels["plain"] == levels["interactive"] == 1
    assert 1 < levels["delegated"] < levels["background"] == 8


@pytest.mark.usefixtures("autellix_server")
async def test_a_role_has_no_say_under_fcfs():
    """First come, first served knows no priority, so no role either."""
    async with running(policy="fcfs") as rig:
        assert await priority_of(rig, role="background") == 0
        await rig.settled()

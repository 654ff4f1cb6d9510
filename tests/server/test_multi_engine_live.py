"""The Python API on a real engine: vLLM's parameters in, vLLM's tokens out."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from autellix.server import CallError, MultiEngine
from tests.pool.clean import check_clean

pytestmark = [pytest.mark.live, pytest.mark.heavy, pytest.mark.timeout(900)]


async def test_a_real_engine_takes_vllms_parameters(tiny_model: Path):
    """Seeds, stops, logprobs and n; a switch of policy under calls; an error of vLLM's own."""
    from vllm import SamplingParams

    vllm_args = ("--max-num-seqs", "8", "--max-model-len", "512")
    async with MultiEngine(str(tiny_model), vllm_args=vllm_args) as engine:
        greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
        first, again = await asyncio.gather(
            *(engine.generate("Once upon a time", greedy, session="s") for _ in range(2))
        )
        assert len(first.token_ids) == 8
        assert first.token_ids == again.token_ids
        assert first.prompt_token_ids
        assert first.outputs[0].logprobs
        assert (first.outputs[0].finish_reason, first.finished) == ("length", True)
        by_ids = await engine.generate(first.prompt_token_ids, greedy)
        assert by_ids.token_ids == first.token_ids
        two = SamplingParams(n=2, max_tokens=4, seed=1, temperature=1.0, ignore_eos=True)
        chat = await engine.chat([{"role": "user", "content": "Hello"}], two, session="s")
        assert [len(part.token_ids) for part in chat.outputs] == [4, 4]
        stops = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=[first.token_ids[2]])
        stopped = await engine.generate("Once upon a time", stops)
        assert stopped.outputs[0].finish_reason == "stop"

        calls = [engine.generate("x", greedy, session=f"p{n}") for n in range(12)]
        await engine.fleet.set_policy("atlas", {})
        assert {len(output.token_ids) for output in await asyncio.gather(*calls)} == {8}
        async with asyncio.timeout(20):
            while engine.fleet.policy_view()["engines"] != {"e0": "atlas"}:
                await asyncio.sleep(0.05)
        with pytest.raises(CallError) as caught:
            await engine.generate("x", SamplingParams(max_tokens=100_000))
        assert caught.value.status == 400
        program = next(p for p in engine.fleet.table.programs() if p.session == "s")
        assert program.account.service_s > 0
        await check_clean(engine)

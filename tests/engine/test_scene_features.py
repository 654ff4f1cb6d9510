"""The scene with everything on that vLLM can do meanwhile; every token right. Virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from autellix.server.engine.build import make_request
from autellix.server.engine.harness import Pipeline, WrongRun, build_pipeline
from autellix.server.engine.scheduler import AutellixScheduler

BLOCK = 4
LEVELS = {"policy": "plas", "level_bounds_s": [4.0, 16.0, 64.0], "window_steps": 1, "beta": 50.0}
ADAPTIVE = {"policy": "adaptive", "window_steps": 1}
MODES = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
modes = pytest.mark.parametrize(("depth", "v2"), MODES)
#: Under adaptive there is KV to spare, so that slots are what is short.
policies = pytest.mark.parametrize(
    "policy",
    [{"policy_config": LEVELS}, {"policy_config": ADAPTIVE, "kv_blocks": 512}],
    ids=["plas", "adaptive"],
)


class Scene:
    """Two long programs run; ``shorts`` come after some steps."""

    def __init__(self, depth: int, v2: bool, **pipeline_args) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.pipeline = build_pipeline(
            AutellixScheduler,
            depth=depth,
            v2_runner=v2,
            **{"policy_config": LEVELS, **pipeline_args},
        )

    def add(self, name: str, prompt: int, answer: int, *, base: int | None = None, **args) -> None:
        base = 1000 * (1 + len(self.calls)) if base is None else base
        args.setdefault("session_id", f"program-{name}")
        request = make_request(name, range(base, base + prompt), answer, block_tokens=BLOCK, **args)
        self.pipeline.add(request)
        self.calls.append((name, prompt, answer))

    def longs(self, prompt: int = 6, steps: int = 12, **args) -> None:
        self.add("long-1", prompt, 60, **args)
        self.add("long-2", prompt, 60, **args)
        self.steps(steps)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.pipeline.step()

    def end(self, *, but: tuple[str, ...] = ()) -> list[str]:
        self.pipeline.run()
        self.pipeline.check_tokens(call for call in self.calls if call[0] not in but)
        free = self.pipeline.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.pipeline.scheduler.cache_config.num_gpu_blocks - 1
        assert not self.pipeline.scheduler.calls
        return list(self.pipeline.order())


@policies
@modes
@pytest.mark.parametrize("steps_before_abort", range(4))
def test_aborts_of_some_while_others_go_on(
    steps_before_abort: int, depth: int, v2: bool, policy: dict[str, Any]
):
    """Three of five are aborted: all is freed, and the service is folded once."""
    scene = Scene(depth, v2, **policy)
    scene.longs()
    for name in ("short-1", "short-2", "short-3"):
        scene.add(name, 6, 3)
    scene.steps(steps_before_abort)
    gone = ("long-1", "short-3", "short-1")
    scene.pipeline.abort(*gone)
    assert scene.end(but=gone)[-1] == "long-2"
    ledger = scene.pipeline.scheduler.autellix.ledger
    for name in ("long-1", "long-2", "short-2"):
        program = ledger.get(f"program-{name}")
        assert program.calls == 0
        assert program.sum_s == program.path_s > 0


@policies
@modes
def test_chunked_prefill(depth: int, v2: bool, policy: dict[str, Any]):
    """Prompts longer than a step: computed in parts, preempted in the midst, right at the end."""
    scene = Scene(depth, v2, step_tokens=16, **policy)
    scene.longs(prompt=50)
    for name in ("short-1", "short-2", "short-3"):
        scene.add(name, 20, 3)
    first = scene.end()[:3]
    if policy["policy_config"] is ADAPTIVE:
        # Who has computed a part of its prompt is due later than those alike that have not begun.
        first.sort()
    assert first == ["short-1", "short-2", "short-3"]
    assert scene.pipeline.scheduler.accounts.preemptions >= 2


@modes
def test_a_long_prompt_of_a_high_level_does_not_stall_decoding(depth: int, v2: bool):
    """Every decoding call gets its token in each step in which the prompt is computed in parts."""
    scene = Scene(depth, v2, slots=3, step_tokens=16, policy_config={**LEVELS, "beta": None})
    scene.longs(prompt=4)
    scene.add("short-1", 60, 3)
    scheduler = scene.pipeline.scheduler
    parts = 0

    def look(pipeline: Pipeline) -> None:
        nonlocal parts
        if any(r.request_id == "short-1" and r.is_prefill_chunk for r in scheduler.running):
            parts += 1

    scene.pipeline.after_step = look
    before = {name: len(scene.pipeline.tokens[name]) for name in ("long-1", "long-2")}
    steps = scene.pipeline.steps
    while len(scene.pipeline.tokens["short-1"]) == 0:
        scene.pipeline.step()
    steps = scene.pipeline.steps - steps
    assert parts >= 3
    for name, had in before.items():
        assert len(scene.pipeline.tokens[name]) - had >= steps - depth
    scene.end()


@modes
def test_prefix_caching(depth: int, v2: bool):
    """Calls share a prefix, and a victim finds its own blocks again when it returns."""
    scene = Scene(depth, v2)
    scene.longs(prompt=20, base=500)
    for name in ("short-1", "short-2", "short-3"):
        scene.add(name, 24, 3, base=500)
    assert scene.end()[:3] == ["short-1", "short-2", "short-3"]
    accounts = scene.pipeline.scheduler.accounts
    assert accounts.preemptions >= 2
    assert accounts.recomputed_tokens < 2 * 2 * BLOCK * accounts.preemptions


@modes
def test_kv_blocks_are_taken_for_higher_levels(depth: int, v2: bool):
    """Slots are free, blocks are not: the long programs give theirs up."""
    scene = Scene(depth, v2, slots=8, kv_blocks=21, max_model_tokens=72, prefix_caching=False)
    scene.add("long-1", 6, 60)
    scene.steps(45)
    scene.add("short-1", 40, 3)
    assert scene.end() == ["short-1", "long-1"]
    assert scene.pipeline.scheduler.accounts.preemptions == 1


class Grammar(StructuredOutputGrammar):
    """Accepts everything."""

    def accept_tokens(self, request_id, tokens):
        return True

    def validate_tokens(self, tokens):
        return tokens

    def rollback(self, num_tokens):
        pass

    def fill_bitmask(self, bitmask, batch_index):
        pass

    def is_terminated(self):
        return False

    def reset(self):
        pass


def structured(scene: Scene, name: str, answer: int) -> object:
    """Add a call with structured output whose grammar is not compiled yet."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    sampling = SamplingParams(
        max_tokens=answer,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(regex="a*"),
    )
    scene.add(name, 6, answer, sampling=sampling)
    request = scene.pipeline.scheduler.requests[name]
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return request


@policies
@modes
def test_structured_output(depth: int, v2: bool, policy: dict[str, Any]):
    """Nobody gives way to a call whose grammar is not ready; when it is, it goes first."""
    scene = Scene(depth, v2, **policy)
    manager = scene.pipeline.scheduler.structured_output_manager
    manager.accept_tokens = lambda request, tokens: True
    scene.longs()
    request = structured(scene, "short-1", 3)
    scene.steps(6)
    assert scene.pipeline.scheduler.accounts.preemptions == 0
    request.structured_output_request.grammar = Grammar()
    assert scene.end()[0] == "short-1"
    assert scene.pipeline.scheduler.accounts.preemptions == 1


@modes
def test_two_answers_to_one_call(depth: int, v2: bool):
    """``n = 2``: two requests of one program, one prompt; both go before the long programs."""
    scene = Scene(depth, v2)
    scene.longs()
    for name in ("0_chatcmpl-short", "1_chatcmpl-short"):
        scene.add(name, 6, 3, base=7000, session_id="program-short")
    assert sorted(scene.end()[:2]) == ["0_chatcmpl-short", "1_chatcmpl-short"]
    program = scene.pipeline.scheduler.autellix.ledger.get("program-short")
    assert program.sum_s == 2 * program.path_s


@modes
def test_calls_of_a_program_are_charged_and_sink(depth: int, v2: bool):
    """A program of many small calls falls behind a new one, though each of its calls is small."""
    scene = Scene(depth, v2, slots=1)
    for number in range(4):
        scene.add(f"old-{number}", 4, 3, session_id="old")
        scene.pipeline.run()
    for number in range(4, 6):
        scene.add(f"old-{number}", 4, 3, session_id="old")
    scene.add("new", 4, 3, session_id="new")
    assert scene.end()[4:] == ["new", "old-4", "old-5"]


@policies
@modes
def test_speculative_decoding(depth: int, v2: bool, policy: dict[str, Any]):
    """Drafts are proposed, accepted and rejected, in flight when a call is taken out too."""
    steps = {}
    for drafts in (0, 3):
        scene = Scene(depth, v2, drafts=drafts, **policy)
        scene.longs(steps=6)
        for name in ("short-1", "short-2", "short-3"):
            scene.add(name, 6, 5)
        order = scene.end()
        steps[drafts] = scene.pipeline.steps
    assert order[:3] == ["short-1", "short-2", "short-3"]
    assert scene.pipeline.scheduler.accounts.preemptions >= 2
    assert steps[3] < 0.8 * steps[0]  # drafts were accepted


@policies
@modes
def test_lora(depth: int, v2: bool, policy: dict[str, Any]):
    """No call gives way to one whose adapter has no slot; with the same adapter it does."""
    from vllm.lora.request import LoRARequest

    adapters = {n: LoRARequest(f"a{n}", n, "nowhere") for n in (1, 2)}
    scene = Scene(depth, v2, enable_lora=True, max_loras=1, **policy)
    scene.longs(lora_request=adapters[1])
    scene.add("other", 6, 3, lora_request=adapters[2])
    scene.steps(6)
    assert scene.pipeline.scheduler.accounts.preemptions == 0
    scene.add("same", 6, 3, lora_request=adapters[1])
    assert scene.end()[0] == "same"


@modes
def test_blocks_on_their_way_are_waited_for(depth: int, v2: bool):
    """With a KV connector blocks come back a step later: nobody else is taken out meanwhile."""
    scene = Scene(depth, v2, slots=8, kv_blocks=21, max_model_tokens=72, prefix_caching=False)
    scene.pipeline.scheduler.defer_block_free = depth > 1
    scene.add("long-1", 6, 34)
    scene.add("long-2", 6, 34)
    scene.steps(26)
    scene.add("short-1", 30, 3)
    assert scene.end()[0] == "short-1"
    assert scene.pipeline.scheduler.accounts.preemptions <= 2


@policies
@pytest.mark.parametrize("depth", [1, 2])
def test_a_streaming_input_session(depth: int, policy: dict[str, Any]):
    """A call whose input comes in parts is one call: charged for all of it, folded at its end."""
    scene = Scene(depth, False, **policy)
    scene.longs()

    def part(first: int, *, more: bool):
        return make_request(
            "session",
            range(first, first + 6),
            2,
            block_tokens=BLOCK,
            session_id="s",
            resumable=more,
        )

    scene.pipeline.add(part(7000, more=True))
    scene.steps(12)
    scheduler = scene.pipeline.scheduler
    used_s = scheduler.calls["session"].service_s
    assert used_s >= 2
    scheduler.add_request(part(8000, more=True))
    scene.steps(12)
    assert scheduler.calls["session"].service_s > used_s
    scheduler.add_request(part(9000, more=False))
    scene.end()
    assert scheduler.autellix.ledger.get("s").sum_s > used_s


class Readmits(AutellixScheduler):
    """A fault: the victim may come back in the step that took it out."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.waiting.hold = lambda request: None

    def _victims_for_waiting(self) -> list[int]:
        return [0] if len(self.running) > 1 else []


class FreesEarly(AutellixScheduler):
    """A fault: blocks of a running call are given back while it runs."""

    def schedule(self, throttle_prefills: bool = False):
        output = super().schedule(throttle_prefills)
        if self._steps_scheduled == 6:
            self.kv_cache_manager.free(self.running[0])
        return output


@pytest.mark.parametrize("fault", [Readmits, FreesEarly])
def test_the_harness_sees_a_fault(fault: type[AutellixScheduler]):
    """The harness is worth something only if it fails on a scheduler that is wrong."""
    pipeline = build_pipeline(fault, policy_config=LEVELS, kv_blocks=24, prefix_caching=False)
    for number in (1, 2):
        pipeline.add(
            make_request(
                f"c{number}", range(1000 * number, 1000 * number + 9), 30, block_tokens=BLOCK
            )
        )

    def late(pipeline: Pipeline) -> None:
        if pipeline.steps == 7:
            pipeline.add(make_request("c3", range(5000, 5030), 5, block_tokens=BLOCK))

    pipeline.after_step = late
    with pytest.raises(WrongRun):
        pipeline.run(300)

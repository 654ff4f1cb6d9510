"""Who a call is, for each form of vLLM's request ids, and what is refused at start."""

from __future__ import annotations

import inspect
import types

import pytest
from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from autellix.errors import ConfigError
from autellix.server.call_tag import PRIORITY_MAX, CallTag, format_call, seal_program
from autellix.server.engine import compat
from autellix.server.engine.build import build_config, build_scheduler, make_request
from autellix.server.engine.scheduler import AutellixScheduler

KEY = b"channel key"
TAG = format_call(CallTag("c0ffee00", 2, 1500, 7000, by_path=False))
BATCH = "9f0b1c5a2d3e4f60"  # vLLM's, new for each step of a beam search
SEALED = seal_program("0badcafe", KEY)


@pytest.mark.parametrize(
    "request_id",
    [
        f"chatcmpl-{TAG}-bc4ca7c3",
        f"0_chatcmpl-{TAG}-bc4ca7c3",
        f"1_chatcmpl-{TAG}-bc4ca7c3",
        f"cmpl-{TAG}-0-bc4ca7c3",
        f"cmpl-{TAG}-1-0123abcd",
        f"chatcmpl-{TAG}-{BATCH}-beam-0-bc4ca7c3",
        f"cmpl-{TAG}-0-{BATCH}-beam-12-bc4ca7c3",
    ],
)
def test_the_call_is_found_in_every_form(request_id: str):
    """Chat, n = 2, several prompts, beams: the same call, the program, and its figures."""
    request = make_request(request_id, [1], 1, session_id=SEALED, priority=2500)
    known = compat.Identity("0badcafe", "c0ffee00", 2.5, 1.5, 7000, by_path=False)
    assert compat.identify(request, KEY) == known
    tag = format_call(CallTag("c0ffee00", 2, 1500, 7000, 2.5, 9000, "0123456789ab", by_path=True))
    request = make_request(request_id.replace(TAG, tag), [1], 1, session_id=SEALED, priority=2500)
    wished = known._replace(weight=2.5, deadline_ms=9000, kind="0123456789ab", by_path=True)
    assert compat.identify(request, KEY) == wished


def test_a_tag_of_an_earlier_gateway_does_not_say_its_measure():
    """Then service and wait are in the measure of the engine's policy, not taken for sums."""
    old = format_call(CallTag("c0ffee00", 2, 1500, 7000, 2.5))
    request = make_request(f"chatcmpl-{old}-bc4ca7c3", [1], 1, session_id=SEALED, priority=2500)
    assert compat.identify(request, KEY).by_path is None


def test_a_responses_call_has_a_program_and_no_call_id():
    """The server makes its own id there; the session is still ours."""
    request = make_request("resp_0123_0-bc4ca7c3", [1], 1, session_id=SEALED, priority=1000)
    assert compat.identify(request, KEY) == compat.Identity("0badcafe", None, 1.0, 0.0, None)


def test_a_beam_has_no_figures_of_the_gateway():
    """Beams come with priority 0: their program's service is what this engine has counted."""
    request = make_request(f"chatcmpl-{TAG}-{BATCH}-beam-3-bc4ca7c3", [1], 1, session_id=SEALED)
    known = compat.Identity("0badcafe", "c0ffee00", 0.0, 1.5, 7000, by_path=False)
    assert compat.identify(request, KEY) == known


def test_vllm_has_no_best_of():
    """A field of the chat protocol that nothing reads: no call has more answers than ``n``."""
    assert "best_of" not in inspect.signature(SamplingParams).parameters
    assert not hasattr(SamplingParams(n=2), "best_of")


@pytest.mark.parametrize(
    "session_id", [None, "VICTIM", "0badcafe", seal_program("0badcafe", b"another key")]
)
def test_a_forged_program_is_not_believed(session_id: str | None):
    """Nor are the figures that came with it: it is an untagged program."""
    tag = format_call(CallTag("c0ffee00", 2, 1500, 7000, 9.0, 1, "0123456789ab", by_path=True))
    request = make_request(f"chatcmpl-{tag}-x", [1], 1, session_id=session_id, priority=-9)
    assert compat.identify(request, KEY) == compat.ANYBODY


def test_without_a_key_the_session_is_taken_as_it_is():
    """Somebody's own engine, without a gateway."""
    request = make_request("chatcmpl-1", [1], 1, session_id="run-7", priority=-5)
    assert compat.identify(request, None) == compat.Identity("run-7", None, 0.0, 0.0, None)
    assert compat.identify(make_request("chatcmpl-1", [1], 1), None).program_id is None
    huge = make_request("chatcmpl-1", [1], 1, session_id="run-7", priority=PRIORITY_MAX)
    assert compat.identify(huge, None).service_s == PRIORITY_MAX / 1000


@pytest.mark.parametrize(("said", "weight"), [("w0", 0.01), ("w999999", 100.0)])
def test_no_weight_is_beyond_what_is_allowed(said: str, weight: float):
    """Whoever wrote it: nothing is divided by nought."""
    tag = TAG.replace("-s", f"-{said}-s")
    request = make_request(f"cmpl-{tag}-0-bc4ca7c3", [1], 1, session_id="run-7")
    assert compat.identify(request, None).weight == weight


def test_an_old_vllm_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The message says what was found and what is needed."""
    monkeypatch.setattr(compat.vllm, "__version__", "0.29.2")
    with pytest.raises(ConfigError, match=r"vLLM 0\.29\.2 is too old.*0\.30 or newer"):
        compat.check_version()


def test_a_changed_vllm_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A method that is overridden here and gone there would silently never be called."""
    monkeypatch.setattr(compat, "_SEAM", ("schedule", "_gone"))
    with pytest.raises(ConfigError, match="_gone is gone"):
        compat.check_version()


def config_with(**changes):
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        model_config=types.SimpleNamespace(
            is_diffusion=False,
            is_encoder_decoder=False,
            is_multimodal_model=False,
            runner_type="generate",
        ),
        kv_transfer_config=None,
        scheduler_config=types.SimpleNamespace(async_scheduling=True),
        device_config=types.SimpleNamespace(device_type="cuda"),
    )
    for path, value in changes.items():
        setattr(getattr(config, path), *value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_config": ("data_parallel_size", 2)}, "--data-parallel-size 2"),
        ({"parallel_config": ("pipeline_parallel_size", 2)}, "--pipeline-parallel-size 2"),
        ({"model_config": ("is_encoder_decoder", True)}, "encoder-decoder models are not"),
        ({"model_config": ("is_multimodal_model", True)}, "multimodal models are not supported"),
        ({"model_config": ("is_diffusion", True)}, "diffusion models are not supported"),
        ({"model_config": ("runner_type", "pooling")}, "pooling models are not supported"),
        (
            {"scheduler_config": ("async_scheduling", False)},
            "async_scheduling = False on cuda: must be True.*--no-async-scheduling",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, tuple[str, object]], message: str):
    """At start, with the way out."""
    with pytest.raises(ConfigError, match=message):
        compat.check_config(config_with(**changes))


def test_a_cpu_has_no_async_scheduling():
    """Stock vLLM turns it off there, so it is not asked for."""
    config = config_with(
        scheduler_config=("async_scheduling", False), device_config=("device_type", "cpu")
    )
    compat.check_config(config)
    compat.check_config(config_with())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_that_does_not_exist_is_on_no_gpu(async_scheduling: bool):
    """The lab runs with one batch in flight on machines with a GPU as well."""
    config = build_config(kv_blocks=64, async_scheduling=async_scheduling)
    assert config.device_config.device_type == "cpu"
    compat.check_config(config)


def test_prefill_only_engines_are_refused():
    """A preempted call would lose the blocks that it is about to hand over."""
    config = config_with()
    config.kv_transfer_config = types.SimpleNamespace(
        kv_connector="NixlConnector", kv_role="kv_producer"
    )
    with pytest.raises(ConfigError, match="kv_producer"):
        compat.check_config(config)


def test_connectors_of_others_need_a_queue_for_calls_that_hold_blocks(monkeypatch):
    """On 0.30, which has none, a loaded call could wait for ever behind one that needs its KV."""
    config = config_with()
    config.kv_transfer_config = types.SimpleNamespace(
        kv_connector="NixlConnector", kv_role="kv_both"
    )
    monkeypatch.setattr(compat, "_HAS_SIDE_QUEUE", False)
    compat.check_config(config)
    monkeypatch.setattr(compat, "_HAS_SIDE_QUEUE", True)
    with pytest.raises(ConfigError, match="kv_connector NixlConnector"):
        compat.check_config(config)


def test_a_wrong_setting_stops_the_engine():
    """Not a default behind one's back."""
    with pytest.raises(ConfigError, match="unknown scheduler setting 'quantum'"):
        build_scheduler(AutellixScheduler, kv_blocks=64, policy_config={"quantum": 1})


@pytest.mark.parametrize("status", list(RequestStatus))
def test_only_a_call_that_could_run_at_once_has_others_give_way(status: RequestStatus):
    """Waiting and preempted ones are ready; those that wait for a grammar, KV, input or more not.

    What vLLM adds (a pause, say) is not ready until it is looked at here.
    """
    request = types.SimpleNamespace(
        request_id="r",
        status=status,
        num_stale_output_tokens=0,
        drop_stale_output=False,
        structured_output_request=types.SimpleNamespace(grammar=None),
    )
    scheduler = types.SimpleNamespace(finished_recving_kv_req_ids=set())
    ready = status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    assert compat.is_ready(request, scheduler) == ready
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduler.finished_recving_kv_req_ids.add("r")
        assert compat.is_ready(request, scheduler)
    request.num_stale_output_tokens = 1  # output of before its preemption is under way
    assert not compat.is_ready(request, scheduler)

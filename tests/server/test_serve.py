"""Putting the parts together: what is decided before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from autellix.errors import ConfigError
from autellix.server import cli, serve
from autellix.server.config import PoolConfig, ServeConfig
from autellix.server.policy.config import PolicyConfig
from autellix.server.serve import ServerConfig, place
from autellix.server.types import CallInfo, EngineAddress, EngineState


class FakeEngine:
    """An engine that is there."""

    api_key = None
    state = EngineState.READY
    address = EngineAddress("/nowhere", "", 0)

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id


ENGINES = [FakeEngine("e0"), FakeEngine("e1"), FakeEngine("e2")]


def call(home: str | None, **loads: int) -> CallInfo:
    """Return a call of a program whose last call went to ``home``."""
    return CallInfo("c", "p", 0, "/v1/chat/completions", "m", 10, None, home, loads)


def test_a_program_stays_where_it_is():
    """Its prefix is cached there, whatever the load."""
    assert place(call("e1", e1=9), ENGINES).engine_id == "e1"


def test_a_new_program_goes_where_the_fewest_calls_are():
    """The first of equals; an engine that is not in the loads has none."""
    assert place(call(None, e0=2, e2=1), ENGINES).engine_id == "e1"
    assert place(call(None), ENGINES).engine_id == "e0"


def test_a_program_whose_engine_is_away_goes_elsewhere():
    """Only ready engines are offered."""
    assert place(call("e9", e0=1, e1=1), ENGINES).engine_id == "e2"


def test_a_port_that_is_taken_is_named():
    """Before any engine starts."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = ServerConfig(serve=ServeConfig(port=port))
        with pytest.raises(ConfigError, match=f"port: 127.0.0.1:{port} cannot be listened on"):
            serve.run(config, "some/model", ())


def test_nothing_to_serve_is_refused():
    """Neither a model nor an engine elsewhere."""
    with pytest.raises(ConfigError, match="model: nothing to serve"):
        serve.run(ServerConfig(), None, ())


def test_settings_that_follow_from_others():
    """The policy is said once; without a model there are no engines of our own."""
    config = ServerConfig(serve=ServeConfig(policy="atlas", engine_url=("http://h:1",)))
    effective = serve._effective(config, None)
    assert effective.serve.replicas == 0
    assert effective.gateway.policy == "atlas"
    assert serve._effective(config, "m").serve.replicas == 1


def test_only_changed_scheduler_settings_reach_the_engine():
    """They are part of vLLM's compile-cache key."""
    assert serve._constants(PolicyConfig(policy="atlas")) == {}
    assert serve._constants(PolicyConfig(beta=None, window_steps=2)) == {
        "beta": None,
        "window_steps": 2,
    }


def test_arguments_after_two_dashes_are_vllms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """All of them, further dashes included; ours come from the file and the flags."""
    seen = []

    def run(config: ServerConfig, model: str | None, vllm_args: tuple[str, ...]) -> int:
        seen.append((config, model, vllm_args))
        return 0

    monkeypatch.setattr(serve, "run", run)
    file = tmp_path / "serve.toml"
    file.write_text("[pool]\ndrain_s = 1.5\n[scheduling]\nlevel_bounds_s = [1, 2]\n")
    argv = ["m", "--config", str(file), "--port", "0", "--scheduling-beta", "none"]
    assert cli.serve([*argv, "--", "--dtype", "auto", "--", "x"]) == 0
    ((config, model, vllm_args),) = seen
    assert (model, vllm_args) == ("m", ("--dtype", "auto", "--", "x"))
    assert config.pool == PoolConfig(drain_s=1.5)
    assert config.serve.port == 0
    assert config.scheduling.level_bounds_s == (1, 2)
    assert config.scheduling.beta is None


def test_wrong_settings_and_ctrl_c_are_exit_statuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """2 with a line that names the field, 130 without a traceback."""
    assert cli.serve(["m", "--port", "x"]) == 2
    assert "autellix serve: port: x is not allowed" in capsys.readouterr().err
    assert cli.serve(["m", "--config", str(tmp_path / "none")]) == 2
    broken = tmp_path / "broken.toml"
    broken.write_text("[")
    assert cli.serve(["m", "--config", str(broken)]) == 2
    assert "broken.toml" in capsys.readouterr().err

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "run", interrupt)
    assert cli.serve(["m"]) == 130

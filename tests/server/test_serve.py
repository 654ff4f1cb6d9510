"""Putting the parts together: what is decided before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from autellix.errors import ConfigError
from autellix.server import cli, serve
from autellix.server.config import PoolConfig, ServeConfig
from autellix.server.policy.config import PolicyConfig
from autellix.server.server_config import ServerConfig, effective, scheduler_constants


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
    derived = effective(config, None)
    assert derived.serve.replicas == 0
    assert derived.gateway.policy == "atlas"
    assert effective(config, "m").serve.replicas == 1


def test_only_changed_scheduler_settings_reach_the_engine():
    """They are part of vLLM's compile-cache key."""
    assert scheduler_constants(PolicyConfig(policy="atlas")) == {}
    on_gpu = scheduler_constants(PolicyConfig(policy="atlas"), on_cpu=False)
    assert on_gpu == {"level_bounds_s": (5.0, 20.0, 80.0)}
    narrow = PolicyConfig(level_bounds_s=(1.0, 2.0))
    assert scheduler_constants(narrow, on_cpu=False) == {"level_bounds_s": (1.0, 2.0)}
    assert scheduler_constants(PolicyConfig(beta=None, window_steps=2)) == {
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

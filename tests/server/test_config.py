"""Settings come from fields only, and what cannot be meant is refused by name."""

from __future__ import annotations

import argparse

import pytest
import tomllib

from autellix.errors import ConfigError
from autellix.server.config import add_flags, describe, load
from autellix.server.server_config import ServerConfig


def read(
    document: str = "", environ: dict[str, str] | None = None, flags: str = ""
) -> ServerConfig:
    """Load settings as the command line does."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, ServerConfig)
    return load(
        ServerConfig,
        document=tomllib.loads(document),
        environ=environ or {},
        flags=vars(parser.parse_args(flags.split())),
    )


def test_flags_win_over_variables_over_the_file():
    """The order is the one that is documented."""
    document = "[serve]\nport = 1\nhost = 'a'\nreplicas = 3\n"
    environ = {"AUTELLIX_SERVER_PORT": "2", "AUTELLIX_SERVER_HOST": "b"}
    config = read(document, environ, "--port 4")
    assert (config.serve.port, config.serve.host, config.serve.replicas) == (4, "b", 3)


def test_nothing_given_is_the_defaults():
    """An empty file, environment and command line."""
    assert read() == ServerConfig()


def test_every_kind_of_value_is_read():
    """Whole numbers, fractions, truth, choices and lists, from a flag and from a variable."""
    config = read(
        environ={
            "AUTELLIX_SERVER_ENGINE_LOG": "yes",
            "AUTELLIX_SERVER_ENGINE_URL": "http://a:1, http://b:2",
            "AUTELLIX_SERVER_POOL_DRAIN_S": "1e-1",
        },
        flags="--policy fcfs --pool-restart-limit 9",
    )
    assert config.serve.engine_log is True
    assert config.serve.engine_url == ("http://a:1", "http://b:2")
    assert config.pool.drain_s == 0.1
    assert (config.serve.policy, config.pool.restart_limit) == ("fcfs", 9)
    assert read(flags="--engine-url http://a:1 --engine-url http://b:2").serve.engine_url == (
        "http://a:1",
        "http://b:2",
    )
    assert read("[serve]\nengine_log = true\n", flags="--no-engine-log").serve.engine_log is False


@pytest.mark.parametrize(
    ("document", "environ", "flags", "says"),
    [
        ("", {}, "--port 65536", "port: 65536 is not allowed; allowed is a whole number from 0"),
        ("", {}, "--port 1.5", "port: 1.5 is not allowed"),
        ("", {}, "--port true", "port: true is not allowed"),
        ("", {}, "--policy best", "policy: best is not allowed; allowed is one of program, fcfs"),
        ("", {}, "--pool-drain-s nan", "pool.drain_s: nan is not allowed; allowed is a number"),
        ("", {"AUTELLIX_SERVER_ENGINE_LOG": "maybe"}, "", "engine_log: maybe .* true or false"),
        ("", {"AUTELLIX_SERVER_PROT": "1"}, "", "AUTELLIX_SERVER_PROT.* AUTELLIX_SERVER_PORT"),
        ("[serve]\nport = '1'", {}, "", "port: '1' is not allowed"),
        ("[serve]\nport = true", {}, "", "port: True is not allowed"),
        ("[serve]\nprot = 1", {}, "", r"unknown setting in \[serve\] 'prot'; did you mean port"),
        ("[server]\nport = 1", {}, "", "unknown section 'server'; did you mean serve"),
        ("serve = 1", {}, "", "serve: 1 is not allowed; allowed is a table"),
        ("[serve]\nengine_url = 'http://a:1'", {}, "", "engine_url: .* allowed is a list"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(document, environ, flags, says):
    """Field, value and what is allowed, from wherever it came."""
    with pytest.raises(ConfigError, match=says):
        read(document, environ, flags)


def test_other_variables_of_ours_are_nobodys_setting():
    """The SDK has variables of its own."""
    assert read(environ={"AUTELLIX_BASE_URL": "http://x"}) == ServerConfig()


def test_the_effective_settings_can_be_read_back_and_hide_keys():
    """What is printed at the start is a valid file, without secrets."""
    config = read(flags="--engine-api-key sesame --port 7")
    printed = describe(config)
    assert "sesame" not in printed
    again = read(printed.replace("(hidden)", "sesame"))
    assert again == config

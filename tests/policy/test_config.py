"""Settings are checked once, and an error says what is wrong and what is allowed."""

from __future__ import annotations

import pytest

from autellix.errors import ConfigError
from autellix.server.policy.config import PolicyConfig, parse_config


def test_nothing_is_the_default():
    """No settings, no surprise."""
    assert parse_config(None) == PolicyConfig() == parse_config({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"polcy": "plas"}, "unknown scheduler setting 'polcy'"),
        ({"policy": "srpt"}, "must be one of fcfs, mlfq, plas, atlas"),
        ({"level_bounds_s": [2, 1]}, "positive and growing"),
        ({"level_bounds_s": [0, 1]}, "positive and growing"),
        ({"level_bounds_s": "1,2"}, "must be a list of seconds"),
        ({"level_bounds_s": ["a"]}, "is not a number"),
        ({"level_bounds_s": list(range(1, 40))}, "at most 31"),
        ({"level_bounds_s": [1, 2], "quanta_s": [1]}, "one for each level but the last"),
        ({"level_bounds_s": [1], "quanta_s": [0]}, "must be positive"),
        ({"beta": 0}, "null for no promotion"),
        ({"window_steps": 0}, "at least 1"),
        ({"window_steps": 1.5}, "whole number"),
        ({"first_step_s": 0}, "must be positive"),
        ({"order": "random"}, "must be one of program, call"),
        ({"programs_max": True}, "whole number"),
        ({"displace": -1}, "displace = -1.0: must not be negative"),
        ({"kv_fill": 0.9, "kv_most": 0.8}, "kv_fill not above kv_most"),
        ({"elders": 1.5}, "elders = 1.5: must be from 0 to 1"),
        ({"elders": "much"}, "is not a number"),
        ({"beta": 4}, "beta without a policy: say which, .* adaptive has no levels"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, object], message: str):
    """The field, its value and what is allowed are in the message."""
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


def test_fcfs_has_one_level():
    """Whatever the bounds say."""
    assert parse_config({"policy": "fcfs"}).levels == 1
    assert parse_config({"policy": "mlfq", "level_bounds_s": [1, 2]}).levels == 3

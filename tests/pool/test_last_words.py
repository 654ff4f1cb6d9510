"""What is told of an engine that ended."""

from __future__ import annotations

from autellix.server.pool.last_words import LINES_SHOWN, cause_in, last_words

CORE = [
    "(EngineCore pid=7) INFO 11-30 01:00:00 [core.py:88] Initializing a V1 LLM engine",
    '(EngineCore pid=7) ERROR 11-30 01:00:01 [core.py:90]   File "x.py", line 1, in start',
    "(EngineCore pid=7) ERROR 11-30 01:00:01 [core.py:90] ValueError: No available memory for KV",
]
FRONT_END = [f"    frame {index}" for index in range(LINES_SHOWN)] + [
    "RuntimeError: Engine core initialization failed. See root cause above.",
    "UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects",
]


def test_the_cause_is_told_above_the_end_of_the_log():
    """The front end of vLLM fails after its engine core, and says only that it did."""
    words = last_words([*CORE, *FRONT_END]).splitlines()
    assert words[0] == "ValueError: No available memory for KV"
    assert words[1:] == FRONT_END[-LINES_SHOWN:]


def test_a_cause_that_is_in_sight_is_not_told_twice():
    """A short log is shown as it is; one without an error as well."""
    assert last_words(CORE) == "\n".join(CORE)
    assert last_words(["ready", "gone"]) == "ready\ngone"
    assert cause_in(["no error here"]) is None

"""IPython: cells lose or keep context variables; a started session is found either way."""

from __future__ import annotations

import pytest

pytest.importorskip("IPython")

from autellix.testing import FakeServer

SETUP = """
import autellix, openai
client = openai.OpenAI()
def ask(text):
    client.completions.create(model="fake", prompt=text)
async def aask(text):
    async with openai.AsyncOpenAI() as c:
        await c.completions.create(model="fake", prompt=text)
"""


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    yield shell
    shell.run_cell("client.close()")
    shell.history_manager.end_session()


def run(shell, cell: str) -> None:
    result = shell.run_cell(cell, store_history=False)
    result.raise_error()


def test_cells_share_the_session_that_one_of_them_started(shell, server: FakeServer):
    """Sync cells, cells with await, and running the first one again."""
    run(shell, SETUP)
    run(shell, "s = autellix.start_session('notebook')")
    run(shell, "ask('one')")
    run(shell, "await aask('two')")
    run(shell, "again = autellix.start_session('notebook'); assert again is s")
    run(shell, "ask('three')")
    run(shell, "autellix.end_session(); autellix.end_session(); assert s.state == 'ended'")
    assert len({c.session for c in server.calls}) == 1
    assert [c.text for c in server.calls] == ["one", "two", "three"]
    assert server.wait_event("DELETE").session == server.calls[0].session


def test_without_a_session_the_notebook_is_one_program(shell, server: FakeServer):
    """The process session: no line of autellix but the import."""
    run(shell, SETUP)
    run(shell, "ask('one')")
    run(shell, "await aask('two')")
    assert len({c.session for c in server.calls}) == 1
    assert server.calls[0].source == "process"

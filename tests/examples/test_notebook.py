"""The notebook runs in a real kernel, and is kept without what it printed."""

from __future__ import annotations

import json
from typing import Any

from autellix.testing import FakeServer

from .example_run import EXAMPLES, check_program, run_python

NOTEBOOK = EXAMPLES / "notebook.ipynb"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(*(o["text"] for c in notebook.cells for o in c.get("outputs", ())), sep="")
"""


def code_cells() -> list[dict[str, Any]]:
    """Return the notebook's cells of code."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_holds_no_output():
    """Nobody's answers are in the repository, and a run changes nothing that is."""
    assert [cell["outputs"] for cell in code_cells()] == [[]] * len(code_cells())
    assert {cell["execution_count"] for cell in code_cells()} == {None}


def test_the_cells_are_one_program(server: FakeServer):
    """A blocking call, three at the same time in a cell with await, a blocking call, the end."""
    assert "ended 5 calls tagged" in run_python(["-c", EXECUTE, str(NOTEBOOK)], server)
    joke, *words, goodbye = check_program(server, "notebook")
    assert sorted(call.text for call in words) == [
        f"One word for a {animal}:" for animal in ("bear", "crow", "fox")
    ]
    assert len({call.thread for call in (joke, *words, goodbye)}) == 5
    assert {call.parent.thread for call in words if call.parent} == {joke.thread}
